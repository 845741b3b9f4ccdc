"""The rollout against its closed form, and figures that keep their promises."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault
from training import figures
from training.figures import Caption

LOG = [
    *({"step": step, "loss": 2.3 / step, "learning_rate": 1e-3 / step} for step in range(1, 11)),
    *({"step": step, "eval_loss": 2.5 / step, "eval_accuracy": 1 - 1 / step} for step in (5, 10)),
]


def uniform_attention(num_layers, num_tokens, batch=2, heads=3):
    return [torch.full((batch, heads, num_tokens, num_tokens), 1 / num_tokens)] * num_layers


# --- rollout


@pytest.mark.parametrize("num_layers", [1, 2, 12])
def test_rollout_of_uniform_attention_has_its_closed_form(num_layers):
    rollout = figures.attention_rollout(
        uniform_attention(num_layers, 13), num_prefix_tokens=1, grid_size=(3, 4), from_class_token=True
    )
    expected = (1 - 2.0**-num_layers) / 13  # each layer halves what stays on the class token
    assert torch.allclose(rollout, torch.full((2, 3, 4), expected), rtol=1e-5, atol=0)


def test_rollout_multiplies_later_layers_from_the_left():
    first, second = (torch.rand(1, 2, 5, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    first, second = (attention / attention.sum(-1, keepdim=True) for attention in (first, second))
    eye = torch.eye(5)
    expected = ((second.mean(1) + eye) / 2) @ ((first.mean(1) + eye) / 2)
    rollout = figures.attention_rollout([first, second], num_prefix_tokens=1, grid_size=(2, 2), from_class_token=True)
    assert torch.allclose(rollout, expected[:, 0, 1:].reshape(1, 2, 2), atol=1e-7)


def test_rollout_finds_the_patch_that_the_class_token_attends_to():
    attention = torch.eye(7)[None, None].clone()
    attention[0, 0, 0] = torch.eye(7)[1 + 4]  # of a grid of 2 rows and 3 columns: row 1, column 1
    rollout = figures.attention_rollout([attention], num_prefix_tokens=1, grid_size=(2, 3), from_class_token=True)
    assert rollout[0].tolist() == [[0, 0, 0], [0, 0.5, 0]]


def test_rollout_without_a_class_token_is_that_of_the_mean():
    rollout = figures.attention_rollout(
        uniform_attention(3, 4), num_prefix_tokens=0, grid_size=(2, 2), from_class_token=False
    )
    assert torch.allclose(rollout, torch.full((2, 2, 2), 0.25))


def test_rollout_of_a_mean_leaves_out_what_a_class_token_beside_it_attends_to():
    attention = torch.eye(5)[None, None].clone()
    attention[0, 0, 0] = torch.eye(5)[1]  # the class token looks at the first patch, each patch at itself
    rollout = figures.attention_rollout([attention], num_prefix_tokens=1, grid_size=(2, 2), from_class_token=False)
    assert torch.allclose(rollout, torch.full((1, 2, 2), 0.25))


# --- the choice of images


def test_the_gallery_begins_with_the_surest_mistakes():
    labels = np.zeros(40, dtype=int)
    probabilities = np.stack([np.linspace(0.1, 0.9, 40), np.linspace(0.9, 0.1, 40)], axis=1)  # rows 0..19 are wrong
    rows = figures.choose_gallery_rows(labels, probabilities)
    assert rows[:6] == [0, 1, 2, 3, 4, 5]
    assert all(row >= 20 for row in rows[6:]) and len(rows) == 12


def test_the_gallery_shows_as_many_classes_as_fit():
    labels = np.repeat(np.arange(12), 5)
    rows = figures.choose_gallery_rows(labels, np.eye(12)[labels])
    assert sorted(labels[rows]) == list(range(12))


@pytest.mark.parametrize("num_samples", [1, 5])
def test_a_small_split_is_shown_whole(num_samples):
    labels = np.arange(num_samples) % 2
    rows = figures.choose_gallery_rows(labels, np.tile([0.6, 0.4], (num_samples, 1)))
    assert sorted(rows) == list(range(num_samples))


def test_a_model_that_is_always_wrong_fills_the_gallery():
    assert len(figures.choose_gallery_rows(np.ones(30, dtype=int), np.tile([0.6, 0.4], (30, 1)))) == 12


# --- pictures


def draw_gallery(path, sizes, captions):
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    maps = [generator.random((4, 4)) for _ in sizes]
    figures.draw_attention_rollout(images, maps, captions, path)


FIGURES = {
    "curves": lambda path: figures.draw_learning_curves(LOG, path, "digits"),
    "matrix": lambda path: figures.draw_confusion_matrix(np.eye(3, dtype=int) * 9 + 1, ["a", "b", "c"], path),
    "gallery": lambda path: draw_gallery(path, [(28, 28)] * 2, [Caption("a", "b", 0.7)] * 2),
}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_a_figure_is_the_same_bytes_when_drawn_again(tmp_path, draw):
    draw(tmp_path / "first.png")
    draw(tmp_path / "second.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


@pytest.mark.parametrize("sizes", [[(300, 200)] * 12, [(20, 60), (60, 20)]], ids=["noise", "two"])
def test_a_gallery_stays_below_400_kb_whatever_it_shows(tmp_path, sizes):
    captions = [Caption("cat", "dog", 0.7), *[Caption("cat", "cat", 1.0)] * (len(sizes) - 1)]
    draw_gallery(tmp_path / "gallery.png", sizes, captions)
    assert (tmp_path / "gallery.png").stat().st_size < 400_000


@pytest.mark.parametrize("num_classes", [2, 100, 300])
def test_a_confusion_matrix_of_any_size_stays_below_400_kb(tmp_path, num_classes):
    matrix = np.random.default_rng(0).integers(0, 100, (num_classes, num_classes))
    names = [f"$a long name of class {label}" for label in range(num_classes)]
    figures.draw_confusion_matrix(matrix, names, tmp_path / "matrix.png")
    with Image.open(tmp_path / "matrix.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300
    assert (tmp_path / "matrix.png").stat().st_size < 400_000


def colored_share(path, color):
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return (np.abs(pixels - np.array(color)).sum(axis=2) < 12).mean()


ORANGE = (0xD5, 0x5E, 0x00)


def test_wrong_answers_are_drawn_first_and_apart(tmp_path):
    captions = [Caption("a", "a", 0.9)] * 8 + [Caption("a", "b", 0.6)] * 4
    generator = np.random.default_rng(0)
    images = [np.zeros((8, 8, 3), np.uint8)] * 12
    figures.draw_attention_rollout(images, list(generator.random((12, 2, 2))), captions, tmp_path / "gallery.png")
    pixels = np.asarray(Image.open(tmp_path / "gallery.png").convert("RGB")).astype(int)
    rows = np.flatnonzero((np.abs(pixels - np.array(ORANGE)).sum(axis=2) < 12).any(axis=1))
    headline = rows[rows < len(pixels) // 6]
    assert len(headline) > 5


def test_a_history_without_evaluation_draws_no_evaluation_curve(tmp_path):
    figures.draw_learning_curves([entry for entry in LOG if "loss" in entry], tmp_path / "without.png", "digits")
    figures.draw_learning_curves(LOG, tmp_path / "with.png", "digits")
    assert colored_share(tmp_path / "without.png", ORANGE) == 0 < colored_share(tmp_path / "with.png", ORANGE)


@pytest.mark.parametrize("log", [[], [{"step": 1, "loss": float("nan")}], [{"step": 1, "loss": 2.3}]], ids=str)
def test_a_history_with_nothing_to_join_still_gives_a_picture(tmp_path, log):
    figures.draw_learning_curves(log, tmp_path / "curves.png", "costs $5")
    assert Image.open(tmp_path / "curves.png").format == "PNG"


def test_attended_places_are_tinted_and_others_stay_grey():
    attention = np.zeros((4, 4))
    attention[0, 0] = 1
    overlay = figures._overlay(np.full((160, 160, 3), 100, np.uint8), attention).astype(int)
    red_excess = overlay[..., 0] - overlay[..., 2]
    assert red_excess[10, 10] > 150 and red_excess[80:, 80:].max() <= 1  # the tail of the blur


def test_small_images_are_enlarged_by_whole_pixels():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(figures._thumbnail(image)[10::20, 10::20], image)


def test_a_figure_that_cannot_be_written_is_a_fault_of_the_environment(tmp_path):
    (tmp_path / "figures").write_text("a file in the way")
    with pytest.raises(EnvironmentFault, match=r"figures/curves\.png"):
        figures.draw_learning_curves(LOG, tmp_path / "figures" / "curves.png", "digits")


def test_pictures_come_in_fewer_colours_before_fewer_pixels(tmp_path, monkeypatch):
    draw_gallery(tmp_path / "full.png", [(28, 28)] * 4, [Caption("a", "a", 1.0)] * 4)
    monkeypatch.setattr(figures, "MAX_FIGURE_BYTES", (tmp_path / "full.png").stat().st_size - 1)
    draw_gallery(tmp_path / "small.png", [(28, 28)] * 4, [Caption("a", "a", 1.0)] * 4)
    full, small = (Image.open(io.BytesIO((tmp_path / name).read_bytes())) for name in ("full.png", "small.png"))
    assert (small.size, small.mode) == (full.size, "P")

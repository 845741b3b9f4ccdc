"""Other image sizes, patch sizes and channels: positions and patch kernel are resampled, never drawn anew."""

import copy
import logging

import numpy as np
import pytest
import scipy.ndimage
import torch
from fixtures_modeling import TINY, random_pixels, tiny_classifier
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForImageClassification, ViTConfig, ViTModel

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch.embeddings_vit_scratch import resize_channels, resize_patch_kernel
from modeling_vit_scratch.positions_vit_scratch import resize_positions

EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 0, "atol": 1e-10}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# Positions.


def official_positions(
    positions: Tensor, old: tuple[int, int], new: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """As the official code resizes them, by scipy's zoom of order 1; here the two axes may differ."""
    prefix, grid = positions[:, :num_prefix_tokens], positions[0, num_prefix_tokens:].unflatten(0, old).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    return torch.cat((prefix, torch.from_numpy(zoomed).flatten(0, 1)[None]), dim=1)


# Pairs at which scipy's rounding keeps the last coordinate inside (224 to 384 pixels at patch 16 and 32, and others).
SAFE_PAIRS = [
    ((14, 14), (24, 24)),
    ((14, 14), (32, 32)),
    ((16, 16), (37, 37)),
    ((7, 7), (12, 12)),
    ((24, 24), (14, 14)),
    ((7, 14), (12, 24)),
]


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
@pytest.mark.parametrize(("old", "new"), SAFE_PAIRS, ids=str)
def test_positions_are_those_of_the_official_code(old, new, num_prefix_tokens):
    positions = draw(1, num_prefix_tokens + old[0] * old[1], 8)
    resized = resize_positions(
        positions, old, new, num_prefix_tokens=num_prefix_tokens, interpolation="bilinear_corners"
    )
    torch.testing.assert_close(resized, official_positions(positions, old, new, num_prefix_tokens), **CLOSE)


def test_two_by_two_positions_become_thirds():
    positions = torch.arange(4.0).view(1, 4, 1)
    resized = resize_positions(positions, (2, 2), (4, 4), num_prefix_tokens=0, interpolation="bilinear_corners")
    expected = torch.tensor([[0.0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]) / 3
    torch.testing.assert_close(resized.view(4, 4), expected)


def test_the_last_row_stays_where_the_official_code_loses_it():
    positions = 1 + draw(1, 28 * 28, 4).abs()  # B/8 from 224 to 384 pixels
    official = official_positions(positions, (28, 28), (48, 48), 0).view(48, 48, 4)
    ours = resize_positions(positions, (28, 28), (48, 48), num_prefix_tokens=0, interpolation="bilinear_corners")
    assert not official[-1].any()
    assert not official[:, -1].any()
    torch.testing.assert_close(ours.view(48, 48, 4)[:-1, :-1], official[:-1, :-1], **CLOSE)
    torch.testing.assert_close(ours.view(48, 48, 4)[-1, -1], positions[0, -1], **CLOSE)


@pytest.mark.parametrize("new", [6, 2, 7])
def test_bicubic_positions_are_those_of_transformers(new):
    theirs = ViTModel(ViTConfig(**TINY)).double()
    positions = draw(1, 17, 32)
    theirs.embeddings.position_embeddings.data.copy_(positions)
    tokens = torch.zeros(1, new * new + 1, 32)
    expected = theirs.embeddings.interpolate_pos_encoding(tokens, new * 8, new * 8)
    resized = resize_positions(positions, (4, 4), (new, new), num_prefix_tokens=1, interpolation="bicubic")
    torch.testing.assert_close(resized, expected.detach(), **CLOSE)


@pytest.mark.parametrize("interpolation", ["bilinear_corners", "bicubic"])
def test_the_same_grid_keeps_positions_bit_by_bit(interpolation):
    positions = draw(1, 1 + 5 * 7, 8).float()
    resized = resize_positions(positions, (5, 7), (5, 7), num_prefix_tokens=1, interpolation=interpolation)
    torch.testing.assert_close(resized, positions, **EXACT)


@pytest.mark.parametrize("interpolation", ["bilinear_corners", "bicubic"])
def test_rows_and_columns_are_not_confused(interpolation):
    rows = torch.arange(3.0).view(3, 1).expand(3, 5).reshape(1, 15, 1)  # depends on the row alone
    resized = resize_positions(rows, (3, 5), (6, 4), num_prefix_tokens=0, interpolation=interpolation).view(6, 4)
    torch.testing.assert_close(resized, resized[:, :1].expand(6, 4))
    assert (resized[1:, 0] >= resized[:-1, 0]).all()


# The patch kernel.


def resize_patches(patches: Tensor, new: tuple[int, int]) -> Tensor:
    return F.interpolate(patches, size=new, mode="bilinear", align_corners=False, antialias=True)


@pytest.mark.parametrize("new", [(16, 16), (12, 12), (9, 8), (8, 20)], ids=str)
def test_a_grown_kernel_answers_a_grown_patch_as_the_old_one_the_old_patch(new):
    kernel, patches = draw(5, 3, 8, 8), draw(4, 3, 8, 8)
    grown = torch.einsum("dcpq,bcpq->bd", resize_patch_kernel(kernel, new), resize_patches(patches, new))
    torch.testing.assert_close(grown, torch.einsum("dcpq,bcpq->bd", kernel, patches), **CLOSE)


@pytest.mark.parametrize("new", [(4, 4), (6, 5)], ids=str)
def test_a_shrunk_kernel_is_the_best_one_for_random_patches(new):
    kernel = draw(1, 1, 8, 8)
    basis = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    shrunk_basis = resize_patches(basis, new).flatten(1).numpy()
    expected, *_ = np.linalg.lstsq(shrunk_basis, kernel.flatten().numpy(), rcond=None)
    torch.testing.assert_close(resize_patch_kernel(kernel, new).flatten(), torch.from_numpy(expected), **CLOSE)


@pytest.mark.parametrize("patch_size", [16, [16, 8], [12, 20]], ids=str)
def test_a_model_of_larger_patches_gives_the_logits_of_the_smaller_on_grown_patches(patch_size):
    model = tiny_classifier(dtype=torch.float64)
    pixels = random_pixels(dtype=torch.float64)
    logits = model(pixels).logits
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    patches = pixels.unfold(2, 8, 8).unfold(3, 8, 8)  # (B, C, 4, 4, 8, 8)
    grown = resize_patches(patches.flatten(0, 3)[:, None], (height, width)).view(2, 3, 4, 4, height, width)
    model.resize_input(patch_size=patch_size, image_size=[4 * height, 4 * width])
    torch.testing.assert_close(model(grown.transpose(3, 4).reshape(2, 3, 4 * height, -1)).logits, logits, **CLOSE)


# Channels.


def test_one_channel_answers_as_three_equal_ones():
    kernel, grey = draw(5, 3, 8, 8), draw(2, 1, 32, 32)
    expected = F.conv2d(grey.expand(-1, 3, -1, -1), kernel, stride=8)
    torch.testing.assert_close(F.conv2d(grey, resize_channels(kernel, 1), stride=8), expected, **CLOSE)


@pytest.mark.parametrize("num_channels", [2, 3, 4])
def test_equal_channels_answer_as_the_one_they_are_made_of(num_channels):
    kernel, grey = draw(5, 1, 8, 8), draw(2, 1, 32, 32)
    tiled = F.conv2d(grey.expand(-1, num_channels, -1, -1), resize_channels(kernel, num_channels), stride=8)
    torch.testing.assert_close(tiled, F.conv2d(grey, kernel, stride=8), **CLOSE)


def test_channels_are_tiled_in_turn_and_scaled():
    kernel = draw(5, 3, 8, 8)
    torch.testing.assert_close(resize_channels(kernel, 4), kernel[:, [0, 1, 2, 0]] * 3 / 4, **EXACT)


def test_doubled_channels_answer_as_the_single_ones():
    kernel, pixels = draw(5, 3, 8, 8), draw(2, 3, 32, 32)
    doubled = F.conv2d(torch.cat((pixels, pixels), dim=1), resize_channels(kernel, 6), stride=8)
    torch.testing.assert_close(doubled, F.conv2d(pixels, kernel, stride=8), **CLOSE)


# Whole models, at load and in place.

CHANGES = {
    "image": {"image_size": 64},
    "not square": {"image_size": [48, 64]},
    "patch": {"patch_size": 16},
    "patch and image": {"patch_size": [4, 8], "image_size": [24, 64]},
    "one channel": {"num_channels": 1},
    "four channels": {"num_channels": 4},
    "all": {"image_size": 48, "patch_size": 16, "num_channels": 1},
}
LOADERS = [ViTScratchForImageClassification, AutoModelForImageClassification, ViTScratchModel, AutoModel]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_sizes_given_at_load_resize_the_stored_model(tmp_path, loader, changes):
    model = tiny_classifier()
    model.save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path, **changes)
    model.resize_input(**changes)
    expected = model.state_dict() if hasattr(loaded, "classifier") else model.vit.state_dict()
    torch.testing.assert_close(loaded.state_dict(), expected, **EXACT)
    assert {name: getattr(loaded.config, name) for name in changes} == changes


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_resized_model_takes_its_new_input_and_survives_saving(tmp_path, changes):
    model = tiny_classifier()
    model.resize_input(**changes)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    height, width = loaded.config.image_height_width
    pixels = random_pixels(height=height, width=width, channels=loaded.config.num_channels)
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits, **EXACT)


def test_sizes_given_by_a_config_resize_the_stored_model(tmp_path):
    model = tiny_classifier()
    model.save_pretrained(tmp_path)
    config = ViTScratchConfig.from_pretrained(tmp_path, image_size=64)
    loaded = ViTScratchForImageClassification.from_pretrained(tmp_path, config=config)
    model.resize_input(image_size=64)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), **EXACT)


def test_sizes_and_a_new_head_are_given_at_one_load(tmp_path):
    model = tiny_classifier()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(
        tmp_path, image_size=64, num_labels=5, ignore_mismatched_sizes=True
    )
    model.resize_input(image_size=64)
    torch.testing.assert_close(loaded.vit.state_dict(), model.vit.state_dict(), **EXACT)
    assert not loaded.classifier.weight.any()


def test_the_stored_sizes_given_again_change_nothing(tmp_path, caplog):
    model = tiny_classifier()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="modeling_vit_scratch"):
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path, image_size=32, patch_size=8, num_channels=3)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), **EXACT)
    assert "resized" not in caplog.text


@pytest.mark.parametrize("loader", LOADERS)
def test_resizing_at_load_is_said(tmp_path, caplog, loader):
    tiny_classifier().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="modeling_vit_scratch"):
        loader.from_pretrained(tmp_path, image_size=64, num_channels=1)
    assert "image_size 32 -> 64" in caplog.text
    assert "num_channels 3 -> 1" in caplog.text


@pytest.mark.parametrize("loader", LOADERS)
def test_sizes_that_contradict_the_stored_ones_are_refused(tmp_path, loader):
    tiny_classifier().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassClassValidationError, match="image_size=32 must be a multiple of patch_size=12"):
        loader.from_pretrained(tmp_path, patch_size=12)


@pytest.mark.parametrize("fields", [{"pooling": "mean"}, {"position_interpolation": "bicubic"}], ids=str)
def test_other_kinds_of_model_are_resized_as_their_config_says(tmp_path, fields):
    model = tiny_classifier(**fields)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, image_size=[48, 16])
    expected = resize_positions(
        model.vit.embeddings.position_embeddings.detach(),
        (4, 4),
        (6, 2),
        num_prefix_tokens=0 if "pooling" in fields else 1,
        interpolation=fields.get("position_interpolation", "bilinear_corners"),
    )
    torch.testing.assert_close(loaded.embeddings.position_embeddings.detach(), expected, **EXACT)


def test_resizing_in_place_leaves_a_frozen_tensor_frozen():
    model = tiny_classifier()
    model.requires_grad_(False)
    model.resize_input(image_size=64, patch_size=16, num_channels=1)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_resizing_in_place_keeps_what_has_no_need_to_change():
    model = tiny_classifier()
    before = copy.deepcopy(model.state_dict())
    model.resize_input(num_channels=1)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"vit.embeddings.patch_embeddings.projection.weight"}


def test_resizing_the_encoder_of_a_classifier_is_resizing_the_classifier():
    model = tiny_classifier()
    model.vit.resize_input(image_size=64)
    assert model.config.image_size == 64


def test_a_refused_resize_leaves_the_model_alone():
    model = tiny_classifier()
    weights, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    with pytest.raises(StrictDataclassClassValidationError, match="multiple of patch_size"):
        model.resize_input(patch_size=12)
    torch.testing.assert_close(model.state_dict(), weights, **EXACT)
    assert model.config.to_dict() == config


def test_a_resized_model_trains():
    model = tiny_classifier().train()
    model.resize_input(image_size=64, patch_size=16, num_channels=1)
    model(random_pixels(height=64, width=64, channels=1), labels=torch.tensor([0, 1])).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

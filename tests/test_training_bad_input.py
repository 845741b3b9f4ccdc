"""What a user gets wrong ends with the right exit code and one line; nothing half-written is left."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fixtures_data import idx_bytes, write_class_folders, write_image, write_truncated_jpeg
from fixtures_training import (
    call,
    files_below,
    finetune_flags,
    flags,
    interrupted_copy,
    pretrain_flags,
    pretrained,
    refused,
    run,
    short_run,
)

from modeling_vit_scratch import ViTScratchForImageClassification


def pretrain(tmp_path: Path, **fields) -> list[str]:
    return pretrain_flags(**{"output_dir": tmp_path / "run", **fields})


def on_folder(tmp_path: Path, folder: Path, **fields) -> list[str]:
    return pretrain(tmp_path, **{"dataset_name": None, "data_dir": folder, **fields})


def refused_leaving_nothing(tmp_path: Path, argv: list[str]) -> str:
    """The error line of a command that must not leave a run folder."""
    line = refused(*argv)
    assert not (tmp_path / "run").exists()
    return line


def failed_leaving_nothing(tmp_path: Path, argv: list[str], code: int = 2) -> str:
    """The same of one that fails in training, when it has printed its recipe."""
    outcome = call(*argv)
    assert outcome.code == code, outcome.err
    assert not (tmp_path / "run").exists()
    return outcome.error_line


def broken_image(path: Path, kind: str) -> Path:
    """A file that cannot be decoded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "truncated":
        return write_truncated_jpeg(path)
    path.write_bytes(b"" if kind == "empty" else b"this is a text file, whatever its name says")
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """Eight images in each of two classes, 20 by 12 pixels."""
    root = write_class_folders(tmp_path / "animals", {"cat": 8, "dog": 8}, suffix="jpg")
    for path in root.rglob("*.jpg"):
        write_image(path, size=(20, 12))
    return root


# Settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "learning_rat: 1",
            "recipe.yaml:2: learning_rat is no field of vit-scratch pretrain; did you mean learning_rate?",
        ),
        ("max_steps: 4\nmax_steps: 5", "recipe.yaml:3: max_steps stands a second time"),
        ("max_steps: soon", "recipe.yaml:2: max_steps: 'soon' must be int"),
    ],
)
def test_a_bad_recipe_line_is_named(tmp_path, line, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"dataset_name: digits\n{line}\n")
    assert message in refused_leaving_nothing(
        tmp_path, ["pretrain", "--config", recipe, "--output_dir", tmp_path / "run"]
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_size": 10}, ["image_size", "patch_size", "10", "4"]),
        ({"image_size": 2}, ["image_size", "patch_size", "2", "4"]),
        ({"num_attention_heads": 3}, ["hidden_size=16", "num_attention_heads=3"]),
        ({"hidden_dropout_prob": 1.5}, ["hidden_dropout_prob", "1.5"]),
        ({"variant": "X/16"}, ["X/16", "B/16"]),
        ({"num_channels": 2}, ["num_channels", "2"]),
        ({"image_mean": [0.5, 0.5, 0.5]}, ["image_mean"]),
        ({"crop_pct": 2}, ["crop_pct", "2"]),
        ({"crop_padding": 2, "crop_scale_min": 0.5}, ["crop_padding=2", "crop_scale_min=0.5"]),
        ({"eval_steps": 2}, ["eval_steps=2", "validation_fraction"]),
        ({"load_best_model_at_end": True}, ["load_best_model_at_end", "eval_steps"]),
        ({"output_dir": None}, ["--output_dir"]),
        ({"dataset_name": None}, ["dataset_name", "data_dir"]),
        ({"data_dir": "here"}, ["dataset_name=digits", "data_dir=here"]),
        ({"classes": ["1", "eleven"]}, ["'eleven'", "0, 1, 2"]),
        ({"classes": ["1"]}, ["at least two"]),
        ({"seed": 2**32}, ["seed=4294967296"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_named_with_their_values(tmp_path, fields, words):
    line = refused_leaving_nothing(tmp_path, pretrain(tmp_path, **fields))
    assert [word for word in words if word not in line] == []


def test_a_dataset_that_cannot_be_reached_is_the_environments_fault(tmp_path):
    outcome = call(*pretrain(tmp_path, dataset_name="some/dataset"))
    assert outcome.code == 3
    assert "some/dataset" in outcome.error_line
    assert not (tmp_path / "run").exists()


# Data


def test_a_missing_folder_is_named(tmp_path):
    line = refused_leaving_nothing(tmp_path, on_folder(tmp_path, tmp_path / "nowhere"))
    assert f"'{tmp_path / 'nowhere'}' does not exist" in line


@pytest.mark.parametrize("content", ["nothing", "images only", "text only"])
def test_a_folder_without_classes_is_refused_with_what_to_do(tmp_path, content):
    data = tmp_path / "data"
    data.mkdir()
    if content == "images only":
        write_image(data / "a.png")
    elif content == "text only":
        (data / "readme.txt").write_text("no images here")
    line = refused_leaving_nothing(tmp_path, on_folder(tmp_path, data))
    assert str(data) in line and "class" in line


def test_a_label_outside_the_range_is_named_with_its_row(tmp_path):
    data = tmp_path / "idx"
    data.mkdir()
    labels = np.array([0, 1, 2, 0, 1, 2, 9, 0])
    (data / "train-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((8, 8, 8))))
    (data / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    line = refused_leaving_nothing(tmp_path, on_folder(tmp_path, data))
    assert "label 9 at train row 6" in line and "0..3" in line


def test_a_class_with_one_image_is_named_where_a_split_is_carved(tmp_path, folder):
    write_image(folder / "unicorn" / "only.png")
    line = refused_leaving_nothing(tmp_path, on_folder(tmp_path, folder, test_fraction=0.25))
    assert "class 'unicorn' has 1 image" in line and "test_fraction=0" in line


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_a_broken_training_image_ends_the_run_with_its_name(tmp_path, folder, kind):
    broken_image(folder / "dog" / "3.jpg", kind)
    line = failed_leaving_nothing(tmp_path, on_folder(tmp_path, folder))
    assert "(dog/3.jpg)" in line and "train row 11" in line and "on_broken_image=skip" in line


@pytest.mark.e2e
def test_a_broken_image_met_by_a_worker_is_told_in_one_line_too(tmp_path, folder):
    broken_image(folder / "dog" / "3.jpg", "truncated")
    outcome = run(on_folder(tmp_path, folder, dataloader_num_workers=2))
    assert outcome.code == 2
    assert "train row 11 (dog/3.jpg)" in outcome.error_line and "on_broken_image=skip" in outcome.error_line
    assert "worker" not in outcome.error_line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_skip_leaves_broken_images_out_and_counts_them(tmp_path, folder, kind):
    broken_image(folder / "dog" / "3.jpg", kind)
    outcome = call(*on_folder(tmp_path, folder, on_broken_image="skip", max_steps=1))
    assert outcome.code == 0, outcome.err
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data["splits"]["train"]["num_samples"] == 15
    assert [entry["sample_id"] for entry in data["dropped"]] == ["dog/3.jpg"]


def test_a_broken_validation_image_is_named(tmp_path, folder):
    for name in ("cat", "dog"):
        write_image(folder / "val" / name / "0.png", size=(20, 12))
        (folder / "train").mkdir(exist_ok=True)
        (folder / name).rename(folder / "train" / name)
    broken_image(folder / "val" / "dog" / "0.png", "text")
    outcome = call(*on_folder(tmp_path, folder, eval_steps=2))
    assert outcome.code == 2
    assert "validation row 1 (val/dog/0.png)" in outcome.error_line


def test_a_file_that_cannot_be_opened_is_named(tmp_path, folder):
    """A link to nowhere: a superuser may read what nobody else may, but not this."""
    (folder / "dog" / "3.jpg").unlink()
    (folder / "dog" / "3.jpg").symlink_to(tmp_path / "nowhere.jpg")
    line = failed_leaving_nothing(tmp_path, on_folder(tmp_path, folder))
    assert "dog/3.jpg" in line


@pytest.mark.parametrize(("size", "found"), [((3, 3), "3"), ((30, 30), "30"), ((8, 30), "30")])
def test_an_image_that_is_no_multiple_of_the_patch_is_named_where_no_resize_is_asked(tmp_path, folder, size, found):
    for path in folder.rglob("*.jpg"):
        write_image(path, size=size)
    line = failed_leaving_nothing(tmp_path, on_folder(tmp_path, folder, resize_mode="none"))
    assert ".jpg" in line and found in line and "patch" in line and "resize_mode" in line


def test_images_of_several_sizes_are_refused_where_no_resize_is_asked(tmp_path, folder):
    write_image(folder / "dog" / "3.jpg", size=(8, 8))
    line = failed_leaving_nothing(tmp_path, on_folder(tmp_path, folder, resize_mode="none"))
    assert "12x20 and 8x8 pixels" in line and "resize_mode" in line


# Output


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_a_folder_that_holds_a_run_is_not_written_to(tmp_path, verb):
    other = interrupted_copy(short_run(), tmp_path / "run")
    before = {name: (other / name).read_bytes() for name in files_below(other)}
    argv = pretrain(tmp_path) if verb == "pretrain" else finetune_flags(pretrained(), other)
    line = refused(*argv)
    assert "already holds a run" in line and "--resume" in line and "--output_dir" in line
    assert {name: (other / name).read_bytes() for name in files_below(other)} == before


def test_files_that_are_no_run_are_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert call(*pretrain(tmp_path, max_steps=1)).code == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_failed_run_leaves_a_folder_that_was_there_as_it_was(tmp_path, folder):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    broken_image(folder / "dog" / "3.jpg", "text")
    assert call(*on_folder(tmp_path, folder)).code == 2
    assert files_below(tmp_path / "run") == ["notes.txt"]
    broken_image_mended = write_image(folder / "dog" / "3.jpg")
    assert broken_image_mended.exists() and call(*on_folder(tmp_path, folder)).code == 0


@pytest.mark.parametrize("below", [False, True])
def test_an_output_folder_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "run").write_text("a file")
    line = refused(*pretrain_flags(tmp_path / "run" / "deeper" if below else tmp_path / "run"))
    assert "file" in line and "name" in line
    assert (tmp_path / "run").read_text() == "a file"


# Checkpoints


def evaluate(model: Path | str, **fields) -> list[str]:
    data = {"dataset_name": "digits", "test_fraction": 0.2, "dataloader_num_workers": 0, "classes": list("01234")}
    return ["evaluate", *flags(**{"model_name_or_path": model, **data, **fields})]


def test_a_dataset_with_other_classes_than_the_model_is_refused_with_both_sides():
    line = refused(*evaluate(pretrained(), classes=list("0129")))
    assert "Only in the dataset (+): 9" in line and "Only in the checkpoint (-): 3, 4" in line


def test_a_split_that_does_not_exist_is_refused_with_what_makes_one():
    line = refused(*evaluate(pretrained(), split="validation"))
    assert "--split validation" in line and "--validation_fraction" in line


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of a trained model that may be damaged."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("config.json", "model.safetensors", "preprocessor_config.json"):
        shutil.copy(pretrained() / name, target)
    return target


def damage(model: Path, kind: str) -> None:
    weights, config = model / "model.safetensors", model / "config.json"
    if kind == "no config":
        config.unlink()
    elif kind == "config is no JSON":
        config.write_text("{")
    elif kind == "another type":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "bert"}))
    elif kind == "no weights":
        weights.unlink()
    elif kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind == "weights are text":
        weights.write_text("hello")
    elif kind == "no processor":
        (model / "preprocessor_config.json").unlink()
    elif kind == "no head":
        ViTScratchForImageClassification.from_pretrained(model).vit.save_pretrained(model)


DAMAGES = {
    "no config": "config.json",
    "config is no JSON": "config.json",
    "another type": "'bert'",
    "no weights": "model.safetensors",
    "truncated weights": "weights are damaged",
    "weights are text": "weights are damaged",
    "no processor": "preprocessor_config.json",
}


@pytest.mark.parametrize("kind", [*DAMAGES, "no head"])
def test_a_damaged_model_is_refused_with_what_is_wrong(model, kind):
    damage(model, kind)
    line = refused(*evaluate(model))
    assert str(model) in line and DAMAGES.get(kind, "no trained classifier") in line


@pytest.mark.parametrize("kind", DAMAGES)
def test_finetuning_from_a_damaged_model_is_refused_and_leaves_nothing(tmp_path, model, kind):
    damage(model, kind)
    line = refused_leaving_nothing(tmp_path, finetune_flags(model, tmp_path / "run"))
    assert str(model) in line and DAMAGES[kind] in line


@pytest.mark.parametrize("verb", ["finetune", "evaluate", "predict"])
def test_a_model_that_does_not_exist_is_named(tmp_path, verb):
    source = tmp_path / "nowhere"
    image = write_image(tmp_path / "a.png")
    argv = {
        "finetune": finetune_flags(source, tmp_path / "run"),
        "evaluate": evaluate(source),
        "predict": ["predict", source, image],
    }[verb]
    line = refused_leaving_nothing(tmp_path, argv)
    assert f"{source}: no such folder" in line


@pytest.mark.parametrize("verb", ["finetune", "evaluate"])
def test_a_model_that_is_not_named_is_asked_for(tmp_path, verb):
    argv = finetune_flags(None, tmp_path / "run") if verb == "finetune" else evaluate(None)
    assert "--model_name_or_path is missing" in refused(*argv)


def test_a_hub_that_cannot_be_reached_is_the_environments_fault():
    outcome = call(*evaluate("some/model"))
    assert outcome.code == 3
    assert "some/model" in outcome.error_line and "again" in outcome.error_line


def test_a_resolution_that_is_no_multiple_of_the_patch_is_refused(tmp_path):
    line = refused_leaving_nothing(tmp_path, finetune_flags(pretrained(), tmp_path / "run", image_size=13))
    assert "13" in line and "patch" in line


# predict


def predict(*argv) -> list[str]:
    return ["predict", str(pretrained()), *map(str, argv)]


def test_predict_names_what_is_not_there(tmp_path):
    assert f"{tmp_path / 'nowhere.png'}: no such file or folder" in refused(*predict(tmp_path / "nowhere.png"))
    assert f"{tmp_path} holds no image" in refused(*predict(tmp_path))


def test_predict_names_where_it_cannot_write(tmp_path):
    image = write_image(tmp_path / "a.png")
    assert "must end in .csv or .jsonl" in refused(*predict(image, "--output", tmp_path / "out.txt"))
    line = refused(*predict(image, "--output", tmp_path / "nowhere" / "out.csv"))
    assert f"there is no folder {tmp_path / 'nowhere'}" in line


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_predict_names_a_broken_image_and_writes_nothing(tmp_path, kind):
    write_image(tmp_path / "in" / "a.png")
    path = broken_image(tmp_path / "in" / "b.jpg", kind)
    outcome = call(*predict(tmp_path / "in", "--output", tmp_path / "out.csv"))
    assert outcome.code == 2
    assert str(path) in outcome.error_line
    assert files_below(tmp_path) == ["in/a.png", "in/b.jpg"]


def test_predict_skips_broken_images_if_asked_to(tmp_path, caplog):
    for index, kind in enumerate(("truncated", "empty", "text")):
        broken_image(tmp_path / f"{index}.jpg", kind)
    write_image(tmp_path / "good.png")
    (tmp_path / "folder.jpg").mkdir()
    outcome = call(*predict(tmp_path, "--on_broken_image", "skip"))
    assert outcome.code == 0, outcome.err
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == [str(tmp_path / "good.png")]
    skipped = [message for message in caplog.messages if message.startswith("skipped: ")]
    assert len(skipped) == 3 and all(f"{index}.jpg" in skipped[index] for index in range(3))


@pytest.mark.parametrize("debug", [False, True])
def test_a_traceback_is_shown_only_when_asked_for(tmp_path, debug):
    outcome = call(*on_folder(tmp_path, tmp_path / "nowhere"), *(["--debug"] if debug else []))
    assert outcome.code == 2
    assert ("Traceback" in outcome.err) == debug


def test_our_own_fault_ends_with_1_and_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("training.pretrain.load_image_dataset", lambda arguments: 1 / 0)
    outcome = call(*pretrain(tmp_path))
    assert outcome.code == 1
    assert "ZeroDivisionError" in outcome.err

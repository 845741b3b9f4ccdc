"""pretrain -> finetune -> evaluate -> predict on real digits, and what each leaves behind. All of it is offline."""

import csv
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_training import (
    Outcome,
    _temporary_folder,
    assert_same_tensors,
    call,
    finetune_flags,
    flags,
    interrupted_copy,
    pretrained,
    refused,
)
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor
from training.arguments import FinetuneRecipe
from training.data import load_image_dataset
from training.parsing import parse_recipe
from training.run_folder import read_predictions

RUN_FOLDER = [
    "checkpoint-2",
    "checkpoint-4",
    "config.json",
    "data.json",
    "environment.json",
    "figures",
    "metrics.json",
    "model.safetensors",
    "predictions.parquet",
    "preprocessor_config.json",
    "recipe.yaml",
    "trainer_state.json",
]


@functools.cache
def finetuned() -> tuple[Path, Outcome]:
    """Five digits to ten, 8 pixels to 16, as the paper fine-tunes: SGD, cosine, clip 1, a new head."""
    folder = _temporary_folder() / "run"
    paper = {"optimizer": "sgd", "learning_rate": 0.03, "max_grad_norm": 1, "weight_decay": 0}
    outcome = call(*finetune_flags(pretrained(), folder, image_size=16, test_fraction=0.2, **paper))
    assert outcome.code == 0, outcome.err
    return folder, outcome


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


@pytest.mark.e2e
def test_training_works_offline_and_leaves_an_empty_cache_empty(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    flags = ["--config", "demo_pretrain", "--num_train_epochs", "none", "--max_steps", "2"]
    command = [sys.executable, "-m", "training.cli", "pretrain", *flags, "--output_dir", str(tmp_path / "run")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("run", ["pretrained", "finetuned"])
def test_a_run_folder_is_complete_and_holds_nothing_else(run):
    folder = pretrained() if run == "pretrained" else finetuned()[0]
    assert sorted(path.name for path in folder.iterdir()) == RUN_FOLDER
    figures = sorted(path.name for path in (folder / "figures").iterdir())
    assert figures == ["attention_rollout.png", "confusion_matrix.png", "learning_curves.png"]


@pytest.mark.parametrize("name", ["metrics.json", "data.json", "environment.json", "trainer_state.json"])
def test_each_json_of_ours_has_a_schema_version(name):
    assert read(pretrained(), name)["schema_version"] == 1


def test_metrics_are_those_of_the_stored_predictions():
    evaluation = read(pretrained(), "metrics.json")["evaluation"]
    predictions = read_predictions(pretrained() / "predictions.parquet")
    right = predictions.predictions == predictions.labels
    assert (evaluation["num_samples"], evaluation["accuracy"]["num_correct"]) == (len(right), right.sum())
    assert evaluation["split"] == "test"


def test_the_stored_model_makes_the_stored_predictions():
    """Loaded with transformers' API alone, on images taken from scikit-learn itself."""
    folder, digits = pretrained(), load_digits()
    predictions = read_predictions(folder / "predictions.parquet")
    rows = [int(sample_id.partition("/")[2]) for sample_id in predictions.sample_ids]
    images = [np.rint(digits.images[row] * 255 / 16).astype(np.uint8) for row in rows]
    model = ViTScratchForImageClassification.from_pretrained(folder).eval()
    pixels = ViTScratchImageProcessor.from_pretrained(folder)(images)["pixel_values"]
    with torch.no_grad():
        probabilities = model(pixel_values=pixels).logits.softmax(1).numpy()
    assert digits.target[rows].tolist() == predictions.labels.tolist()
    np.testing.assert_allclose(probabilities, predictions.probabilities, atol=1e-6)


def test_training_figures_say_what_was_trained():
    training = read(pretrained(), "metrics.json")["training"]
    expected = {"num_train_samples": 631, "global_batch_size": 8, "num_steps": 4, "world_size": 1}
    assert {name: training[name] for name in expected} == expected


def test_the_effective_recipe_is_printed_and_stored():
    folder, outcome = finetuned()
    recipe = (folder / "recipe.yaml").read_text()
    assert recipe in outcome.err
    lines = dict(line.split(": ", 1) for line in recipe.splitlines())
    assert lines["verb"] == "finetune"
    assert lines["optimizer"] == "sgd" and lines["momentum"] == "0.9" and lines["lr_scheduler_type"] == "cosine"
    parsed = parse_recipe(FinetuneRecipe, ["--config", str(folder / "recipe.yaml")], prog="finetune", description="")
    assert parsed.optimization.learning_rate == 0.03


def test_finetuning_ends_by_printing_accuracy_and_folder():
    folder, outcome = finetuned()
    evaluation = read(folder, "metrics.json")["evaluation"]
    accuracy, last = outcome.out.splitlines()
    assert accuracy.startswith(f"test accuracy {evaluation['accuracy']['value']:.2%} (")
    assert "of 360; 95% interval" in accuracy
    assert last == str(folder)


def test_finetuning_replaces_the_head_and_resamples_the_positions():
    before, after = (load_file(folder / "model.safetensors") for folder in (pretrained(), finetuned()[0]))
    assert before["classifier.weight"].shape == (5, 16) and after["classifier.weight"].shape == (10, 16)
    positions = "vit.embeddings.position_embeddings"
    assert before[positions].shape == (1, 5, 16) and after[positions].shape == (1, 17, 16)


def test_finetuning_starts_from_the_stored_encoder_and_a_zero_head(tmp_path):
    """At a learning rate next to nothing the weights are those it started with."""
    outcome = call(*finetune_flags(pretrained(), tmp_path / "run", learning_rate=1e-12, max_steps=1))
    assert outcome.code == 0, outcome.err
    before, after = (load_file(folder / "model.safetensors") for folder in (pretrained(), tmp_path / "run"))
    assert after["classifier.weight"].abs().max() < 1e-9
    for name in before:
        if not name.startswith("classifier"):
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-9)
    loss = read(tmp_path / "run", "trainer_state.json")["log_history"][0]["loss"]
    assert loss == pytest.approx(np.log(10), rel=1e-6)


def test_finetuning_keeps_the_class_order_of_the_checkpoint_where_the_classes_are_the_same(tmp_path):
    names = list("42031")
    start = call(*finetune_flags(pretrained(), tmp_path / "first", classes=names, learning_rate=1e-3))
    assert start.code == 0, start.err
    assert list(read(tmp_path / "first", "config.json")["id2label"].values()) == list("01234")


@pytest.mark.parametrize("new_head", ["true", "false"])
def test_class_ids_are_numbers_in_both_directions(tmp_path, new_head):
    fields = {"classes": list("01234"), "new_head": new_head, "learning_rate": 1e-3, "max_steps": 1}
    assert call(*finetune_flags(pretrained(), tmp_path / "run", **fields)).code == 0
    config = ViTScratchForImageClassification.from_pretrained(tmp_path / "run").config
    assert config.id2label == dict(enumerate("01234"))
    assert config.label2id == {name: index for index, name in enumerate("01234")}


def test_finetuning_resumes_to_the_same_weights_without_the_model_it_started_from(tmp_path):
    start, whole = tmp_path / "start", tmp_path / "whole"
    shutil.copytree(pretrained(), start)
    argv = {"start": start, "image_size": 16, "learning_rate": 1e-3}
    assert call(*finetune_flags(output_dir=whole, **argv)).code == 0
    shutil.rmtree(start)
    resumed = interrupted_copy(whole, tmp_path / "resumed")
    outcome = call(*finetune_flags(output_dir=resumed, **argv), "--resume")
    assert outcome.code == 0, outcome.err
    assert_same_tensors(resumed / "model.safetensors", whole / "model.safetensors")


def test_a_kept_head_goes_on_from_what_it_knows(tmp_path):
    fields = {"classes": list("01234"), "new_head": "false", "learning_rate": 1e-12, "max_steps": 1}
    assert call(*finetune_flags(pretrained(), tmp_path / "run", **fields)).code == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (pretrained(), tmp_path / "run"))
    torch.testing.assert_close(after["classifier.weight"], before["classifier.weight"], rtol=0, atol=1e-9)


def test_a_kept_head_with_other_classes_is_refused_with_both_sides(tmp_path):
    fields = {"classes": list("34567"), "new_head": "false"}
    line = refused(*finetune_flags(pretrained(), tmp_path / "run", **fields))
    assert "Only in the dataset (+): 5, 6, 7" in line and "Only in the checkpoint (-): 0, 1, 2" in line
    assert not (tmp_path / "run").exists()


DATA = {"dataset_name": "digits", "dataloader_num_workers": 0, "test_fraction": 0.2, "validation_fraction": 0.1}


def evaluate_flags(model: Path, **fields) -> list[str]:
    return ["evaluate", *flags(**{"model_name_or_path": model, "classes": list("01234"), **DATA, **fields})]


def test_evaluate_gives_the_numbers_of_the_run(tmp_path):
    outcome = call(*evaluate_flags(pretrained(), output_dir=tmp_path / "evaluation"))
    assert outcome.code == 0, outcome.err
    stored, found = (read(folder, "metrics.json")["evaluation"] for folder in (pretrained(), tmp_path / "evaluation"))
    assert found == stored
    assert outcome.out.startswith(f"test accuracy {stored['accuracy']['value']:.2%} ")
    first, second = (
        read_predictions(folder / "predictions.parquet") for folder in (pretrained(), tmp_path / "evaluation")
    )
    assert first.sample_ids == second.sample_ids
    np.testing.assert_array_equal(first.probabilities, second.probabilities)


@pytest.mark.parametrize(("split", "num_samples"), [("train", 631), ("validation", 90), ("test", 180)])
def test_evaluate_measures_the_split_it_is_asked_for(split, num_samples):
    outcome = call(*evaluate_flags(pretrained(), split=split, batch_size=500))
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{split} accuracy") and f" of {num_samples};" in outcome.out


def test_evaluate_follows_the_class_order_of_the_model(tmp_path):
    one, two = (call(*evaluate_flags(pretrained(), classes=list(order))) for order in ("01234", "43210"))
    assert one.out == two.out


def test_evaluate_does_not_overwrite_a_run():
    before = (pretrained() / "metrics.json").read_bytes()
    line = refused(*evaluate_flags(pretrained(), output_dir=pretrained()))
    assert "already holds metrics.json" in line
    assert (pretrained() / "metrics.json").read_bytes() == before


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory):
    """Seven digits as PNG files: six in folders, and what they are."""
    folder, digits = tmp_path_factory.mktemp("digits"), load_digits()
    for row in range(7):
        path = folder / f"{row % 2}" / f"digit{row}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.rint(digits.images[row] * 255 / 16).astype(np.uint8)).save(path)
    (folder / "notes.txt").write_text("no image")
    return folder


def expected_scores(paths: list[Path]) -> np.ndarray:
    model = ViTScratchForImageClassification.from_pretrained(pretrained()).eval()
    pixels = ViTScratchImageProcessor.from_pretrained(pretrained())([str(path) for path in paths])["pixel_values"]
    with torch.no_grad():
        return model(pixel_values=pixels).logits.softmax(1).numpy()


def check_rows(rows: list[tuple[str, list[tuple[str, float]]]], folder: Path, *, digits: int) -> None:
    paths = sorted(folder.rglob("*.png"))
    assert [path for path, _ in rows] == [str(path) for path in paths]
    for (_, found), scores in zip(rows, expected_scores(paths), strict=True):
        order = scores.argsort()[::-1][: len(found)]
        assert [label for label, _ in found] == [str(index) for index in order]
        assert [score for _, score in found] == pytest.approx(scores[order].tolist(), abs=10**-digits)


def test_predict_prints_a_line_for_each_image_likeliest_label_first(digit_files):
    outcome = call("predict", pretrained(), digit_files, "--batch_size", 3)
    assert outcome.code == 0, outcome.err
    lines = [line.split("\t") for line in outcome.out.splitlines()]
    rows = [(path, [(item.split()[0], float(item.split()[1])) for item in items]) for path, *items in lines]
    check_rows(rows, digit_files, digits=4)
    assert {len(items) for _, items in rows} == {5}


def test_predict_writes_csv(digit_files, tmp_path):
    output = tmp_path / "out.csv"
    assert call("predict", pretrained(), digit_files, "--output", output, "--top_k", 2).out == f"{output}\n"
    with open(output, newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["image", "label_1", "score_1", "label_2", "score_2"]
    rows = [(row["image"], [(row[f"label_{k}"], float(row[f"score_{k}"])) for k in (1, 2)]) for row in table]
    check_rows(rows, digit_files, digits=6)


def test_predict_writes_jsonl(digit_files, tmp_path):
    output = tmp_path / "out.jsonl"
    assert call("predict", pretrained(), digit_files, "--output", output).code == 0
    entries = [json.loads(line) for line in output.read_text().splitlines()]
    rows = [(row["image"], [(item["label"], item["score"]) for item in row["predictions"]]) for row in entries]
    check_rows(rows, digit_files, digits=6)


def test_predict_takes_files_in_the_order_given(digit_files):
    paths = [str(digit_files / "1" / "digit3.png"), str(digit_files / "0" / "digit0.png")]
    outcome = call("predict", pretrained(), *paths)
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == paths


def test_predict_takes_images_of_several_sizes_without_resizing(tmp_path):
    """With resize_mode none an image keeps its size, and a batch has one."""
    processor = ViTScratchImageProcessor.from_pretrained(pretrained())
    model = tmp_path / "model"
    ViTScratchForImageClassification.from_pretrained(pretrained()).save_pretrained(model)
    processor.resize_mode = "none"
    processor.save_pretrained(model)
    for index, side in enumerate((8, 16, 16, 8)):
        Image.new("L", (side, side), 50 * index).save(tmp_path / f"{index}.png")
    outcome = call("predict", model, tmp_path, "--batch_size", 4)
    assert outcome.code == 0, outcome.err
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == [str(tmp_path / f"{k}.png") for k in range(4)]


def test_data_json_names_the_splits_that_the_metrics_are_of():
    recipe = parse_recipe(
        FinetuneRecipe, ["--config", str(finetuned()[0] / "recipe.yaml")], prog="finetune", description=""
    )
    dataset = load_image_dataset(recipe.data)
    assert read(finetuned()[0], "data.json") == dataset.description

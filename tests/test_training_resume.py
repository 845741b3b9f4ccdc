"""A run that was killed and resumed leaves the bytes of a run that was not."""

import functools
import hashlib
import json
import signal
from pathlib import Path

import pytest
import torch
from fixtures_training import (
    TINY,
    At,
    Outcome,
    _temporary_folder,
    call,
    log_of,
    pretrain_flags,
    random_images,
    run,
    tiny_trainer,
)

from training import checkpoints
from training.image_tensors import TrainingImages

STATE_FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


def training(folder: Path, num_workers: int = 0) -> list[str]:
    """A training with every source of randomness: dropout, crops, flips, rotations, RandAugment, erasing."""
    augmentation = {"crop_padding": 1, "horizontal_flip": True, "rotation_degrees": 20, "random_erasing": 0.5}
    fields = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "randaugment_num_layers": 1}
    lengths = {"max_steps": 12, "save_steps": 4, "save_total_limit": 1, "classes": list("012"), "global_batch_size": 8}
    fields |= {"validation_fraction": 0.1, "eval_steps": 6, "per_device_batch_size": 4, **lengths}
    return pretrain_flags(folder, dataloader_num_workers=num_workers, **fields, **augmentation)


@functools.cache
def uninterrupted() -> Path:
    folder = _temporary_folder() / "run"
    assert run(training(folder)).code == 0
    return folder


def assert_ends_alike(folder: Path) -> None:
    """Final weights, optimizer, schedule, random numbers and losses are those of the uninterrupted run."""
    other = uninterrupted()
    for name in STATE_FILES:
        assert (folder / "checkpoint-12" / name).read_bytes() == (other / "checkpoint-12" / name).read_bytes(), name
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert log_of(folder) == log_of(other)
    assert log_of(folder, "eval_accuracy") == log_of(other, "eval_accuracy")
    assert [path.name for path in folder.iterdir() if path.name.startswith("unfinished")] == []


def resume(folder: Path, num_workers: int = 0) -> Outcome:
    return run([*training(folder, num_workers), "--resume"])


@pytest.mark.e2e
def test_worker_processes_change_no_byte(tmp_path):
    assert run(training(tmp_path / "run", num_workers=2)).code == 0
    assert_ends_alike(tmp_path / "run")


STEP = "training.trainer.ViTTrainer.training_step"  # twice a step: micro-batches of 4
MOMENTS = {
    "step 1, before any checkpoint": At(STEP, 1),
    "middle of step 7": At(STEP, 14),
    "step 12, the last": At(STEP, 23),
    "while the second save writes": At("torch.save", 5),  # three a save
    "before the second checkpoint is published": At("training.checkpoints.publish_checkpoint", 2),
    "before the first checkpoint is removed": At("training.checkpoints.prune_checkpoints", 2),
    "before the export": At("training.fit._export", 1),
    "before metrics.json": At("training.trainer.ViTTrainer.training_figures", 1),
}


@pytest.mark.e2e
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bytes(tmp_path, moment):
    folder = tmp_path / "run"
    killed = run(training(folder), at=MOMENTS[moment])
    assert killed.code == -signal.SIGKILL
    assert not (folder / "metrics.json").exists()
    unfinished = [path.name for path in folder.glob("unfinished-*")]
    assert unfinished == (["unfinished-checkpoint-8"] if "save writes" in moment or "published" in moment else [])
    outcome = resume(folder)
    assert outcome.code == 0, outcome.err
    assert_ends_alike(folder)


@pytest.mark.e2e
def test_a_run_with_workers_killed_twice_resumes_to_the_same_bytes(tmp_path):
    folder = tmp_path / "run"
    assert run(training(folder, num_workers=2), at=At(STEP, 10)).code == -signal.SIGKILL
    assert run([*training(folder, num_workers=2), "--resume"], at=At(STEP, 9)).code == -signal.SIGKILL
    assert resume(folder, num_workers=2).code == 0
    assert_ends_alike(folder)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "group", "num_workers"),
    [(signal.SIGTERM, False, 0), (signal.SIGTERM, True, 2), (signal.SIGINT, True, 2)],
    ids=["SIGTERM", "SIGTERM to workers too", "Ctrl-C"],
)
def test_a_stop_request_saves_ends_with_75_and_resumes_to_the_same_bytes(tmp_path, number, group, num_workers):
    folder = tmp_path / "run"
    outcome = run(training(folder, num_workers), at=At(STEP, 11, number, group))
    assert outcome.code == 75, outcome.err
    assert "stopped at step 6 of 12" in outcome.error_line and "--resume" in outcome.error_line
    assert outcome.err.count(f"{number.name} received") == 1
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-6"]
    checkpoints.verify_checkpoint(folder / "checkpoint-6")
    assert not (folder / "model.safetensors").exists()  # an unfinished model is not taken for a final one
    assert resume(folder, num_workers).code == 0
    assert_ends_alike(folder)


@pytest.mark.e2e
def test_a_stop_request_in_the_last_step_ends_the_run_as_usual(tmp_path):
    outcome = run(training(tmp_path / "run"), at=At(STEP, 24, signal.SIGTERM))
    assert outcome.code == 0
    assert_ends_alike(tmp_path / "run")


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["training.fit.predict_logits", "training.fit._export"])
def test_a_stop_request_after_the_last_step_ends_with_75_and_resumes_to_the_same_bytes(tmp_path, moment, number):
    folder = tmp_path / "run"
    outcome = run(training(folder), at=At(moment, 1, number))
    assert outcome.code == 75, outcome.err
    assert f"{number.name} received; training is done" in outcome.error_line and "--resume" in outcome.error_line
    assert resume(folder).code == 0
    assert_ends_alike(folder)


@pytest.mark.e2e
def test_resuming_a_finished_run_changes_nothing_and_says_where_it_is(tmp_path):
    folder = tmp_path / "run"
    assert run(training(folder)).code == 0
    outcome = resume(folder)
    assert outcome.code == 0
    assert outcome.err.rstrip().endswith(str(folder))
    assert_ends_alike(folder)
    assert json.loads((folder / "metrics.json").read_text())["training"]["num_steps"] == 12


class Recorder:
    """Keeps sample ids and pixels of every batch that training reads."""

    def __init__(self, monkeypatch):
        self.batches: list[tuple] = []
        read = TrainingImages.__getitems__

        def reading(images, keys):
            samples = read(images, keys)
            pixels = torch.stack([sample["pixel_values"] for sample in samples])
            ids = [(epoch, images.images.sample_ids[row]) for epoch, row in keys]
            self.batches.append((ids, hashlib.sha256(pixels.numpy().tobytes()).hexdigest()))
            return samples

        monkeypatch.setattr(TrainingImages, "__getitems__", reading)

    def take(self) -> list[tuple]:
        batches, self.batches = self.batches, []
        return batches


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_resume_in_mid_epoch_sees_the_same_images_and_crops_and_reads_no_others(tmp_path, monkeypatch, micro, stop):
    recorder = Recorder(monkeypatch)
    fields = {"global_batch_size": 4, "per_device_batch_size": micro, "max_steps": 12, "save_steps": stop}
    fields |= {"crop_padding": 2, "rotation_degrees": 30, "random_erasing": 0.5, "save_total_limit": 9}
    tiny_trainer(tmp_path, train=random_images(20), **fields).fit(None)  # five steps an epoch
    whole = recorder.take()
    torch.manual_seed(123)
    tiny_trainer(tmp_path, train=random_images(20), **fields).fit(str(tmp_path / f"checkpoint-{stop}"))
    assert recorder.take() == whole[stop * 4 // micro :]
    assert len({digest for _, digest in whole}) == len(whole)  # each batch is augmented anew


def test_the_saved_recipe_alone_resumes_a_run(tmp_path):
    folder = tmp_path / "run"
    assert call(*pretrain_flags(folder)).code == 0
    outcome = call("pretrain", "--config", str(folder / "recipe.yaml"), "--resume")
    assert outcome.code == 0, outcome.err
    assert json.loads((folder / "metrics.json").read_text())["training"]["num_steps"] == TINY["max_steps"]

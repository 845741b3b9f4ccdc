"""Settings at resume: what changed is refused or takes effect, and what is missing is named."""

import json
from pathlib import Path

import pytest
import torch
from fixtures_training import (
    assert_same_tensors,
    call,
    interrupted_copy,
    log_of,
    pretrain_flags,
    refused,
    short_run,
    tiny_trainer,
    weights_of,
)
from safetensors.torch import load_file


def resume(folder: Path, **fields):
    return [*pretrain_flags(folder, **fields), "--resume"]


def test_a_changed_learning_rate_is_refused_by_name(tmp_path):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    line = refused(*resume(folder, learning_rate=0.5, seed=1))
    assert "learning_rate: 0.002 -> 0.5; seed: 0 -> 1" in line
    assert "--allow_changed learning_rate seed" in line


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("hidden_size", 32, "hidden_size: 16 -> 32"),
        ("hidden_dropout_prob", 0.1, "hidden_dropout_prob: None -> 0.1"),
        ("resize_mode", "pad", "resize_mode: None -> pad"),
        ("optimizer", "sgd", "optimizer: adamw -> sgd"),
    ],
)
def test_what_the_checkpoint_holds_cannot_be_changed_even_by_name(tmp_path, name, value, change):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    line = refused(*resume(folder, **{name: value}, allow_changed=name))
    assert change in line and "begin another run" in line


def test_allowing_a_field_that_does_not_exist_is_refused(tmp_path):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    assert "--allow_changed learning_rat: no such field" in refused(*resume(folder, allow_changed="learning_rat"))


def test_a_change_that_is_allowed_is_printed_and_kept_in_the_recipe(tmp_path, caplog):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    outcome = call(*resume(folder, learning_rate=0.5, allow_changed="learning_rate"))
    assert outcome.code == 0, outcome.err
    assert "changed at resume: learning_rate: 0.002 -> 0.5" in caplog.messages
    recipe = (folder / "recipe.yaml").read_text()
    assert recipe.startswith("# changed at checkpoint-2: learning_rate: 0.002 -> 0.5\nverb: pretrain\n")
    assert "\nlearning_rate: 0.5\n" in recipe and "\nallow_changed: null\n" in recipe
    assert recipe in outcome.err


def one_more_step(tmp_path, learning_rate):
    """The weights' change and the optimizer after one more step from checkpoint 2, by SGD without momentum."""
    fields = {"optimizer": "sgd", "momentum": 0, "max_steps": 3}
    if not tmp_path.exists():
        tiny_trainer(tmp_path, learning_rate=0.01, **fields).fit(None)
    trainer = tiny_trainer(tmp_path, learning_rate=learning_rate, **fields)
    trainer.fit(str(tmp_path / "checkpoint-2"))
    before = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    return {name: value - before[name] for name, value in weights_of(trainer.model).items()}, trainer


def test_a_changed_learning_rate_takes_effect(tmp_path):
    old, _ = one_more_step(tmp_path / "run", 0.01)
    new, trainer = one_more_step(tmp_path / "run", 0.5)
    assert log_of(tmp_path / "run" / "checkpoint-3", "learning_rate")[3] == pytest.approx(0.5 * 0.25)  # cosine, 2 of 3
    name = "vit.layers.0.mlp.fc1.weight"
    torch.testing.assert_close(new[name], 50 * old[name], rtol=1e-2, atol=1e-6)  # differences of float32
    assert trainer.lr_scheduler.base_lrs == [0.5, 0.5]


def test_a_changed_weight_decay_and_beta_take_effect(tmp_path):
    tiny_trainer(tmp_path, weight_decay=0.1, max_steps=2).fit(None)
    trainer = tiny_trainer(tmp_path, weight_decay=0.3, adam_beta2=0.95, max_steps=4)
    trainer.fit(str(tmp_path / "checkpoint-2"))
    groups = trainer.optimizer.param_groups
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.3, (0.9, 0.95)), (0.0, (0.9, 0.95))]


def test_unchanged_settings_leave_the_resumed_schedule_as_it_was(tmp_path):
    fields = {"max_steps": 6, "warmup_steps": 4, "lr_scheduler_type": "linear"}
    tiny_trainer(tmp_path, **fields).fit(None)
    whole = log_of(tmp_path / "checkpoint-6", "learning_rate")
    tiny_trainer(tmp_path, **fields).fit(str(tmp_path / "checkpoint-4"))
    assert log_of(tmp_path / "checkpoint-6", "learning_rate") == whole


def test_changed_intervals_are_heeded_at_resume(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, save_steps=2, logging_steps=2).fit(None)
    trainer = tiny_trainer(tmp_path, max_steps=8, save_steps=3, logging_steps=1, save_total_limit=9)
    trainer.fit(str(tmp_path / "checkpoint-2"))
    assert sorted(log_of(tmp_path / "checkpoint-8")) == [2, 3, 4, 5, 6, 7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{step}" for step in (2, 3, 6, 8)]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_checkpoint_that_lacks_a_file_is_not_resumed_from(tmp_path, name):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    (folder / "checkpoint-2" / name).unlink()
    line = refused(*resume(folder))
    assert f"checkpoint-2/{name} is missing" in line


def test_other_images_are_not_resumed_with(tmp_path):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    data = json.loads((folder / "data.json").read_text())
    data["splits"]["train"]["sha256"] = "0" * 64
    (folder / "data.json").write_text(json.dumps(data))
    line = refused(*resume(folder))
    assert "train differs from data.json" in line and "--allow_changed data" in line
    assert call(*resume(folder, allow_changed="data")).code == 0


def test_resuming_where_nothing_ran_is_refused(tmp_path):
    assert "holds no run; leave the flag out" in refused(*resume(tmp_path / "run"))


def test_resuming_before_the_first_checkpoint_starts_anew(tmp_path):
    folder = interrupted_copy(short_run(), tmp_path / "run")
    for path in (folder / "checkpoint-2").iterdir():
        path.unlink()
    (folder / "checkpoint-2").rmdir()
    assert call(*resume(folder)).code == 0
    assert_same_tensors(folder / "model.safetensors", short_run() / "model.safetensors")


def test_resuming_a_finished_run_changes_no_weight(tmp_path):
    folder = interrupted_copy(short_run(), tmp_path / "run", step=4)
    assert call(*resume(folder)).code == 0
    assert_same_tensors(folder / "model.safetensors", short_run() / "model.safetensors")
    assert json.loads((folder / "metrics.json").read_text())["training"]["num_steps"] == 4


def test_fewer_steps_than_are_done_are_refused(tmp_path):
    folder = interrupted_copy(short_run(), tmp_path / "run", step=4)
    line = refused(*resume(folder, max_steps=3, allow_changed="max_steps"))
    assert "checkpoint-4 is 4 steps long already" in line and "asks for 3" in line

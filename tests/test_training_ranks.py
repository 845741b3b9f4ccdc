"""The same command on two processes: the training, the splits and the figures of one."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures_training import Outcome, _temporary_folder, call, flags, log_of, pretrain_flags
from safetensors.torch import load_file

from training.run_folder import read_predictions

pytestmark = pytest.mark.e2e

SCRIPTS = Path(sys.executable).parent


def torchrun(argv: list[str]) -> Outcome:
    """Runs a command on two processes of this machine, as a user would."""
    launcher = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc_per_node", "2", "--no_python"]
    done = subprocess.run(
        [*launcher, str(SCRIPTS / "vit-scratch"), *map(str, argv)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def training(folder: Path) -> list[str]:
    """A training without dropout, whose masks differ between ranks by design."""
    fields = {"max_steps": 6, "save_steps": 3, "eval_steps": 3, "max_grad_norm": 1, "rotation_degrees": 20}
    return pretrain_flags(folder, **fields, validation_fraction=0.1, test_fraction=0.2, classes=list("01234"))


@functools.cache
def on_one() -> Path:
    folder = _temporary_folder() / "one"
    outcome = call(*training(folder))
    assert outcome.code == 0, outcome.err
    return folder


@functools.cache
def on_two() -> tuple[Path, Outcome]:
    folder = _temporary_folder() / "two"
    return folder, torchrun(training(folder))


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def test_training_on_two_processes_ends_with_0_and_prints_once():
    folder, outcome = on_two()
    assert outcome.code == 0, outcome.err
    assert read(folder, "metrics.json")["training"]["world_size"] == 2
    assert outcome.out.count(str(folder)) == 1
    assert outcome.err.count("test: 180 images") == 1


def test_two_processes_log_the_losses_of_one():
    one, two = log_of(on_one()), log_of(on_two()[0])
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)
    norms = [log_of(folder, "grad_norm") for folder in (on_one(), on_two()[0])]
    assert list(norms[1].values()) == pytest.approx(list(norms[0].values()), rel=1e-5)


def test_two_processes_end_with_the_weights_of_one():
    one, two = (load_file(folder / "model.safetensors") for folder in (on_one(), on_two()[0]))
    assert one.keys() == two.keys()
    for name in one:
        if not name.endswith("k_proj.bias"):  # no gradient but rounding, which AdamW makes as large as any
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-6)


def test_two_processes_carve_the_splits_of_one():
    one, two = (read(folder, "data.json")["splits"] for folder in (on_one(), on_two()[0]))
    assert one == two
    assert set(one) == {"train", "validation", "test"}


def test_two_processes_evaluate_as_one_does():
    one, two = (log_of(folder, "eval_loss") for folder in (on_one(), on_two()[0]))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)
    one, two = (read_predictions(folder / "predictions.parquet") for folder in (on_one(), on_two()[0]))
    assert one.sample_ids == two.sample_ids
    assert one.probabilities == pytest.approx(two.probabilities, abs=1e-5)


def test_both_processes_leave_one_set_of_files():
    names = [sorted(path.name for path in (folder / "checkpoint-6").iterdir()) for folder in (on_one(), on_two()[0])]
    assert [name for name in names[1] if name not in names[0]] == ["rng_state_0.pth", "rng_state_1.pth"]
    assert sorted(path.name for path in on_one().iterdir()) == sorted(path.name for path in on_two()[0].iterdir())


def test_evaluate_on_two_processes_gives_the_numbers_of_one(tmp_path):
    model = flags(model_name_or_path=on_one(), dataset_name="digits", dataloader_num_workers=0)
    data = flags(test_fraction=0.2, validation_fraction=0.1, classes=list("01234"), batch_size=7)
    outcome = torchrun(["evaluate", *model, *data, "--output_dir", tmp_path / "two"])
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("test accuracy") == 1
    assert call("evaluate", *model, *data, "--output_dir", tmp_path / "one").code == 0
    one, two = (read(tmp_path / name, "metrics.json")["evaluation"] for name in ("one", "two"))
    assert two.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-5)
    assert two.pop("expected_calibration_error") == pytest.approx(one.pop("expected_calibration_error"), rel=1e-4)
    assert two == one
    assert one == {key: value for key, value in read(on_one(), "metrics.json")["evaluation"].items() if key in one}


def test_a_run_of_two_processes_is_not_resumed_by_one_unless_allowed():
    folder = on_two()[0]
    outcome = call(*training(folder), "--resume")
    assert outcome.code == 2
    assert "saved by 2 processes" in outcome.error_line and "--allow_changed world_size" in outcome.error_line


def test_a_second_run_in_a_row_ends_well_too_and_resumes_exactly(tmp_path):
    """About one run in six used to abort at exit; and both ranks restore their own random numbers."""
    folder = tmp_path / "run"
    argv = [*training(folder), *flags(hidden_dropout_prob=0.1)]
    first = torchrun(argv)
    assert first.code == 0, first.err
    names = ("model.safetensors", "checkpoint-6/optimizer.pt", "checkpoint-6/rng_state_1.pth")
    whole = {name: (folder / name).read_bytes() for name in names}
    for path in (folder / "checkpoint-6").iterdir():
        path.unlink()
    (folder / "checkpoint-6").rmdir()
    second = torchrun([*argv, "--resume"])
    assert second.code == 0, second.err
    assert {name: (folder / name).read_bytes() for name in names} == whole


def test_a_batch_that_two_processes_cannot_share_is_refused(tmp_path):
    outcome = torchrun(pretrain_flags(tmp_path / "run", global_batch_size=7))
    assert outcome.code == 1  # torchrun's own
    assert "global_batch_size=7 must be a multiple of the 2 processes" in outcome.err
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())

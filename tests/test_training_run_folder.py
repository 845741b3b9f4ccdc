"""Files of a run folder are whole or absent, and tell what they are."""

import errno
import json
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from fixtures_training import call, pretrain_flags

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training import run_folder
from training.trainer import ViTTrainer


def write_example_predictions(path):
    run_folder.write_predictions(
        path,
        sample_ids=["train/3", "cat/ä.png"],
        labels=np.array([1, 0]),
        probabilities=np.array([[0.25, 0.75], [0.125, 0.875]]),
    )


# --- JSON


def test_json_comes_back_with_its_schema_version(tmp_path):
    run_folder.write_json(tmp_path / "metrics.json", {"evaluation": {"loss": 0.1, "name": "ä"}})
    assert run_folder.read_json(tmp_path / "metrics.json") == {
        "schema_version": 1,
        "evaluation": {"loss": 0.1, "name": "ä"},
    }


def test_missing_folders_are_made(tmp_path):
    run_folder.write_json(tmp_path / "a" / "b" / "metrics.json", {})
    assert json.loads((tmp_path / "a" / "b" / "metrics.json").read_text()) == {"schema_version": 1}


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_folder.write_json(tmp_path / "metrics.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b'{"schema_version": 1,', "no valid JSON"),
        (b"\xff\xfe", "no valid JSON"),
        (b"[]", "schema_version None"),
        (b'{"schema_version": 2}', "schema_version 2 where this version reads 1"),
    ],
    ids=["missing", "cut", "no text", "a list", "newer"],
)
def test_json_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "metrics.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        run_folder.read_json(path)
    assert str(path) in str(caught.value)


# --- replacing files


def fail_with_enospc(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WRITERS = {
    "metrics.json": lambda path: run_folder.write_json(path, {"new": True}),
    "predictions.parquet": write_example_predictions,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch, name, call):
    path = tmp_path / name
    path.write_text("earlier")
    monkeypatch.setattr(os, call, fail_with_enospc)
    with pytest.raises(EnvironmentFault, match=f"cannot write .*{name}: No space left on device"):
        WRITERS[name](path)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_size_limit_leaves_the_earlier_file_and_nothing_else(tmp_path, name):
    path = tmp_path / name
    path.write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(EnvironmentFault, match=f"cannot write .*{name}: .*File too large"):
            WRITERS[name](path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_of_the_writer_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("earlier")
    with pytest.raises(KeyError), run_folder.replace_file(path) as incomplete:
        incomplete.write_text("half")
        raise KeyError("writer")
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_leftover_of_a_killed_write_is_replaced(tmp_path):
    (tmp_path / ".metrics.json.incomplete").write_text("left by a killed process, and longer than what comes")
    run_folder.write_json(tmp_path / "metrics.json", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.json"]
    assert run_folder.read_json(tmp_path / "metrics.json") == {"schema_version": 1}


def test_a_path_below_a_file_is_a_fault_that_names_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"file/metrics\.json"):
        run_folder.write_json(tmp_path / "file" / "metrics.json", {})


# --- predictions


def test_predictions_come_back(tmp_path):
    write_example_predictions(tmp_path / "predictions.parquet")
    predictions = run_folder.read_predictions(tmp_path / "predictions.parquet")
    assert predictions.sample_ids == ["train/3", "cat/ä.png"]
    assert predictions.labels.tolist() == [1, 0]
    assert predictions.predictions.tolist() == [1, 1]
    assert predictions.probabilities.tolist() == [[0.25, 0.75], [0.125, 0.875]]


def test_predictions_have_the_documented_columns(tmp_path):
    write_example_predictions(tmp_path / "predictions.parquet")
    schema = pq.read_schema(tmp_path / "predictions.parquet")
    assert {name: str(schema.field(name).type) for name in schema.names} == {
        "sample_id": "string",
        "label": "int64",
        "prediction": "int64",
        "probabilities": "list<element: float>",
    }


@pytest.mark.parametrize("content", [None, b"PAR1 no parquet"], ids=["missing", "corrupt"])
def test_predictions_that_cannot_be_read_are_named(tmp_path, content):
    path = tmp_path / "predictions.parquet"
    if content:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"predictions\.parquet"):
        run_folder.read_predictions(path)


# --- output folder


def test_a_new_output_folder_is_made(tmp_path):
    assert run_folder.prepare_output_dir(tmp_path / "a" / "run").is_dir()


def test_checking_an_output_folder_makes_nothing(tmp_path):
    run_folder.check_output_dir(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sign", ["recipe.yaml", "config.json", "model.safetensors", "checkpoint-20/", "data.json"])
def test_a_folder_that_holds_a_run_is_refused_with_two_ways_out(tmp_path, sign):
    (tmp_path / sign).mkdir() if sign.endswith("/") else (tmp_path / sign).write_text("{}")
    with pytest.raises(InputError, match=rf"already holds a run \({sign.strip('/')}\).*--resume.*--output_dir"):
        run_folder.prepare_output_dir(tmp_path)


def test_files_that_are_not_of_a_run_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run_folder.prepare_output_dir(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"is a file|lies below a file"):
        run_folder.prepare_output_dir(tmp_path / name)


# --- environment


def test_the_environment_names_the_versions_in_use():
    environment = run_folder.describe_environment()
    assert environment["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["python"] == platform.python_version()
    assert environment["num_threads"] == torch.get_num_threads()


def test_the_environment_is_plain_json():
    environment = run_folder.describe_environment()
    assert json.loads(json.dumps(environment)) == environment


def git(folder, *arguments):
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
        cwd=folder, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, from whose folder `training` the code seems to come."""
    module = tmp_path / "training" / "run_folder.py"
    module.parent.mkdir()
    module.write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(run_folder, "__file__", str(module))
    return tmp_path


def test_the_commit_is_that_of_the_checkout(checkout):
    assert run_folder.describe_environment()["git_commit"] == git(checkout, "rev-parse", "HEAD")


def test_a_commit_with_changes_is_marked(checkout):
    (checkout / "training" / "run_folder.py").write_text("changed")
    assert run_folder.describe_environment()["git_commit"] == git(checkout, "rev-parse", "HEAD") + "-dirty"


def test_a_repository_that_does_not_track_the_code_is_not_its_commit(checkout, monkeypatch):
    installed = checkout / ".venv" / "run_folder.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(run_folder, "__file__", str(installed))
    assert run_folder.describe_environment()["git_commit"] is None


def test_an_interrupted_write_leaves_no_trace(tmp_path):
    with pytest.raises(KeyboardInterrupt), run_folder.replace_file(tmp_path / "data.json") as incomplete:
        Path(incomplete).write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


# --- resume without checkpoints


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run_without_checkpoints(tmp_path):
    folder = tmp_path / "run"
    assert call(*pretrain_flags(folder, max_steps=2)).code == 0
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return folder


def test_a_finished_run_without_checkpoints_is_not_trained_anew_at_resume(run_without_checkpoints):
    before = contents(run_without_checkpoints)
    outcome = call(*pretrain_flags(run_without_checkpoints, max_steps=2), "--resume")
    assert outcome.code == 2 and "has ended and its checkpoints are gone" in outcome.error_line
    assert contents(run_without_checkpoints) == before


def test_a_resume_that_fails_at_once_leaves_the_run_resumable(run_without_checkpoints, monkeypatch, caplog):
    (run_without_checkpoints / "metrics.json").unlink()

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ViTTrainer, "training_step", fail)
        assert call(*pretrain_flags(run_without_checkpoints, max_steps=2), "--resume").code == 3
    outcome = call(*pretrain_flags(run_without_checkpoints, max_steps=2), "--resume")
    assert outcome.code == 0, outcome.err
    assert "holds no checkpoint: the run begins at step 0" in caplog.text

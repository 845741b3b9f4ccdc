"""Tiny training runs: flags, the command line called in this process, and in a process that can be killed."""

import io
import json
import multiprocessing
import os
import re
import resource
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training import cli

TINY: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "dataset_name": "digits",
    "dataloader_num_workers": 0,
    "learning_rate": "2e-3",
    "max_steps": 4,
    "global_batch_size": 8,
    "save_steps": 2,
    "logging_steps": 1,
}


def flags(**fields: Any) -> list[str]:
    """The fields as flags; None leaves one out."""
    texts = {
        name: value if isinstance(value, list) else [value] for name, value in fields.items() if value is not None
    }
    return [part for name, values in texts.items() for part in (f"--{name}", *map(str, values))]


def pretrain_flags(output_dir: Path, **fields: Any) -> list[str]:
    """A tiny pretraining on the digits; `fields` override."""
    return ["pretrain", *flags(**{**TINY, "output_dir": output_dir, **fields})]


def finetune_flags(start: Path, output_dir: Path, **fields: Any) -> list[str]:
    """A tiny fine-tuning of the run folder `start` on the digits; `fields` override."""
    names = ("dataset_name", "dataloader_num_workers", "max_steps", "global_batch_size", "save_steps", "logging_steps")
    common = {name: TINY[name] for name in names}
    return ["finetune", *flags(**{**common, "model_name_or_path": start, "output_dir": output_dir, **fields})]


@dataclass
class Outcome:
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """The lines of stderr that are no progress bar."""
        lines = [line.rpartition("\r")[2] for line in self.err.split("\n")]
        return [line for line in lines if line.strip() and not re.search(r"\d+%\||[?\d]\w*/s[\],]", line)]

    @property
    def error_line(self) -> str:
        """The one line of the command line's error."""
        found = [line for line in self.complaints if line.startswith("vit-scratch ")]
        assert len(found) == 1, self.err
        assert self.complaints[-1] == found[0], self.err
        assert "Traceback" not in self.err, self.err
        return found[0]


def call(*argv: str) -> Outcome:
    """Runs the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([str(argument) for argument in argv])
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(*argv: str) -> str:
    """The error line of a command that must end with exit code 2, having said nothing else."""
    outcome = call(*argv)
    assert outcome.code == 2, outcome.err
    assert outcome.complaints == [outcome.error_line]
    return outcome.error_line


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def log_of(folder: Path, key: str = "loss") -> dict[int, float]:
    """The logged figure by step, of a run folder or checkpoint."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry[key] for entry in history if key in entry}


def assert_same_tensors(first: Path, second: Path) -> None:
    """Both safetensors files hold the same names and bits."""
    left, right = load_file(first), load_file(second)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a tiny pretraining on five of the ten digits."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    outcome = call(
        *pretrain_flags(folder, classes=list("01234"), test_fraction=0.2, validation_fraction=0.1, eval_steps=2)
    )
    assert outcome.code == 0, outcome.err
    return folder


# A process of its own for each command, forked from a server that has imported everything once: it can be killed,
# limited and signalled like a command typed into a shell, without paying for the imports.

_PRELOADED = [
    "fixtures_training",
    "training.pretrain",
    "training.finetune",
    "training.prediction",
    "matplotlib.backends.backend_agg",
]


def _command(argv: list[str], log: str, file_limit: int | None, group: bool) -> None:
    if group:
        os.setsid()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    sys.exit(cli.main(argv))


@dataclass
class Command:
    """A running `vit-scratch` of its own."""

    argv: list[str]
    log: Path
    file_limit: int | None = None
    group: bool = False
    process: Any = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        arguments = (self.argv, str(self.log), self.file_limit, self.group)
        self.process = context.Process(target=_command, args=arguments)
        self.process.start()

    def end(self, timeout: float = 120) -> int:
        """The exit code; minus the number of the signal that killed it."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"{self.argv} did not end: {self.text()}"
        return self.process.exitcode

    def wait_for(self, appears: Any, timeout: float = 120) -> None:
        """Returns once `appears()` is true."""
        deadline = time.monotonic() + timeout
        while not appears():
            assert time.monotonic() < deadline and self.process.is_alive(), self.text()
            time.sleep(0.001)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def run(argv: list[str], log: Path, **limits: Any) -> Outcome:
    """Runs a command in a process of its own, to its end."""
    command = Command([str(argument) for argument in argv], log, **limits)
    code = command.end()
    return Outcome(code, "", command.text())

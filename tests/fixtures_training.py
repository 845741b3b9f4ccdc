"""Tiny training runs: flags, the command line called in this process, and in a process that can be killed."""

import atexit
import functools
import gc
import io
import itertools
import json
import multiprocessing
import os
import pkgutil
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import set_seed

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchImageProcessor
from training import cli
from training.arguments import PretrainRecipe
from training.data import ImageDataset, LabelledImages
from training.fit import _trainer
from training.parsing import parse_recipe
from training.trainer import ViTTrainer

# The Trainer collects garbage at each start; two thirds of a tiny training would go into looking at the libraries.
gc.collect()
gc.freeze()

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


def pretrain_flags(output_dir: Path | None, **fields: Any) -> list[str]:
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


NUM_CLASSES = 5


def random_images(num_samples: int = 24, name: str = "train") -> LabelledImages:
    """Noise of 8x8 pixels in five classes."""
    pixels = np.random.default_rng(len(name)).integers(0, 256, (num_samples, 8, 8), dtype=np.uint8)
    return LabelledImages.from_column(name, pixels, np.arange(num_samples) % NUM_CLASSES)


def tiny_model(seed: int = 0, **fields: Any) -> ViTScratchForImageClassification:
    """A model of the TINY shape; its head is drawn too, since a zero head gives zero gradients below it."""
    network = {name: TINY[name] for name in ("image_size", "patch_size", "num_channels", "hidden_size")}
    network |= {name: TINY[name] for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size")}
    set_seed(seed)
    model = ViTScratchForImageClassification(ViTScratchConfig(**network, num_labels=NUM_CLASSES, **fields))
    torch.nn.init.normal_(model.classifier.weight, std=0.3)
    return model


def tiny_trainer(
    folder: Path, *, model: ViTScratchForImageClassification | None = None, train: Any = None, **fields: Any
) -> ViTTrainer:
    """The trainer that `pretrain` would build for these fields, on noise; saves where `folder` is."""
    training = {name: value for name, value in TINY.items() if name not in ("dataset_name", "learning_rate")}
    argv = flags(**{**training, "learning_rate": 1e-2, "output_dir": folder, **fields})
    recipe = parse_recipe(PretrainRecipe, argv, prog="vit-scratch pretrain", description="")
    model = tiny_model() if model is None else model
    dataset = ImageDataset(
        class_names=[str(label) for label in range(NUM_CLASSES)],
        train=random_images() if train is None else train,
        validation=random_images(15, "validation"),
        test=None,
        description={"dataset": "noise"},
    )
    set_seed(recipe.optimization.seed)
    return _trainer(recipe, "pretrain", model, ViTScratchImageProcessor.from_config(model.config), dataset)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all tensors."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# Made once by whichever test asks first.


@functools.cache
def pretrained() -> Path:
    """The run folder of a tiny pretraining on five of the ten digits, evaluated; not to be changed."""
    folder = _temporary_folder() / "run"
    outcome = call(
        *pretrain_flags(folder, classes=list("01234"), test_fraction=0.2, validation_fraction=0.1, eval_steps=2)
    )
    assert outcome.code == 0, outcome.err
    return folder


@functools.cache
def short_run() -> Path:
    """The run folder of two checkpoints without evaluation; not to be changed."""
    folder = _temporary_folder() / "run"
    outcome = call(*pretrain_flags(folder))
    assert outcome.code == 0, outcome.err
    return folder


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vit-scratch-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def interrupted_copy(run_folder: Path, target: Path, step: int = 2) -> Path:
    """The run folder as it was when the checkpoint of this step was the last thing written."""
    target.mkdir(parents=True)
    for name in ("recipe.yaml", "data.json"):
        shutil.copy(run_folder / name, target)
    shutil.copytree(run_folder / f"checkpoint-{step}", target / f"checkpoint-{step}")
    return target


# A process of its own for each command, forked from a server that has imported everything once: it can be killed,
# limited and signalled like a command typed into a shell, without paying for the imports.

_PRELOADED = [
    "fixtures_training",
    "training.pretrain",
    "training.finetune",
    "training.prediction",
    "matplotlib.backends.backend_agg",
]


class At(NamedTuple):
    """The moment of a signal: when a function is called for the nth time. `group`: the workers get it, too."""

    function: str
    call: int
    number: int = signal.SIGKILL
    group: bool = False

    def arm(self) -> None:
        """Makes this process signal itself at the moment."""
        owner_name, _, name = self.function.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        original, calls = getattr(owner, name), itertools.count(1)

        @functools.wraps(original)
        def signalling(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == self.call:
                send = f"killpg({os.getpgid(0)}, " if self.group else f"kill({os.getpid()}, "
                # From outside, since workers know their parent's signals.
                subprocess.run(
                    [sys.executable, "-S", "-c", f"import os; os.{send}{int(self.number)})"], start_new_session=True
                )
            return original(*args, **kwargs)

        setattr(owner, name, signalling)


def _command(argv: list[str], pipe: Any, file_limit: int | None, at: At | None) -> None:
    os.setsid()  # a group of its own, as the shell gives to each command
    multiprocessing.set_start_method(None, force=True)  # the loader's workers start as in any command
    os.dup2(pipe.fileno(), 1)
    os.dup2(pipe.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    if at is not None:
        at.arm()
    sys.exit(cli.main(argv))


class Command:
    """A running `vit-scratch` of its own."""

    def __init__(self, argv: list[str], *, file_limit: int | None = None, at: At | None = None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        reader, writer = context.Pipe(duplex=False)
        self.argv, self.said = [str(argument) for argument in argv], b""
        self.process = context.Process(target=_command, args=(self.argv, writer, file_limit, at))
        self.process.start()
        writer.close()
        self.listener = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        self.listener.start()

    def _listen(self, reader: Any) -> None:
        while chunk := os.read(reader.fileno(), 65536):
            self.said += chunk

    def end(self, timeout: float = 120) -> Outcome:
        """What it left; the code of one that was killed is minus the signal's number."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"{self.argv} did not end: {self.text}"
        self.listener.join(10)
        return Outcome(self.process.exitcode, "", self.text)

    @property
    def text(self) -> str:
        return self.said.decode()


def run(argv: list[str], **limits: Any) -> Outcome:
    """Runs a command in a process of its own, to its end."""
    return Command(argv, **limits).end()

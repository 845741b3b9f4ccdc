"""Proof that a published model is whole and loads for everybody: hashes, a fresh process, the golden, its accuracy."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

from .golden import GOLDEN_NAME, golden_problem
from .manifest import verify_manifest
from .pull import pull

__all__ = ["FreshLoadError", "Verification", "load_in_fresh_process", "verify"]

logger = logging.getLogger(__name__)

FRESH_LOAD_TIMEOUT_SECONDS = 1800.0


class FreshLoadError(RuntimeError):
    """A process that has only transformers could not load the folder, or got another model out of it."""


@dataclass(frozen=True)
class Verification:
    source: str
    commit: str | None
    """None for a folder."""
    num_files: int
    fresh_load: dict[str, Any]
    """What the fresh process reported: classes, largest differences to the golden, the pipeline's answer."""
    card_accuracy: float
    measured_accuracy: float | None
    """None where nothing was re-evaluated."""


def verify(
    source: str | Path,
    *,
    revision: str | None = None,
    evaluate: Callable[[Path], float] | None = None,
    token: str | None = None,
) -> Verification:
    """Returns what was found; raises InputError where the published model is not what its manifest and card say.

    Args:
        source: A folder, or a repository id, which is pulled into an empty cache.
        revision: Branch, tag or commit of the repository; with it, `source` is never taken for a folder.
        evaluate: Measures the accuracy of the model in a folder, on data at hand.
        token: For a private repository; None: the one that `hf auth login` stored.
    """
    try:
        if revision is None and Path(source).is_dir():
            return _verify_folder(Path(source), str(source), None, evaluate)
        if str(source).startswith((".", "/", "~")):
            raise InputError(f"{source}: no such folder; give a staging folder or the id of a repository")
        with tempfile.TemporaryDirectory(prefix="vit-scratch-verify-") as cache:
            pulled = pull(str(source), cache, revision=revision, token=token)
            return _verify_folder(pulled.folder, str(source), pulled.commit, evaluate, cache)
    except OSError as error:
        raise EnvironmentFault(f"{source}: {error}; make room in the temporary folder and try again") from error


def _verify_folder(
    folder: Path,
    source: str,
    commit: str | None,
    evaluate: Callable[[Path], float] | None,
    cache: str | None = None,
) -> Verification:
    manifest = verify_manifest(folder, source)
    try:
        report = load_in_fresh_process(source if commit else folder, folder / GOLDEN_NAME, commit, cache)
    except FreshLoadError as error:
        raise InputError(f"{error}; push it again") from error
    accuracy, num_samples = _card_accuracy(folder, source)
    measured = evaluate(folder) if evaluate else None
    # One image more or less is what rounding on another machine can turn.
    if measured is not None and abs(measured - accuracy) * num_samples > 1.001:
        raise InputError(
            f"{source}: the card states an accuracy of {accuracy:.4f}, measured {measured:.4f} on the data at hand; "
            f"evaluate on the {num_samples} images that data.json names"
        )
    return Verification(source, commit, len(manifest["files"]), report, accuracy, measured)


def _card_accuracy(folder: Path, source: str) -> tuple[float, int]:
    """Returns the accuracy in the card's model-index and the number of images it was measured on."""
    evaluation = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["evaluation"]
    try:
        results = ModelCard((folder / "README.md").read_text(encoding="utf-8")).data.get("eval_results", [])
    except FileNotFoundError as error:
        raise InputError(f"{source}: README.md is missing; push it again") from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{source}: README.md is no readable model card ({reason}); mend it there") from error
    stated = [result.metric_value for result in results if result.metric_type == "accuracy"]
    if not any(abs(value - evaluation["accuracy"]["value"]) < 1e-5 for value in stated):
        raise InputError(
            f"{source}: README.md states the accuracies {stated} in its model-index, metrics.json "
            f"{evaluation['accuracy']['value']:.6f}; push it again"
        )
    return evaluation["accuracy"]["value"], evaluation["num_samples"]


def load_in_fresh_process(
    source: str | Path, golden: Path, commit: str | None = None, cache_dir: str | Path | None = None
) -> dict[str, Any]:
    """Returns the report of `fresh_load.py` on a folder, or on a pulled repository: its id, commit and cache.

    The process starts in an empty folder with an empty module cache and offline: what it loads is what was pulled, and
    no folder of the repository's name can stand in for it. Raises FreshLoadError where loading or the golden fails.
    """
    with tempfile.TemporaryDirectory(prefix="vit-scratch-fresh-") as home:
        work = Path(home) / "work"
        work.mkdir()
        command = [sys.executable, "-P", str(Path(__file__).with_name("fresh_load.py"))]
        command += [str(source if commit else Path(source).resolve()), str(golden.resolve())]
        command += ["--revision", commit] if commit else []
        environment = {
            **os.environ,
            "HF_HOME": home,
            "HF_HUB_CACHE": str(Path(cache_dir or home).resolve()),
            "HF_MODULES_CACHE": str(Path(home) / "modules"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        done = _run(command, work, environment)
    if done.returncode < 0:
        raise EnvironmentFault(
            f"{source}: the fresh process for loading was ended by signal {-done.returncode}; make room in memory and "
            "try again"
        )
    if done.returncode != 0:
        logger.debug("fresh process:\n%s", done.stderr)
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise FreshLoadError(f"{source}: does not load in a fresh process ({last.strip()})")
    report = json.loads(done.stdout.splitlines()[-1])
    if problem := golden_problem(report):
        raise FreshLoadError(f"{source}: in a fresh process {problem}")
    return report


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FRESH_LOAD_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"the fresh process for loading did not finish ({error}); try again") from error

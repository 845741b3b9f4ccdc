"""The run folder: what a run leaves behind and whoever comes next reads. Every file appears whole or not at all."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

__all__ = [
    "DATA_FILE",
    "ENVIRONMENT_FILE",
    "FIGURES_FOLDER",
    "METRICS_FILE",
    "PREDICTIONS_FILE",
    "RECIPE_FILE",
    "SCHEMA_VERSION",
    "TRAINER_STATE_FILE",
    "Predictions",
    "check_output_dir",
    "describe_environment",
    "num_cores",
    "prepare_output_dir",
    "read_json",
    "read_predictions",
    "replace_file",
    "write_json",
    "write_predictions",
]

SCHEMA_VERSION = 1

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.json"
DATA_FILE = "data.json"
ENVIRONMENT_FILE = "environment.json"
TRAINER_STATE_FILE = "trainer_state.json"
PREDICTIONS_FILE = "predictions.parquet"
FIGURES_FOLDER = "figures"

# Any of these tells a run folder from a folder of other things.
_SIGNS_OF_A_RUN = (
    RECIPE_FILE,
    METRICS_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    TRAINER_STATE_FILE,
    PREDICTIONS_FILE,
    "config.json",
    "preprocessor_config.json",
    "*.safetensors",
    "checkpoint-*",
)

# Whose versions may change a result.
_PACKAGES = (
    "vit-scratch",
    "torch",
    "torchvision",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "huggingface_hub",
    "numpy",
    "pillow",
    "scikit-learn",
)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The columns of predictions.parquet; probabilities are (N, K) float32."""

    sample_ids: list[str]
    labels: np.ndarray
    predictions: np.ndarray
    probabilities: np.ndarray


def check_output_dir(path: str | Path) -> Path:
    """The output folder, if a new run may begin there; nothing is made or changed."""
    folder = Path(path)
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"output_dir={str(path)!r} is a file: name a folder.")
        found = sorted(entry.name for pattern in _SIGNS_OF_A_RUN for entry in folder.glob(pattern))
    except OSError as error:
        raise EnvironmentFault(f"cannot look into output_dir={str(path)!r}: {error.strerror}.") from error
    if found:
        others = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise InputError(
            f"output_dir={str(path)!r} already holds a run ({', '.join(found[:3])}{others}): continue it with "
            f"--resume, or choose another --output_dir."
        )
    return folder


def prepare_output_dir(path: str | Path) -> Path:
    """The output folder, made if needed, for a run that starts anew. Files that are not of a run are left alone."""
    folder = check_output_dir(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"output_dir={str(path)!r} lies below a file: name another folder.") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot make output_dir={str(path)!r}: {error.strerror}.") from error
    return folder


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """A name to write to; at the end the file is on disk and takes `path`'s place, or nothing has changed.

    Missing folders are made.

    Raises:
        EnvironmentFault: no space, no permission, or another failure of the disk, by the name of the file.
    """
    path = Path(path)
    # One name a file, so that a killed process leaves at most one, which the next write replaces.
    incomplete = path.with_name(f".{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield incomplete
        with open(incomplete, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(incomplete, path)
        _sync_folder(path.parent)
    except OSError as error:
        _remove(incomplete)
        raise EnvironmentFault(
            f"cannot write {path}: {error.strerror or error}. An earlier {path.name} is untouched; make room or mend "
            f"permissions, then run again."
        ) from error
    except BaseException:
        _remove(incomplete)
        raise


def _remove(path: Path) -> None:
    with suppress(OSError):  # the first failure is the one to tell
        path.unlink()


def _sync_folder(folder: Path) -> None:
    """The renaming itself on disk; only POSIX opens folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Writes the content with its `schema_version`; NaN, which JSON does not know, is refused."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2, ensure_ascii=False, allow_nan=False)
    with replace_file(path) as incomplete:
        incomplete.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict[str, Any]:
    """The content of a JSON file of a run folder, with its `schema_version`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: is this the folder of a finished run?") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{path} is no valid JSON ({error}): restore it or run again.") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema_version {version!r} where this version reads {SCHEMA_VERSION}: it is no file of a "
            f"run, or one of another version of vit-scratch."
        )
    return content


def write_predictions(
    path: str | Path, *, sample_ids: Sequence[str], labels: np.ndarray, probabilities: np.ndarray
) -> None:
    """Writes sample id, label, prediction and class probabilities (N, K), one row a sample."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    probabilities = np.ascontiguousarray(probabilities, dtype=np.float32)
    num_samples, num_classes = probabilities.shape
    assert len(sample_ids) == len(labels) == num_samples
    offsets = pa.array(np.arange(num_samples + 1, dtype=np.int32) * num_classes)
    table = pa.table(
        {
            "sample_id": pa.array(list(sample_ids), pa.string()),
            "label": pa.array(np.asarray(labels), pa.int64()),
            "prediction": pa.array(probabilities.argmax(axis=1), pa.int64()),
            "probabilities": pa.ListArray.from_arrays(offsets, pa.array(probabilities.ravel(), pa.float32())),
        },
        metadata={"schema_version": str(SCHEMA_VERSION)},
    )
    with replace_file(path) as incomplete:
        pq.write_table(table, incomplete)


def read_predictions(path: str | Path) -> Predictions:
    """The predictions of a run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(path, columns=["sample_id", "label", "prediction", "probabilities"])
        probabilities = np.stack(columns["probabilities"].to_numpy()).astype(np.float32)
        return Predictions(
            sample_ids=columns["sample_id"].to_pylist(),
            labels=columns["label"].to_numpy(),
            predictions=columns["prediction"].to_numpy(),
            probabilities=probabilities,
        )
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: is this the folder of a finished run?") from error
    except (pa.ArrowException, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} holds no predictions ({reason}): restore it or evaluate again.") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error}.") from error


def describe_environment() -> dict[str, Any]:
    """The content of environment.json: what a result may depend on beside the recipe and the data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "num_cores": num_cores(),
        "num_threads": torch.get_num_threads(),
        "accelerator": _accelerator_name(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git_commit": _git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """The cores this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _accelerator_name() -> str | None:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "Apple MPS" if torch.backends.mps.is_available() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of this code, with -dirty if tracked files differ from it; None where the code is no checkout."""
    here = Path(__file__).resolve()
    # An installed copy may lie in a virtual environment inside someone else's repository, which does not track it.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None

"""Checkpoints that are whole or absent: written aside, hashed, renamed; verified before they are resumed from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

__all__ = [
    "checkpoint_folder",
    "newest_checkpoint",
    "prune_checkpoints",
    "publish_checkpoint",
    "remove_unfinished",
    "unfinished_folder",
    "verify_checkpoint",
    "writing_to_disk",
]

HASHES = "hashes.json"
_PREFIX = "checkpoint-"
_UNFINISHED = "unfinished-"

# torch.save turns what the disk says into RuntimeErrors, by how far it came.
_SIGNS_OF_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")


def checkpoint_folder(run_folder: str | Path, step: int) -> Path:
    return Path(run_folder) / f"{_PREFIX}{step}"


def unfinished_folder(run_folder: str | Path, step: int) -> Path:
    """Where a checkpoint is written before it is published; `resume` never looks there."""
    return Path(run_folder) / f"{_UNFINISHED}{_PREFIX}{step}"


@contextmanager
def writing_to_disk(folder: Path) -> Iterator[None]:
    """Turns a failed write below `folder` into `EnvironmentFault`, after removing what was half written there."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, RuntimeError):
            if not any(sign in reason for sign in _SIGNS_OF_TORCH_WRITER):
                raise
            reason = f"no space, or a file too large ({reason})"
        shutil.rmtree(folder, ignore_errors=True)
        remedy = "earlier checkpoints are whole: make room, then use --resume"
        if not _checkpoints(folder.parent):
            remedy = "there is no earlier checkpoint: make room, then run again"
        raise EnvironmentFault(f"could not write {folder}: {reason}; {remedy}") from error


def publish_checkpoint(run_folder: str | Path, step: int) -> Path:
    """Hashes the files written aside, syncs them to disk and gives the folder its name in one rename."""
    aside, final = unfinished_folder(run_folder, step), checkpoint_folder(run_folder, step)
    hashes = {path.relative_to(aside).as_posix(): _sha256(path) for path in sorted(aside.rglob("*")) if path.is_file()}
    with open(aside / HASHES, "w", encoding="utf-8") as file:
        json.dump({"schema_version": 1, "step": step, "sha256": hashes}, file, indent=2)
    for path in aside.rglob("*"):
        _sync(path)
    _sync(aside)
    if final.exists():  # the same step, saved again by a run that resumed before it
        shutil.rmtree(final)
    os.replace(aside, final)
    _sync(Path(run_folder))
    return final


def newest_checkpoint(run_folder: str | Path) -> Path | None:
    """Returns the checkpoint of the highest step, verified, or None if there is none."""
    found = _checkpoints(run_folder)
    if not found:
        return None
    verify_checkpoint(found[-1])
    return found[-1]


def verify_checkpoint(folder: Path) -> None:
    """Raises `InputError` naming the first file that is missing or not as it was saved."""
    remedy = f"delete {folder} to resume from the checkpoint before it"
    try:
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / HASHES} is missing or unreadable, so nothing vouches for it; {remedy}") from error
    for name, sha256 in hashes.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path} is missing; {remedy}")
        if _sha256(path) != sha256:
            raise InputError(f"{path} is not as it was saved (its sha256 differs); {remedy}")


def prune_checkpoints(run_folder: str | Path, *, keep: int, best: str | None) -> None:
    """Removes the oldest checkpoints beyond `keep`; the best one always stays."""
    best_name = Path(best).name if best else None
    for folder in _checkpoints(run_folder)[:-keep]:
        if folder.name != best_name:
            shutil.rmtree(folder)


def remove_unfinished(run_folder: str | Path) -> None:
    """Removes what an interrupted save left."""
    for folder in Path(run_folder).glob(f"{_UNFINISHED}*"):
        shutil.rmtree(folder)


def _checkpoints(run_folder: str | Path) -> list[Path]:
    folders = [
        path for path in Path(run_folder).glob(f"{_PREFIX}*") if path.is_dir() and path.name[len(_PREFIX) :].isdigit()
    ]
    return sorted(folders, key=lambda path: int(path.name[len(_PREFIX) :]))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What a published folder consists of: the code files it needs, and the hash of every file."""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

from modeling_vit_scratch.errors_vit_scratch import InputError

__all__ = ["CODE_ENTRY_POINTS", "MANIFEST_NAME", "code_closure", "read_manifest", "verify_manifest", "write_manifest"]

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1

# The files that auto_map and custom_pipelines name; what they import comes along.
CODE_ENTRY_POINTS = (
    "backbone_vit_scratch.py",
    "image_processing_vit_scratch.py",
    "modeling_vit_scratch.py",
    "pipeline_vit_scratch.py",
    "pretraining_vit_scratch.py",
)

# Owners edit these on the Hub: a changed card or attribute file is no damage.
_EDITED_ON_THE_HUB = ("README.md", ".gitattributes", MANIFEST_NAME)


def code_closure(package: Path, entry_points: tuple[str, ...] = CODE_ENTRY_POINTS) -> list[str]:
    """Returns the names of all files in `package` that the entry points reach by relative imports, sorted.

    transformers finds the files to download by a regular expression on `from .name import ...` and looks for them
    beside the entry point, so any other relative import would work here and fail for every downloader.
    """
    reached: set[str] = set()
    waiting = list(entry_points)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += _relative_imports(package / name)
    return sorted(reached)


def _relative_imports(file: Path) -> list[str]:
    imported = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        assert node.level == 1 and node.module and "." not in node.module, (
            f"{file.name}, line {node.lineno}: only `from .name import ...` can be followed from a Hub repository"
        )
        imported.append(f"{node.module}.py")
    return imported


def write_manifest(folder: Path, **facts: Any) -> dict[str, Any]:
    """Returns the manifest of all files in `folder`, having written it there. `facts` are kept beside the hashes."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {
        path: {"size": (folder / path).stat().st_size, "sha256": _sha256(folder / path)}
        for path in paths
        if path not in _EDITED_ON_THE_HUB
    }
    manifest = {"schema_version": SCHEMA_VERSION, "files": files, **facts}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def read_manifest(folder: Path, name: str | None = None) -> dict[str, Any]:
    """Returns the manifest in `folder`, which errors call `name`; InputError where there is none or it is broken."""
    path, name = folder / MANIFEST_NAME, name or str(folder)
    if not path.is_file():
        raise InputError(f"{name}: no {MANIFEST_NAME}, so it was not published by `vit-scratch push`; push it again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["schema_version"], manifest["files"]
        well_formed = isinstance(files, dict) and all({"size", "sha256"} <= set(file) for file in files.values())
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{name}: {MANIFEST_NAME} is no manifest ({error!r}); push the run folder again") from error
    if version != SCHEMA_VERSION or not well_formed:
        raise InputError(
            f"{name}: {MANIFEST_NAME} of schema_version {version} with these fields is not known here (known: "
            f"{SCHEMA_VERSION}); use the vit-scratch that wrote it"
        )
    return manifest


def verify_manifest(folder: Path, name: str | None = None) -> dict[str, Any]:
    """Returns the manifest in `folder`; raises InputError naming every file that is missing or differs from it.

    `name` is what errors call the folder: that of a repository says more than where its files were pulled to.
    """
    manifest = read_manifest(folder, name)
    problems = []
    for path, expected in manifest["files"].items():
        file = folder / path
        if not file.is_file():
            problems.append(f"{path} is missing")
        elif file.stat().st_size != expected["size"]:
            problems.append(f"{path} has {file.stat().st_size} bytes instead of {expected['size']}")
        elif _sha256(file) != expected["sha256"]:
            problems.append(f"{path} has another sha256")
    if problems:
        raise InputError(
            f"{name or folder}: not what was published: {'; '.join(problems)}; pull it again or push it again"
        )
    return manifest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Folders of images: one folder a class, below split folders or not. Nothing is guessed below the top level."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training.labelled_images import LabelledImages, SourceData, natural_key
from training.splits import canonical_split_name

__all__ = ["read_image_folder"]

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp"},
)
# Images in formats that are not read. Leaving these out would be a loss of images, so it needs the user's word.
UNREAD_IMAGE_SUFFIXES = frozenset(
    {".avif", ".heic", ".heif", ".ico", ".j2k", ".jp2", ".jxl", ".pbm", ".pgm", ".pnm", ".ppm", ".psd", ".svg", ".tga"}
    | {".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2"},
)

OnBrokenImage = Literal["raise", "skip"]


class _FolderReader:
    """Walks one folder and keeps account of every file that does not become a sample."""

    def __init__(self, root: Path, on_broken_image: OnBrokenImage):
        self.root = root
        self.on_broken_image = on_broken_image
        self.dropped: list[dict[str, str]] = []
        self.suffixes: Counter[str] = Counter()

    def sample_id(self, path: Path) -> str:
        return _as_text(path.relative_to(self.root).as_posix())

    def drop(self, path: Path, reason: str) -> None:
        self.dropped.append({"sample_id": self.sample_id(path), "reason": reason})

    def drop_image(self, path: Path, reason: str) -> None:
        if self.on_broken_image == "raise":
            raise InputError(
                f"{path}: {reason}. Move or convert it, or leave such files out with on_broken_image=skip, which "
                f"lists them in data.json."
            )
        self.drop(path, reason)

    def folders_of(self, folder: Path, *, images_belong_to: str) -> list[Path]:
        """The visible sub-folders in natural order, where images lying beside them belong to no class."""
        folders = []
        for entry in self._visible_entries(folder):
            if entry.is_dir():
                folders.append(entry)
            elif entry.suffix.lower() in IMAGE_SUFFIXES | UNREAD_IMAGE_SUFFIXES:
                self.drop_image(entry, f"image outside of any {images_belong_to}, so it has no label")
            else:
                self.drop(entry, "not an image file")
        return folders

    def images_below(self, folder: Path, *, entered: frozenset[Path] = frozenset()) -> Iterator[Path]:
        """The images in a class folder and its sub-folders, in natural order."""
        real = folder.resolve()
        if real in entered:
            self.drop(folder, "link to a folder that holds it")
            return
        for entry in self._visible_entries(folder):
            suffix = entry.suffix.lower()
            if entry.is_dir():
                yield from self.images_below(entry, entered=entered | {real})
            elif suffix in IMAGE_SUFFIXES:
                self.suffixes[suffix.removeprefix(".")] += 1
                yield entry
            elif suffix in UNREAD_IMAGE_SUFFIXES:
                self.drop_image(entry, f"image format {suffix} is not read")
            else:
                self.drop(entry, "not an image file")

    def _visible_entries(self, folder: Path) -> Iterator[Path]:
        for entry in _entries(folder):
            if entry.name.startswith("."):
                self.drop(entry, "hidden")
            else:
                yield entry


def read_image_folder(root: Path, *, on_broken_image: OnBrokenImage) -> SourceData:
    """The images below `root`, labelled by their class folder, classes in natural order (1, 2, 10)."""
    reader = _FolderReader(root, on_broken_image)
    split_folders = _find_split_folders(root)
    files: dict[str, dict[str, list[Path]]] = {}
    if split_folders:
        reader.folders_of(root, images_belong_to="class folder")
        for name, folder in split_folders.items():
            files[name] = _read_classes(reader, folder)
    else:
        files["train"] = _read_classes(reader, root)
    class_names = _class_names(files, split_folders, root)
    splits = {name: _labelled(reader, name, classes, class_names) for name, classes in files.items()}
    return SourceData(
        dataset=root.resolve().name,
        kind="imagefolder",
        source=f"image files of the folder {root.resolve().name}, one folder a class",
        class_names=class_names,
        splits=splits,
        inferred={
            "layout": "split folders" if split_folders else "class folders",
            "split_folders": {folder.name: name for name, folder in split_folders.items()},
            "class_order": "natural order of the folder names",
            "image_files": dict(sorted(reader.suffixes.items())),
        },
        dropped=reader.dropped,
    )


def _as_text(name: str) -> str:
    """The name as valid Unicode: file names are bytes, while data.json and predictions.parquet hold text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: natural_key(entry.name))
    except OSError as error:
        raise EnvironmentFault(f"cannot list {folder}: {error.strerror}.") from error


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir() and not entry.name.startswith(".")]


def _find_split_folders(root: Path) -> dict[str, Path]:
    """The split folders of the top level, or nothing where the top level is that of the classes.

    Only whole names count: `cat-test` is a class. So is a folder called `train` that holds images itself, beside
    `bus` and `car`. What could be either is the user's to decide.
    """
    folders = _folders(root)
    named = [folder for folder in folders if canonical_split_name(folder.name)]
    splits = [folder for folder in named if _folders(folder)]
    others = [folder for folder in folders if folder not in splits]
    if folders and len(named) == len(folders) and not splits:
        raise InputError(
            f"{folders[0]} has no class folders: put the images of each class into a folder named after it."
        )
    if not splits:
        return {}
    if others:
        hint = (
            "give its images class folders or move it away"
            if len(named) == len(folders)
            else "move it away, or rename the split folders if they are classes"
        )
        raise InputError(
            f"{root} has split folders ({', '.join(folder.name for folder in splits)}) beside {others[0].name!r}, "
            f"which is no split folder with class folders in it: {hint}."
        )
    found: dict[str, Path] = {}
    for folder in splits:
        name = canonical_split_name(folder.name)
        assert name is not None
        if name in found:
            raise InputError(
                f"{root} has two folders for the {name} split, {found[name].name} and {folder.name}: merge them."
            )
        found[name] = folder
    return found


def _read_classes(reader: _FolderReader, folder: Path) -> dict[str, list[Path]]:
    folders = reader.folders_of(folder, images_belong_to="class folder")
    if not folders:
        raise InputError(f"{folder} has no class folders: put the images of each class into a folder named after it.")
    classes = {_as_text(class_folder.name): list(reader.images_below(class_folder)) for class_folder in folders}
    for name, paths in classes.items():
        if not paths:
            formats = ", ".join(sorted(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES))
            raise InputError(f"class folder {folder / name} holds no image ({formats}): add some or remove it.")
    return classes


def _class_names(files: dict[str, dict[str, list[Path]]], split_folders: dict[str, Path], root: Path) -> list[str]:
    reference = "train" if "train" in files else next(iter(files))
    class_names = sorted(files[reference], key=natural_key)
    for name, classes in files.items():
        unknown = [class_name for class_name in classes if class_name not in files[reference]]
        if unknown:
            raise InputError(
                f"{root / split_folders[name].name} has a class folder {unknown[0]!r} that "
                f"{split_folders[reference].name} lacks: add images of it there, or remove it."
            )
    return class_names


def _labelled(
    reader: _FolderReader, name: str, classes: dict[str, list[Path]], class_names: list[str]
) -> LabelledImages:
    paths = [path for class_name in class_names for path in classes.get(class_name, [])]
    counts = [len(classes.get(class_name, [])) for class_name in class_names]
    return LabelledImages.from_column(
        name,
        [str(path) for path in paths],
        np.repeat(np.arange(len(class_names)), counts),
        sample_ids=[reader.sample_id(path) for path in paths],
    )

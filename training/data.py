"""From what the user names to labelled splits: one policy for every source.

Splits are carved before classes are filtered, so an image that is held out when all classes are used is held out
when some are: a model pretrained on five classes has seen no test image of a later run on all of them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_vit_scratch.errors_vit_scratch import InputError
from training.broken_images import drop_broken_images
from training.hub_datasets import is_dataset_folder, read_dataset_folder, read_hub_dataset
from training.image_folders import read_image_folder
from training.labelled_images import LabelledImages, SourceData
from training.run_folder import SCHEMA_VERSION
from training.sources import find_idx_files, read_digits, read_idx_folder
from training.splits import carve_splits

if TYPE_CHECKING:
    from training.arguments import DataArguments

__all__ = ["ImageDataset", "LabelledImages", "load_image_dataset", "summarize_description"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageDataset:
    """Labelled splits of one dataset. `description` is the content of data.json."""

    class_names: list[str]
    train: LabelledImages | None
    validation: LabelledImages | None
    test: LabelledImages | None
    description: dict[str, Any]

    def split(self, name: str) -> LabelledImages | None:
        """The split called train, validation or test, or None where the dataset has none."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


def load_image_dataset(arguments: "DataArguments", *, class_names: list[str] | None = None) -> ImageDataset:
    """The dataset that the arguments name, split and checked.

    With `class_names`, those of a checkpoint, labels follow the checkpoint's order; a set that differs raises.

    Raises:
        InputError: the arguments or the data are at fault; the message names file, row or field.
        EnvironmentFault: disk or network failed.
    """
    source = _read_source(arguments)
    if arguments.on_broken_image == "skip":
        source = drop_broken_images(source)
    source = _without_empty_splits(source)
    source = _drop_unkept_rarities(source, arguments)
    splits, origins = carve_splits(
        source.splits,
        source.class_names,
        validation_fraction=arguments.validation_fraction,
        test_fraction=arguments.test_fraction,
        seed=arguments.split_seed,
    )
    source = replace(source, splits=splits)
    if arguments.classes is not None:
        source = _keep_classes(source, arguments.classes)
    if class_names is not None:
        source = _follow_order(source, class_names)
    _check_classes(source)
    dataset = ImageDataset(
        class_names=source.class_names,
        train=source.splits.get("train"),
        validation=source.splits.get("validation"),
        test=source.splits.get("test"),
        description=_describe(source, origins, arguments.split_seed),
    )
    logger.info("%s", summarize_description(dataset.description))
    return dataset


def summarize_description(description: dict[str, Any]) -> str:
    """The lines that tell a reader what was found, inferred and dropped."""
    names = description["class_names"]
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    lines = [f"dataset {description['dataset']}: {description['source']}", f"{len(names)} classes: {shown}"]
    for name, split in description["splits"].items():
        lines.append(f"{name}: {split['num_samples']} images, {split['origin']}, sha256 {split['sha256'][:12]}")
    lines += [f"{key}: {value}" for key, value in description["inferred"].items() if value]
    dropped = description["dropped"]
    if dropped:
        first = dropped[0]
        lines.append(f"dropped: {len(dropped)} files, the first is {first['sample_id']} ({first['reason']})")
    return "\n".join(lines)


def _read_source(arguments: "DataArguments") -> SourceData:
    if (arguments.dataset_name is None) == (arguments.data_dir is None):
        raise InputError(
            f"dataset_name={arguments.dataset_name!r} and data_dir={arguments.data_dir!r}: set exactly one of them."
        )
    if arguments.dataset_name == "digits":
        _refuse_unused(arguments, "image_column", "label_column", "dataset_config_name", "dataset_revision")
        return read_digits()
    if arguments.data_dir is None and not Path(str(arguments.dataset_name)).is_dir():
        return read_hub_dataset(
            str(arguments.dataset_name),
            config_name=arguments.dataset_config_name,
            revision=arguments.dataset_revision,
            image_column=arguments.image_column,
            label_column=arguments.label_column,
        )
    # A local dataset_name follows our rules too: `datasets` would guess splits from any part of a file's name.
    return _read_folder(Path(str(arguments.data_dir or arguments.dataset_name)), arguments)


def _read_folder(folder: Path, arguments: "DataArguments") -> SourceData:
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"data_dir={str(folder)!r} {found}: name a folder of class folders or of idx files.")
    _refuse_unused(arguments, "dataset_revision")
    if find_idx_files(folder):
        _refuse_unused(arguments, "image_column", "label_column", "dataset_config_name")
        return read_idx_folder(folder)
    if is_dataset_folder(folder):
        return read_dataset_folder(
            folder,
            config_name=arguments.dataset_config_name,
            image_column=arguments.image_column,
            label_column=arguments.label_column,
        )
    _refuse_unused(arguments, "image_column", "label_column", "dataset_config_name")
    return read_image_folder(folder, on_broken_image=arguments.on_broken_image)


def _refuse_unused(arguments: "DataArguments", *names: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            source = arguments.data_dir or arguments.dataset_name
            raise InputError(f"{name}={getattr(arguments, name)!r} means nothing for {source}: leave it out.")


def _without_empty_splits(source: SourceData) -> SourceData:
    for name, split in source.splits.items():
        if not len(split):
            raise InputError(f"the {name} split of {source.dataset} holds no readable image.")
    return source


def _drop_unkept_rarities(source: SourceData, arguments: "DataArguments") -> SourceData:
    """The source without those classes that `classes` leaves out and that are too small to be split.

    Other classes that are left out stay until the splits are carved; carving with these would be refused.
    """
    if arguments.classes is None or "train" not in source.splits:
        return source
    train = source.splits["train"]
    counts = np.bincount(train.labels, minlength=len(source.class_names))
    kept = np.isin(source.class_names, arguments.classes)
    rows = np.flatnonzero(~((counts < 3) & ~kept)[train.labels])
    return replace(source, splits={**source.splits, "train": train.select(rows)})


def _keep_classes(source: SourceData, classes: Sequence[str]) -> SourceData:
    """Only the given classes, numbered in the given order."""
    for index, name in enumerate(classes):
        if name not in source.class_names:
            raise InputError(
                f"classes names {name!r}, which {source.dataset} does not have; it has: "
                f"{', '.join(source.class_names)}."
            )
        if name in classes[:index]:
            raise InputError(f"classes names {name!r} twice.")
    new_labels = np.full(len(source.class_names), -1)
    new_labels[[source.class_names.index(name) for name in classes]] = np.arange(len(classes))
    splits = {}
    for name, split in source.splits.items():
        rows = np.flatnonzero(new_labels[split.labels] >= 0)
        if not len(rows):
            raise InputError(f"the {name} split of {source.dataset} has no image of the classes {', '.join(classes)}.")
        splits[name] = split.select(rows).relabel(new_labels)
    return replace(source, class_names=list(classes), splits=splits)


def _follow_order(source: SourceData, class_names: list[str]) -> SourceData:
    only_here = [name for name in source.class_names if name not in class_names]
    only_there = [name for name in class_names if name not in source.class_names]
    if only_here or only_there:
        raise InputError(
            f"classes of {source.dataset} and of the checkpoint differ. Only in the dataset (+): "
            f"{', '.join(only_here) or 'none'}. Only in the checkpoint (-): {', '.join(only_there) or 'none'}. "
            f"Rename the classes of the dataset, choose some with `classes`, or fine-tune with a new head."
        )
    return _keep_classes(source, class_names)


def _check_classes(source: SourceData) -> None:
    if len(source.class_names) < 2:
        raise InputError(
            f"{source.dataset} has {len(source.class_names)} class ({', '.join(source.class_names)}); "
            f"a classifier needs at least two."
        )
    for name in source.class_names:
        if source.class_names.count(name) > 1:
            raise InputError(f"{source.dataset} has the class name {name!r} twice: class names must be unique.")
    if "train" in source.splits:
        counts = np.bincount(source.splits["train"].labels, minlength=len(source.class_names))
        unseen = [name for name, count in zip(source.class_names, counts, strict=True) if not count]
        if unseen:
            logger.warning("%d classes have no training image: %s", len(unseen), ", ".join(unseen))
            source.inferred["classes_without_training_image"] = unseen


def _describe(source: SourceData, origins: dict[str, str], split_seed: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "dataset": source.dataset,
        "kind": source.kind,
        "revision": source.revision,
        "source": source.source,
        "license": source.license,
        "num_classes": len(source.class_names),
        "class_names": source.class_names,
        "splits": {
            name: {
                "num_samples": len(source.splits[name]),
                "sha256": source.splits[name].fingerprint,
                "origin": origins[name],
            }
            for name in ("train", "validation", "test")
            if name in source.splits
        },
        "split_seed": split_seed,
        "inferred": source.inferred,
        "dropped": source.dropped,
    }

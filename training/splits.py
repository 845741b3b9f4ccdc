"""Seeded, stratified splits. They depend on labels and seed alone, so every rank carves the same."""

import math

import numpy as np
from sklearn.model_selection import StratifiedShuffleSplit

from modeling_vit_scratch.errors_vit_scratch import InputError
from training.labelled_images import LabelledImages

__all__ = ["canonical_split_name", "carve_splits", "stratified_rows"]

SPLIT_NAMES = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
}


def canonical_split_name(name: str) -> str | None:
    """train, validation or test for a name that means one of them, else None."""
    return SPLIT_NAMES.get(name.casefold())


def carve_splits(
    splits: dict[str, LabelledImages],
    class_names: list[str],
    *,
    validation_fraction: float,
    test_fraction: float,
    seed: int,
) -> tuple[dict[str, LabelledImages], dict[str, str]]:
    """The splits with what the source lacks carved from train, and the origin of each.

    Both fractions are of the source's train split. The test split is carved first: it stays the same
    whether or not a validation split is asked for.
    """
    fractions = {"test": test_fraction, "validation": validation_fraction}
    carved = dict(splits)
    origins = dict.fromkeys(splits, "given")
    if "train" not in splits:
        return carved, origins
    num_train = len(splits["train"])
    for name, fraction in fractions.items():
        if name in splits or fraction == 0:
            continue
        num_samples = math.ceil(round(fraction * num_train, 6))  # rounded: 0.1 * 30 is 3.0000000000000004
        rows = stratified_rows(carved["train"].labels, num_samples, class_names, split_name=name, seed=seed)
        rest = np.setdiff1d(np.arange(len(carved["train"])), rows)
        carved[name] = carved["train"].select(rows, name=name)
        carved["train"] = carved["train"].select(rest)
        origins[name], origins["train"] = "carved from train", "given, less what was carved from it"
    return carved, origins


def stratified_rows(
    labels: np.ndarray, num_samples: int, class_names: list[str], *, split_name: str, seed: int
) -> np.ndarray:
    """`num_samples` sorted rows in which every class has its share; at least one row of each class is left."""
    counts = np.bincount(labels, minlength=len(class_names))
    present = np.flatnonzero(counts)
    for label in present:
        if counts[label] < 2:
            raise InputError(
                f"class {class_names[label]!r} has 1 image where the {split_name} split is carved from train, which "
                f"needs 2 or more of each class: add images, leave the class out with `classes`, or set "
                f"{split_name}_fraction=0."
            )
    if not len(present) <= num_samples <= len(labels) - len(present):
        raise InputError(
            f"{split_name}_fraction gives {num_samples} of {len(labels)} training images to the {split_name} split, "
            f"but both parts need at least one image for each of the {len(present)} classes: change "
            f"{split_name}_fraction."
        )
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=num_samples, random_state=seed)
    rest, rows = next(splitter.split(np.zeros(len(labels)), labels))
    emptied = np.setdiff1d(present, labels[rest])
    if len(emptied):
        raise InputError(
            f"the {split_name} split would take every training image of class {class_names[emptied[0]]!r} "
            f"({counts[emptied[0]]} images): add images or lower {split_name}_fraction."
        )
    return np.sort(rows)

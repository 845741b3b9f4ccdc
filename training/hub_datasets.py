"""Datasets of the Hub, and folders of parquet or arrow files, through `datasets`; images stay undecoded."""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training.labelled_images import EncodedImage, LabelledImages, SourceData, natural_key
from training.splits import canonical_split_name

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["is_dataset_folder", "read_dataset_folder", "read_hub_dataset"]

logger = logging.getLogger(__name__)


class _EncodedColumn:
    """The bytes or paths of a column of images, read row by row from the arrow file."""

    def __init__(self, dataset: "Dataset", column: str):
        from datasets import Image

        self.dataset = dataset.select_columns([column]).cast_column(column, Image(decode=False))
        self.column = column

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> EncodedImage:
        image = self.dataset[position][self.column]
        if image is None:
            raise InputError(f"column {self.column!r} holds no image")
        return image["path"] if image["bytes"] is None else image["bytes"]


def is_dataset_folder(folder: Path) -> bool:
    """Whether the folder holds parquet or arrow files, as `push_to_hub`, `to_parquet` and `save_to_disk` lay them."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return True
    return any(True for pattern in ("*.parquet", "data/*.parquet", "*/*.parquet") for _ in folder.glob(pattern))


def read_hub_dataset(
    name: str,
    *,
    config_name: str | None,
    revision: str | None,
    image_column: str | None,
    label_column: str | None,
) -> SourceData:
    """The splits of a Hub dataset, with the commit it was read at."""
    loaded = _load(name, config_name=config_name, revision=revision)
    found = _read_splits(loaded, name, image_column=image_column, label_column=label_column)
    any_split = next(iter(loaded.values()))
    return SourceData(
        dataset=name,
        kind="hub",
        source=f"Hub dataset {name}" + (f", configuration {config_name}" if config_name else ""),
        revision=_commit_read(any_split),
        license=any_split.info.license or None,
        **found,
    )


def read_dataset_folder(
    folder: Path, *, config_name: str | None, image_column: str | None, label_column: str | None
) -> SourceData:
    """The splits of a folder of parquet or arrow files."""
    loaded = _load(str(folder), config_name=config_name, revision=None)
    found = _read_splits(loaded, str(folder), image_column=image_column, label_column=label_column)
    name = folder.resolve().name
    return SourceData(
        dataset=name,
        kind="dataset_folder",
        source=f"parquet or arrow files of the folder {name}",
        license=next(iter(loaded.values())).info.license or None,
        **found,
    )


def _load(name: str, *, config_name: str | None, revision: str | None) -> dict[str, "Dataset"]:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config_name, revision=revision)
    except FileNotFoundError as error:  # also the parent of the library's own: no such dataset, no files in it
        raise InputError(f"dataset_name={name!r}: {_one_line(error)}") from error
    except DatasetGenerationError as error:
        # pyarrow also raises OSError for broken files, but then without a number of the system.
        is_of_the_system = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
        kind = EnvironmentFault if is_of_the_system else InputError
        raise kind(f"cannot prepare dataset {name!r}: {_one_line(error.__cause__ or error)}") from error
    except OSError as error:
        raise EnvironmentFault(
            f"cannot load dataset {name!r}: {_one_line(error)}. Retry when the network or disk is there, or download "
            f"the dataset while online and set HF_HUB_OFFLINE=1."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise InputError(f"cannot load dataset {name!r}: {_one_line(error)}") from error
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _commit_read(dataset: "Dataset") -> str | None:
    """The commit of a Hub dataset: `datasets` names the cache folder after it, and tells it nowhere else."""
    for file in dataset.cache_files:
        folder = Path(file["filename"]).parent.name
        if re.fullmatch("[0-9a-f]{40}", folder):
            return folder
    return None


def _read_splits(
    loaded: dict[str, "Dataset"], name: str, *, image_column: str | None, label_column: str | None
) -> dict[str, Any]:
    """The fields of SourceData that come from the columns: class names, splits, what was inferred."""
    features = next(iter(loaded.values())).features
    image = _choose_column("image_column", image_column, _image_columns(features), list(features), name)
    label = _choose_column("label_column", label_column, _label_columns(features), list(features), name)
    chosen: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for split in loaded:
        canonical = canonical_split_name(split)
        if canonical is None:
            ignored[split] = "not a train, validation or test split"
        elif canonical in chosen:
            raise InputError(f"{name} has two {canonical} splits, {chosen[canonical]} and {split}: keep one.")
        else:
            chosen[canonical] = split
    values = {canonical: _column(loaded[split], label) for canonical, split in chosen.items()}
    for canonical in [key for key, column in values.items() if all(value in (None, -1) for value in column)]:
        ignored[chosen.pop(canonical)] = "every label is missing or -1"
        del values[canonical]
    for split, reason in ignored.items():
        logger.warning("split %r of %s is left out: %s", split, name, reason)
    if not chosen:
        raise InputError(f"{name} has no labelled train, validation or test split; it has: {', '.join(loaded)}.")
    class_names, labels = _number_labels(values, features[label], label, name)
    splits = {
        canonical: LabelledImages.from_column(canonical, _EncodedColumn(loaded[split], image), labels[canonical])
        for canonical, split in chosen.items()
    }
    inferred = {
        "image_column": image,
        "label_column": label,
        "splits": {split: canonical for canonical, split in chosen.items()},
        "ignored_splits": ignored,
    }
    return {"class_names": class_names, "splits": splits, "inferred": inferred}


def _image_columns(features: Any) -> list[str]:
    from datasets import Image

    return [name for name, feature in features.items() if isinstance(feature, Image)]


def _label_columns(features: Any) -> list[str]:
    """The ClassLabel columns; without one, a column of integers or strings that is called label."""
    from datasets import ClassLabel

    columns = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    return columns or [name for name in features if name == "label"]


def _choose_column(field: str, asked: str | None, candidates: list[str], columns: list[str], dataset: str) -> str:
    if asked is not None:
        if asked not in columns:
            raise InputError(f"{field}={asked!r} is no column of {dataset}; it has: {', '.join(columns)}.")
        return asked
    if len(candidates) != 1:
        found = f"several candidates ({', '.join(candidates)})" if candidates else "no candidate"
        raise InputError(
            f"{field} is not given and {dataset} has {found} for it; set {field} to one of: {', '.join(columns)}."
        )
    return candidates[0]


def _column(dataset: "Dataset", column: str) -> list[Any]:
    return dataset.select_columns([column]).with_format(None)[:][column]


def _number_labels(
    values: dict[str, list[Any]], feature: Any, column: str, dataset: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Class names, and labels 0..K-1 a split, from a ClassLabel or from plain integers and strings."""
    from datasets import ClassLabel

    for split, split_values in values.items():
        for row, value in enumerate(split_values):
            if not isinstance(value, int | str) or (isinstance(value, int) and value < 0):
                raise InputError(
                    f"column {column!r} of {dataset} is {value!r} at {split} row {row}; a label is one class name or "
                    f"one integer from 0: remove such rows or name another label_column."
                )
    if isinstance(feature, ClassLabel):
        class_names = list(feature.names)
        numbers: dict[Any, int] = {label: label for label in range(len(class_names))}
    else:
        reference = values.get("train") or next(iter(values.values()))
        ordered = sorted(set(reference), key=lambda value: natural_key(str(value)))
        class_names = [str(value) for value in ordered]
        numbers = {value: label for label, value in enumerate(ordered)}
    labels = {}
    for split, split_values in values.items():
        for row, value in enumerate(split_values):
            if value not in numbers:
                raise InputError(
                    f"column {column!r} of {dataset} is {value!r} at {split} row {row}, which is none of the "
                    f"{len(class_names)} classes: remove such rows or name another label_column."
                )
        labels[split] = np.array([numbers[value] for value in split_values], dtype=np.int64)
    return class_names, labels

"""Images with one label each, undecoded, and what a source hands to the splits."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from PIL import Image

__all__ = ["EncodedImage", "ImageColumn", "LabelledImages", "SourceData", "natural_key"]

EncodedImage = str | bytes | np.ndarray | Image.Image


class ImageColumn(Protocol):
    """Random access to undecoded images."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One split. Rows are positions in this split; a sample id keeps its name when splits are carved or filtered."""

    name: str
    sample_ids: list[str]
    labels: np.ndarray
    images: ImageColumn
    positions: np.ndarray

    @classmethod
    def from_column(
        cls, name: str, images: ImageColumn, labels: np.ndarray, *, sample_ids: list[str] | None = None
    ) -> "LabelledImages":
        """A split over all of `images`; without names of their own samples are called `train/0`, `train/1`, ..."""
        sample_ids = [f"{name}/{position}" for position in range(len(images))] if sample_ids is None else sample_ids
        assert len(images) == len(labels) == len(sample_ids)
        return cls(name, sample_ids, np.asarray(labels, dtype=np.int64), images, np.arange(len(images)))

    def __len__(self) -> int:
        return len(self.sample_ids)

    def read(self, row: int) -> EncodedImage:
        """The undecoded image of a row, in a form that the image processor's `decode` takes."""
        return self.images[int(self.positions[row])]

    def where(self, row: int) -> str:
        """The words that name a row in a message."""
        return f"{self.name} row {row} ({self.sample_ids[row]})"

    def select(self, rows: Sequence[int] | np.ndarray, *, name: str | None = None) -> "LabelledImages":
        """The given rows in the given order, under the same sample ids."""
        rows = np.asarray(rows, dtype=np.int64)
        sample_ids = [self.sample_ids[row] for row in rows]
        return LabelledImages(name or self.name, sample_ids, self.labels[rows], self.images, self.positions[rows])

    def relabel(self, new_labels: np.ndarray) -> "LabelledImages":
        """The same images, where label k has become `new_labels[k]`."""
        return LabelledImages(self.name, self.sample_ids, new_labels[self.labels], self.images, self.positions)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 over sample id and label of all rows: equal on two machines only if the splits are."""
        digest = hashlib.sha256()
        for sample_id, label in zip(self.sample_ids, self.labels, strict=True):
            digest.update(f"{sample_id}\t{label}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class SourceData:
    """What a source found, before anything was carved, filtered or renumbered."""

    dataset: str
    kind: str
    source: str
    class_names: list[str]
    splits: dict[str, LabelledImages]
    revision: str | None = None
    license: str | None = None
    inferred: dict[str, Any] = field(default_factory=dict)
    dropped: list[dict[str, str]] = field(default_factory=list)


def natural_key(text: str) -> tuple[list[str | int], str]:
    """A sort key that puts 2 before 10; re.split alternates text and digits, so unlike types never meet."""
    parts = re.split(r"(\d+)", text.casefold())
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], text

"""Sources that are arrays: scikit-learn's digits, and folders of idx files (the MNIST format)."""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training.labelled_images import LabelledImages, SourceData

__all__ = ["find_idx_files", "read_digits", "read_idx_folder"]

IDX_IMAGES_MAGIC = 0x00000803  # unsigned bytes, three dimensions: http://yann.lecun.com/exdb/mnist
IDX_LABELS_MAGIC = 0x00000801
IDX_SPLITS = {"train": "train", "t10k": "test"}

# idx files hold numbers only. This one set is known by the content of its labels (train, test), and its README names
# the classes: https://github.com/zalandoresearch/fashion-mnist
FASHION_MNIST_LABELS_SHA256 = (
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
)
FASHION_MNIST_CLASSES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]


def read_digits() -> SourceData:
    """The 1797 handwritten digits of 8x8 pixels that come with scikit-learn, as one train split."""
    from sklearn.datasets import load_digits  # here, since it reads 1 MB and only this source needs it

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # grey levels 0..16
    return SourceData(
        dataset="digits",
        kind="digits",
        source="8x8 handwritten digits from scikit-learn (UCI Optical Recognition of Handwritten Digits, test part)",
        license="cc-by-4.0",
        class_names=[str(digit) for digit in range(10)],
        splits={"train": LabelledImages.from_column("train", images, digits.target)},
    )


def find_idx_files(folder: Path) -> dict[str, dict[str, Path]]:
    """The idx files of a folder by MNIST prefix (train, t10k) and content (images, labels); empty if there is none."""
    found: dict[str, dict[str, Path]] = {}
    for prefix in IDX_SPLITS:
        for content, dimensions in (("images", 3), ("labels", 1)):
            stems = [f"{prefix}-{content}{separator}idx{dimensions}-ubyte" for separator in "-."]
            candidates = [folder / f"{stem}{suffix}" for suffix in ("", ".gz") for stem in stems]
            path = next((candidate for candidate in candidates if candidate.is_file()), None)
            if path is not None:
                found.setdefault(prefix, {})[content] = path
    return found


def read_idx_folder(folder: Path) -> SourceData:
    """The images and labels of a folder in the MNIST format; t10k becomes the test split."""
    splits: dict[str, LabelledImages] = {}
    for prefix, files in find_idx_files(folder).items():
        for content in ("images", "labels"):
            if content not in files:
                other = next(iter(files.values()))
                raise InputError(f"{folder} holds {other.name} but no {prefix}-{content} file: add it or remove both.")
        images = _read_idx(files["images"], IDX_IMAGES_MAGIC)
        labels = _read_idx(files["labels"], IDX_LABELS_MAGIC)
        if len(images) != len(labels):
            raise InputError(
                f"{files['images']} holds {len(images)} images but {files['labels'].name} holds {len(labels)} labels: "
                f"the two files are not a pair."
            )
        splits[IDX_SPLITS[prefix]] = LabelledImages.from_column(IDX_SPLITS[prefix], images, labels)
    class_names, known_as = _idx_class_names(splits, folder)
    return SourceData(
        dataset=folder.resolve().name,
        kind="idx",
        source=f"{known_as} in idx files" if known_as else f"idx files of the folder {folder.resolve().name}",
        license="mit" if known_as else None,
        class_names=class_names,
        splits=splits,
        inferred={
            "files": sorted(path.name for files in find_idx_files(folder).values() for path in files.values()),
            "class_names": "known by the labels' hash" if known_as else "the label numbers",
        },
    )


def _read_idx(path: Path, magic: int) -> np.ndarray:
    """The array of one idx file, (N, H, W) or (N,) uint8; writable, since torch warns about arrays that are not."""
    content = _read_bytes(path)
    num_dimensions = magic & 0xFF
    header = 4 * (1 + num_dimensions)
    if len(content) < header:
        raise InputError(f"{path} holds {len(content)} bytes, fewer than an idx header: fetch the file again.")
    found, *shape = (int(number) for number in np.frombuffer(content, dtype=">u4", count=1 + num_dimensions))
    if found != magic:
        raise InputError(
            f"{path} starts with {found:#010x}, not {magic:#010x}: it is no idx file of unsigned bytes with "
            f"{num_dimensions} dimension{'s' * (num_dimensions > 1)}."
        )
    size = int(np.prod(shape, dtype=object))
    if size == 0 or len(content) - header != size:
        raise InputError(
            f"{path} announces {' x '.join(map(str, shape))} bytes but holds {len(content) - header}: "
            f"it is empty, truncated or has a tail; fetch the file again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _read_bytes(path: Path) -> bytearray:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}.") from error
    try:
        return bytearray(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is no complete gzip file ({error}): fetch the file again.") from error


def _idx_class_names(splits: dict[str, LabelledImages], folder: Path) -> tuple[list[str], str | None]:
    """Names for the labels, and the data set's name if it is known; labels must be 0..K-1 without a gap."""
    reference = splits.get("train") or splits["test"]
    label_bytes = reference.labels.astype(np.uint8).tobytes()
    known = hashlib.sha256(label_bytes).hexdigest() in FASHION_MNIST_LABELS_SHA256
    num_classes = len(np.unique(reference.labels))
    for split in splits.values():
        beyond = np.flatnonzero(split.labels >= num_classes)
        if len(beyond):
            row = int(beyond[0])
            raise InputError(
                f"label {split.labels[row]} at {split.name} row {row} of {folder} is outside 0..{num_classes - 1}: "
                f"the {reference.name} labels have {num_classes} different values, which must be 0..K-1 without a gap."
            )
    if known:
        return FASHION_MNIST_CLASSES, "Fashion-MNIST"
    return [str(label) for label in range(num_classes)], None

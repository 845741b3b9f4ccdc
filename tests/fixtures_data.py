"""Small datasets on disk, and the arguments that name them."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from training.arguments import AugmentationArguments, DataArguments

COLORS = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (200, 200, 10)]


def data_arguments(**fields) -> DataArguments:
    return DataArguments(**fields)


def augmentation_arguments(**fields) -> AugmentationArguments:
    return AugmentationArguments(**fields)


def write_image(path: Path, *, size: tuple[int, int] = (9, 7), color: tuple[int, int, int] = COLORS[0]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def write_class_folders(root: Path, counts: dict[str, int], *, suffix: str = "png") -> Path:
    """`counts[name]` images in each folder `root/name`."""
    for label, (name, count) in enumerate(counts.items()):
        for index in range(count):
            write_image(root / name / f"{index}.{suffix}", color=COLORS[label % len(COLORS)])
    return root


def write_truncated_jpeg(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, quality=95)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def write_idx_folder(
    folder: Path, labels: list[int], *, prefixes: tuple[str, ...] = ("train", "t10k"), compressed: bool = True
) -> Path:
    """Files in the MNIST format; the image of row i is filled with i."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(5, 1).repeat(4, 2)
    for prefix in prefixes:
        contents = {
            f"{prefix}-images-idx3-ubyte": idx_bytes(images),
            f"{prefix}-labels-idx1-ubyte": idx_bytes(np.array(labels)),
        }
        for name, content in contents.items():
            path = folder / (f"{name}.gz" if compressed else name)
            path.write_bytes(gzip.compress(content) if compressed else content)
    return folder

"""Images that no decoder can read: found before training, counted, and left out."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training.labelled_images import LabelledImages, SourceData

__all__ = ["drop_broken_images", "why_broken"]

logger = logging.getLogger(__name__)


def drop_broken_images(source: SourceData) -> SourceData:
    """The source without the images that cannot be decoded, which are listed among the dropped."""
    splits = {}
    dropped = list(source.dropped)
    for name, split in source.splits.items():
        if isinstance(split.images, np.ndarray):
            splits[name] = split
            continue
        reasons = list(tqdm(_why_broken_rows(split), total=len(split), desc=f"checking {name} images", unit="image"))
        dropped += [
            {"sample_id": split.sample_ids[row], "reason": reason} for row, reason in enumerate(reasons) if reason
        ]
        splits[name] = split.select([row for row, reason in enumerate(reasons) if reason is None])
        num_broken = len(split) - len(splits[name])
        if num_broken:
            logger.warning("%d of %d %s images are broken and left out", num_broken, len(split), name)
    return replace(source, splits=splits, dropped=dropped)


def why_broken(images: LabelledImages, row: int) -> str | None:
    """The reason why an image cannot be decoded, or None. All of it is decoded, since headers survive truncation."""
    try:
        encoded = images.read(row)
        # Pillow's messages would repeat a path, which data.json must not hold.
        content = encoded if isinstance(encoded, bytes) else Path(str(encoded)).read_bytes()
        with Image.open(BytesIO(content)) as image:
            image.load()
    except InputError as error:
        return str(error)
    except FileNotFoundError:
        return "no such file"  # a dangling link
    except UnidentifiedImageError:
        return "no image in a known format"
    # Broken content raises OSError, SyntaxError, ValueError, EOFError, struct.error, ... by format and place.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise EnvironmentFault(f"cannot read {images.where(row)}: {error.strerror}; try again.") from error
        if isinstance(error, MemoryError):
            raise
        return f"broken image ({error})"
    return None


def _why_broken_rows(images: LabelledImages) -> Iterator[str | None]:
    """The reasons in order of rows; decoding releases the interpreter lock, so threads use all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda row: why_broken(images, row), range(len(images)))

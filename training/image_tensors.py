"""From undecoded images to `pixel_values`, for training and for evaluation.

Training is decode -> augmentation -> normalize with the image processor's own steps; evaluation is the image
processor. Augmentation is a pure function of (seed, epoch, sample id): the same on one rank or many, in any worker,
and after a resume. Shapes: C channels, H height, W width.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2

from modeling_vit_scratch.errors_vit_scratch import InputError
from training.labelled_images import LabelledImages

if TYPE_CHECKING:
    from modeling_vit_scratch.image_processing_vit_scratch import ViTScratchImageProcessor
    from training.arguments import AugmentationArguments

__all__ = ["EvaluationImages", "TrainingImages"]

_INTERPOLATIONS = {
    int(PIL.Image.Resampling.NEAREST): v2.InterpolationMode.NEAREST_EXACT,
    int(PIL.Image.Resampling.BILINEAR): v2.InterpolationMode.BILINEAR,
    int(PIL.Image.Resampling.BICUBIC): v2.InterpolationMode.BICUBIC,
}


class TrainingImages(Dataset):
    """Augmented images, asked for by (epoch, row): {"pixel_values": float32 (C, H, W), "labels": int}."""

    def __init__(
        self,
        images: LabelledImages,
        processor: "ViTScratchImageProcessor",
        augmentation: "AugmentationArguments",
        *,
        seed: int,
    ):
        if augmentation.crop_scale_min is not None and augmentation.crop_padding is not None:
            raise InputError(
                f"crop_scale_min={augmentation.crop_scale_min} and crop_padding={augmentation.crop_padding} are two "
                f"ways to crop: set one of them."
            )
        self.images = images
        self.processor = processor
        self.crop_padding = augmentation.crop_padding
        self.horizontal_flip = augmentation.horizontal_flip
        self.seed = seed
        self.random_crop = _random_crop(augmentation, processor)
        self.random_transforms = _random_transforms(augmentation)
        self.random_erasing = v2.RandomErasing(augmentation.random_erasing) if augmentation.random_erasing else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """The samples of a batch; torch's loader calls this, and small images are mostly the overhead of calls."""
        uses_torch_random = self.random_crop or self.random_transforms or self.random_erasing
        with torch.random.fork_rng(devices=[]) if uses_torch_random else nullcontext():
            draws = [_Draws(self.seed, epoch, self.images.sample_ids[row]) for epoch, row in keys]
            augmented = [self._augment(row, draw) for (_, row), draw in zip(keys, draws, strict=True)]
            pixel_values = _normalize_all(augmented, self.processor)
            if self.random_erasing:
                for index, draw in enumerate(draws):
                    draw.seed_torch(draw.erasing_seed)
                    pixel_values[index] = self.random_erasing(pixel_values[index])
        labels = [int(self.images.labels[row]) for _, row in keys]
        return [{"pixel_values": pixels, "labels": label} for pixels, label in zip(pixel_values, labels, strict=True)]

    def _augment(self, row: int, draw: "_Draws") -> torch.Tensor:
        """The image (C, H, W) of a row in the decoded dtype, at the target size, cropped, flipped and distorted."""
        image = _decode(self.images, row, self.processor)
        if self.random_crop or self.random_transforms:
            draw.seed_torch(draw.transforms_seed)
        image = self.random_crop(image) if self.random_crop else self._resize(image, row)
        if self.crop_padding:
            image = _shift(image, self.crop_padding, draw)
        if self.horizontal_flip and draw.flips:
            image = image.flip(-1)
        for transform in self.random_transforms:
            image = transform(image)
        return image

    def _resize(self, image: torch.Tensor, row: int) -> torch.Tensor:
        try:
            return self.processor.resize(image)
        except InputError as error:
            raise InputError(f"{self.images.where(row)}: {error}") from error


class EvaluationImages(Dataset):
    """Images as the image processor makes them: {"pixel_values": float32 (C, H, W), "labels": int}."""

    def __init__(self, images: LabelledImages, processor: "ViTScratchImageProcessor"):
        self.images = images
        self.processor = processor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        try:
            pixel_values = self.processor(self.images.read(row))["pixel_values"][0]
        except InputError as error:
            raise InputError(f"{self.images.where(row)}: {error}") from error
        return {"pixel_values": pixel_values, "labels": int(self.images.labels[row])}


class _Draws:
    """The random numbers of one sample in one epoch.

    Python's own hash differs between processes. Shift and flip come from the digest itself, as torch's generator
    would cost several times what they do.
    """

    def __init__(self, seed: int, epoch: int, sample_id: str):
        digest = hashlib.blake2b(f"{seed}/{int(epoch)}/{sample_id}".encode(), digest_size=33).digest()
        self.transforms_seed = int.from_bytes(digest[:8])
        self.erasing_seed = int.from_bytes(digest[8:16])
        self.top = int.from_bytes(digest[16:24])
        self.left = int.from_bytes(digest[24:32])
        self.flips = digest[32] % 2 == 1

    @staticmethod
    def seed_torch(seed: int) -> None:
        # torch.manual_seed also visits every accelerator, which takes longer than the augmentation.
        torch.default_generator.manual_seed(seed)


def _decode(images: LabelledImages, row: int, processor: "ViTScratchImageProcessor") -> torch.Tensor:
    try:
        return processor.decode(images.read(row))
    except InputError as error:
        raise InputError(
            f"{images.where(row)}: {error}; or leave such images out with on_broken_image=skip."
        ) from error


def _random_crop(augmentation: "AugmentationArguments", processor: "ViTScratchImageProcessor") -> Any:
    if augmentation.crop_scale_min is None:
        return None
    return v2.RandomResizedCrop(
        (processor.size["height"], processor.size["width"]),
        scale=(augmentation.crop_scale_min, 1.0),
        interpolation=_INTERPOLATIONS[processor.resample],
        antialias=True,
    )


def _random_transforms(augmentation: "AugmentationArguments") -> list[Any]:
    transforms: list[Any] = []
    if augmentation.rotation_degrees:
        transforms.append(v2.RandomRotation(augmentation.rotation_degrees, v2.InterpolationMode.BILINEAR))
    if augmentation.randaugment_num_layers:
        transforms.append(v2.RandAugment(augmentation.randaugment_num_layers, augmentation.randaugment_magnitude))
    return transforms


def _shift(image: torch.Tensor, padding: int, draw: _Draws) -> torch.Tensor:
    """A crop of the image's size from the image with a black border."""
    height, width = image.shape[-2:]
    top, left = draw.top % (2 * padding + 1), draw.left % (2 * padding + 1)
    return F.pad(image, (padding, padding, padding, padding))[:, top : top + height, left : left + width]


def _normalize_all(images: list[torch.Tensor], processor: "ViTScratchImageProcessor") -> list[torch.Tensor]:
    """Each image normalized; in one go where shapes and dtypes allow. The result is the same bit by bit."""
    if len({(image.shape, image.dtype) for image in images}) == 1:
        return list(processor.normalize(torch.stack(images)).unbind())
    return [processor.normalize(image) for image in images]

"""From images of any kind to the `pixel_values` of a Vision Transformer (https://arxiv.org/abs/2010.11929).

One path serves training, evaluation and inference: decode -> resize -> normalize. Training puts its augmentation
between decode and normalize; evaluation is the whole processor. What counts as an image, and on which scale its values
are, is in `image_input_vit_scratch.py`.

Shapes: B images, C channels, H height, W width.
"""

import difflib
import math
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, cast

import numpy as np
import PIL.Image
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tvF
from transformers import BaseImageProcessor, BatchFeature, PreTrainedConfig

from .errors_vit_scratch import InputError
from .image_input_vit_scratch import ImageInput, background_color, decode_image

__all__ = ["ViTScratchImageProcessor", "ViTScratchImageProcessorKwargs"]

RESIZE_MODES = ("squash", "shorter", "pad", "none")
_DATA_FORMATS = (None, "channels_first", "channels_last")

# By Pillow's numbers, as in every preprocessor_config.json.
_INTERPOLATIONS = {
    int(PIL.Image.Resampling.NEAREST): InterpolationMode.NEAREST_EXACT,
    int(PIL.Image.Resampling.BILINEAR): InterpolationMode.BILINEAR,
    int(PIL.Image.Resampling.BICUBIC): InterpolationMode.BICUBIC,
}

# Keys of a preprocessor_config.json that are not ours: written and read by transformers, `auto_map` also kept.
_KEYS_OF_TRANSFORMERS = ("auto_map", "image_processor_type", "processor_class")


class ViTScratchImageProcessorKwargs(TypedDict, total=False):
    size: int | dict[str, int]
    """Pixels of `pixel_values`: {"height": H, "width": W}, or one number for a square. Unused by resize_mode none."""
    resize_mode: Literal["squash", "shorter", "pad", "none"]
    """How an image gets to `size`. squash: both sides at once, as the official models; shorter: keeps the aspect,
    covers `size` / `crop_pct` and crops the centre; pad: keeps the aspect, fits inside `size`, the rest shows
    `alpha_background`; none: as it is, sides multiples of `patch_size`, one size a batch."""
    resample: int
    """Pillow's number of the filter: 0 nearest, 2 bilinear, 3 bicubic; the latter two with antialiasing."""
    image_mean: float | list[float]
    """Subtracted from values in [0, 1]: one for each channel, or one for all."""
    image_std: float | list[float]
    """Divides what is left: one for each channel, or one for all."""
    crop_pct: float
    """Fraction in (0, 1] of the resized image that resize_mode shorter keeps, along a side."""
    alpha_background: list[int]
    """RGB in 0..255 seen where an image is transparent."""
    input_range: list[float] | None
    """(low, high) of the incoming values, for those whose type does not tell; None: the table of the input policy."""
    input_data_format: Literal["channels_first", "channels_last"] | None
    """Where arrays and tensors hold their channels; None: wherever only one reading is possible."""
    num_channels: Literal[1, 3]
    """3 for RGB, 1 for luminance."""
    patch_size: int | list[int]
    """Pixels, or [height, width]: what resize_mode none checks against."""


_DEFAULTS: ViTScratchImageProcessorKwargs = {
    "size": 224,  # the paper's pre-training resolution
    "resize_mode": "squash",
    "resample": int(PIL.Image.Resampling.BILINEAR),
    "image_mean": 0.5,  # the official code maps pixels to [-1, 1]
    "image_std": 0.5,
    "crop_pct": 0.875,
    "alpha_background": [255, 255, 255],
    "input_range": None,
    "input_data_format": None,
    "num_channels": 3,
    "patch_size": 16,
}


# What the Auto classes and pipelines pass on beside fields.
_ARGUMENTS_OF_TRANSFORMERS = ("code_revision", "dtype", "return_unused_kwargs")


class ViTScratchImageProcessor(BaseImageProcessor):
    """Image processor of the ViTScratch models; the fields are those of `ViTScratchImageProcessorKwargs`.

    Every field may also be given to a single call. Unknown fields and bad values raise `InputError`. For 8-bit RGB
    images the result equals that of transformers' `ViTImageProcessor` bit by bit.
    """

    valid_kwargs = ViTScratchImageProcessorKwargs  # type: ignore[assignment]  # fewer than transformers' own

    size: dict[str, int]
    resize_mode: str
    resample: int
    image_mean: list[float]
    image_std: list[float]
    crop_pct: float
    alpha_background: list[int]
    input_range: list[float] | None
    input_data_format: str | None
    num_channels: int
    patch_size: int | list[int]

    def __init__(self, **fields: Unpack[ViTScratchImageProcessorKwargs]):
        given: dict[str, Any] = dict(fields)
        stored = {name: given.pop(name) for name in _KEYS_OF_TRANSFORMERS if name in given}
        known = list(self.valid_kwargs.__annotations__)
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
                raise InputError(f"ViTScratchImageProcessor has no field {name!r}; {hint}")
        super().__init__(**_validate({**_DEFAULTS, **given}))
        if "auto_map" in stored:
            self.auto_map = stored["auto_map"]

    @classmethod
    def from_dict(cls, image_processor_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Returns the processor of `image_processor_dict` with the fields among `kwargs` in place of its own."""
        # transformers drops what is no field, so that a misspelt one would go unnoticed.
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name not in _ARGUMENTS_OF_TRANSFORMERS}
        return super().from_dict({**image_processor_dict, **fields}, **kwargs)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig, **fields: Unpack[ViTScratchImageProcessorKwargs]
    ) -> "ViTScratchImageProcessor":
        """Returns the processor for a model of this `ViTScratchConfig`; `fields` set or override the rest."""
        height, width = config.image_height_width
        shape: dict[str, Any] = {
            "size": {"height": height, "width": width},
            "patch_size": config.patch_size,
            "num_channels": config.num_channels,
        }
        shape.update(fields)
        return cls(**shape)

    def preprocess(  # type: ignore[override]
        self,
        images: ImageInput | Sequence[ImageInput],
        return_tensors: str | None = "pt",
        **overrides: Unpack[ViTScratchImageProcessorKwargs],
    ) -> BatchFeature:
        """Returns `pixel_values` (B, C, H, W) float32 of one image, a list of any sizes, or an array of a batch.

        Args:
            images: each as `decode` takes it.
            return_tensors: "pt", "np", or None for a list of tensors (C, H, W).
            overrides: fields with another value for this call.

        Raises:
            InputError: names the row of a list, the path, what was found and what to do.
        """
        if overrides:
            fields: dict[str, Any] = {name: getattr(self, name) for name in self.valid_kwargs.__annotations__}
            fields.update(overrides)
            return type(self)(**fields).preprocess(images, return_tensors)
        if return_tensors not in ("pt", "np", None):
            raise InputError(f'return_tensors={return_tensors!r} must be "pt", "np" or None')
        rows = _rows(images)
        if rows is None:
            pixel_values = [self._process(cast(ImageInput, images))]
        else:
            pixel_values = [self._process_row(row, image) for row, image in enumerate(rows)]
            _check_one_size(pixel_values)
        if return_tensors is None:
            return BatchFeature({"pixel_values": pixel_values})
        return BatchFeature({"pixel_values": torch.stack(pixel_values)}, tensor_type=return_tensors)

    __call__ = preprocess  # type: ignore[assignment]  # takes paths and bytes, which the base class does not

    def decode(self, image: ImageInput) -> torch.Tensor:
        """Returns the image (C, H, W) at its own size: uint8 for 8-bit sources, else float32 in [0, 1].

        Path, encoded bytes, Pillow image (the orientation in EXIF is applied to these), array or tensor.
        """
        return decode_image(
            image,
            num_channels=self.num_channels,
            alpha_background=self.alpha_background,
            input_range=self.input_range,
            input_data_format=self.input_data_format,
        )

    def resize(self, image: torch.Tensor) -> torch.Tensor:
        """Returns the decoded image (..., C, H, W) at the target size, by `resize_mode`, in its own dtype."""
        if self.resize_mode == "none":
            self._check_sides(image)
            return image
        target = (self.size["height"], self.size["width"])
        if self.resize_mode == "squash":
            return self._interpolate(image, target)
        if self.resize_mode == "shorter":
            cover = (math.floor(target[0] / self.crop_pct), math.floor(target[1] / self.crop_pct))
            return tvF.center_crop(self._interpolate(image, _covering_size(image, cover)), list(target))
        image = self._interpolate(image, _fitting_size(image, target))
        return _pad_to(image, target, self.alpha_background)

    def normalize(self, image: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns (..., C, H, W) float32, mean subtracted and divided by std, from uint8 or floats in [0, 1]."""
        # uint8 is left on its scale and mean and std are put on it: as transformers does, so that not a bit differs.
        scale = 255.0 if image.dtype == torch.uint8 else 1.0
        mean = torch.tensor(self.image_mean, device=image.device)[:, None, None] * scale
        std = torch.tensor(self.image_std, device=image.device)[:, None, None] * scale
        return (image.to(torch.float32) - mean) / std

    def _process(self, image: ImageInput) -> torch.Tensor:
        return self.normalize(self.resize(self.decode(image)))

    def _process_row(self, row: int, image: ImageInput) -> torch.Tensor:
        try:
            return self._process(image)
        except InputError as error:
            raise InputError(f"images[{row}]: {error}") from error

    def _interpolate(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        resized = tvF.resize(image, list(size), interpolation=_INTERPOLATIONS[self.resample], antialias=True)
        # Bicubic overshoots; uint8 is clipped by torch itself.
        return resized.clamp(0, 1) if resized.is_floating_point() else resized

    def _check_sides(self, image: torch.Tensor) -> None:
        sides = (image.shape[-2], image.shape[-1])
        patch = _pair(self.patch_size)
        if any(pixels % step for pixels, step in zip(sides, patch, strict=True)):
            nearest = [max(step, round(pixels / step) * step) for pixels, step in zip(sides, patch, strict=True)]
            raise InputError(
                f"image of {sides[0]}x{sides[1]} pixels (height x width) cannot be cut into patches of "
                f"{patch[0]}x{patch[1]} with resize_mode='none'; crop or pad it, to {nearest[0]}x{nearest[1]} say, "
                "or choose resize_mode squash, shorter or pad"
            )


def _rows(images: ImageInput | Sequence[ImageInput]) -> Sequence[ImageInput] | None:
    """Returns the images of a batch, or None for a single image."""
    if isinstance(images, np.ndarray | torch.Tensor) and images.ndim == 4:
        images = list(images)
    elif not isinstance(images, Sequence) or isinstance(images, str | bytes):
        return None
    if len(images) == 0:
        raise InputError("images is empty; give at least one image")
    return images


def _check_one_size(pixel_values: list[torch.Tensor]) -> None:
    height, width = pixel_values[0].shape[-2:]
    for row, image in enumerate(pixel_values):
        if image.shape[-2:] != (height, width):
            raise InputError(
                f"images[{row}] has {image.shape[-2]}x{image.shape[-1]} pixels, images[0] {height}x{width}; a batch "
                "has one size with resize_mode='none': pass them apart, or choose resize_mode squash, shorter or pad"
            )


def _covering_size(image: torch.Tensor, target: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of the image's aspect whose one side meets the target and whose other reaches beyond."""
    height, width = image.shape[-2:]
    if target[0] * width >= target[1] * height:
        return target[0], target[0] * width // height
    return target[1] * height // width, target[1]


def _fitting_size(image: torch.Tensor, target: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of the image's aspect whose one side meets the target and whose other stays within."""
    height, width = image.shape[-2:]
    if target[0] * width <= target[1] * height:
        return target[0], max(1, round(target[0] * width / height))
    return max(1, round(target[1] * height / width)), target[1]


def _pad_to(image: torch.Tensor, target: tuple[int, int], alpha_background: list[int]) -> torch.Tensor:
    """Returns the image centred on a canvas of the background: outside of it is as transparent as a hole in it."""
    height, width = image.shape[-2:]
    top, left = (target[0] - height) // 2, (target[1] - width) // 2
    canvas = background_color(alpha_background, image).expand(*image.shape[:-2], *target).clone()
    canvas[..., top : top + height, left : left + width] = image
    return canvas


def _pair(patch_size: int | list[int]) -> tuple[int, int]:
    return (patch_size, patch_size) if isinstance(patch_size, int) else (patch_size[0], patch_size[1])


def _validate(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields in the form they are kept and saved in; raises InputError for a bad one."""
    num_channels = _one_of("num_channels", fields["num_channels"], (1, 3))
    return {
        "size": _validate_size(fields["size"]),
        "resize_mode": _one_of("resize_mode", fields["resize_mode"], RESIZE_MODES),
        "resample": int(_one_of("resample", fields["resample"], tuple(_INTERPOLATIONS))),
        "image_mean": _per_channel("image_mean", fields["image_mean"], num_channels, above=-math.inf),
        "image_std": _per_channel("image_std", fields["image_std"], num_channels, above=0),
        "crop_pct": _validate_crop_pct(fields["crop_pct"]),
        "alpha_background": _validate_alpha_background(fields["alpha_background"]),
        "input_range": _validate_input_range(fields["input_range"]),
        "input_data_format": _one_of("input_data_format", fields["input_data_format"], _DATA_FORMATS),
        "num_channels": num_channels,
        "patch_size": _validate_patch_size(fields["patch_size"]),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_pixels(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _one_of(name: str, value: Any, allowed: tuple) -> Any:
    if isinstance(value, bool | float) or value not in allowed:
        raise InputError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
    return value


def _validate_size(size: Any) -> dict[str, int]:
    if _is_pixels(size):
        return {"height": size, "width": size}
    if not (isinstance(size, dict) and set(size) == {"height", "width"} and all(map(_is_pixels, size.values()))):
        raise InputError(f'size={size!r} must be a number of pixels or {{"height": pixels, "width": pixels}}')
    return {"height": size["height"], "width": size["width"]}


def _validate_patch_size(patch_size: Any) -> int | list[int]:
    if _is_pixels(patch_size):
        return patch_size
    if not (_is_list(patch_size, 2) and all(map(_is_pixels, patch_size))):
        raise InputError(f"patch_size={patch_size!r} must be a number of pixels or [height, width]")
    return list(patch_size)


def _per_channel(name: str, value: Any, num_channels: int, above: float) -> list[float]:
    values = [value] * num_channels if _is_number(value) else value
    if not (_is_list(values, num_channels) and all(_is_number(v) and v > above for v in values)):
        bound = "" if above == -math.inf else f" above {above:g}"
        raise InputError(
            f"{name}={value!r} must be a number{bound}, or one for each channel (num_channels={num_channels})"
        )
    return list(values)


def _validate_crop_pct(crop_pct: Any) -> float:
    if not (_is_number(crop_pct) and 0 < crop_pct <= 1):
        raise InputError(f"crop_pct={crop_pct!r} must be a fraction above 0 and at most 1")
    return crop_pct


def _validate_alpha_background(color: Any) -> list[int]:
    if not (
        _is_list(color, 3) and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= 255 for v in color)
    ):
        raise InputError(f"alpha_background={color!r} must be three integers in 0..255")
    return list(color)


def _validate_input_range(input_range: Any) -> list[float] | None:
    if input_range is None:
        return None
    if not (_is_list(input_range, 2) and all(map(_is_number, input_range)) and input_range[0] < input_range[1]):
        raise InputError(f"input_range={input_range!r} must be (low, high) with low below high, or None")
    return list(input_range)

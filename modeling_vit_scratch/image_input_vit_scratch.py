"""One image input policy: a path, bytes, Pillow, NumPy and torch image all become the same tensor.

Pillow modes go to 8-bit RGB as Pillow converts them, except for those that hold more than 8 bits. Values:

| values                                                    | become                          |
|-----------------------------------------------------------|---------------------------------|
| uint8, bool                                               | uint8; True is 255              |
| uint16, Pillow's I;16, Pillow's I within 0..65535         | float, divided by 65535         |
| floats within [0, 1]                                      | float, as they are              |
| floats within [0, 255], the largest above 1               | float, divided by 255           |
| numbers within a given `input_range=(low, high)`          | float, (value - low)/(high - low) |
| anything else, NaN included                               | an error that names `input_range` |

Nothing depends on an image's own minimum and maximum beyond this table, so one scale holds for a whole dataset.
Shapes: H height, W width; C channels of the result (1 or 3); c channels as they came (1 to 4, alpha last).
"""

import errno
import io
import os
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps

from .errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["ImageInput", "background_color", "decode_image"]

ImageInput = str | os.PathLike | bytes | PIL.Image.Image | np.ndarray | torch.Tensor

# ITU-R 601-2 in Pillow's 16-bit fixed point. Products with 8-bit values are exact in float32, so that a uint8 result
# equals `Image.convert("L")`; the weights sum to exactly 1, so that grey stays grey.
_LUMINANCE_WEIGHTS = (19595 / 65536, 38470 / 65536, 7471 / 65536)

# Float arithmetic elsewhere may leave a [0, 1] image this far outside; a 0..255 image never ends this close above 1.
_ROUNDING = 1e-6

# The machine's fault rather than the path's: trying again may help.
_ENVIRONMENT_ERRNOS = {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR}


def decode_image(
    image: ImageInput,
    *,
    num_channels: int,
    alpha_background: list[int],
    input_range: list[float] | None,
    input_data_format: str | None,
) -> torch.Tensor:
    """Returns the upright image (C, H, W): uint8 where the source is 8-bit, else float32 in [0, 1].

    Args:
        image: path, encoded bytes, Pillow image (EXIF orientation is applied to these three), or array or tensor
            (H, W), (H, W, c) or (c, H, W).
        num_channels: 3 for RGB, 1 for luminance.
        alpha_background: RGB in 0..255 that shows where the image is transparent.
        input_range: (low, high) of the values instead of the table above; bool and Pillow's alpha keep theirs.
        input_data_format: "channels_first" or "channels_last" for arrays whose shape allows both.

    Raises:
        InputError: what was found, at which path, and what to do.
        EnvironmentFault: the disk failed.
    """
    alpha_range = input_range if isinstance(image, np.ndarray | torch.Tensor) else None
    try:
        values, alpha = _read(image, input_data_format)
        color = _to_unit_interval(values, input_range)
        if alpha is not None:
            color = _compose(color, _to_unit_interval(alpha, alpha_range), alpha_background)
    except InputError as error:
        raise InputError(f"{_describe(image)}: {error}") from error
    return _to_channels(color, num_channels).contiguous()


def background_color(alpha_background: list[int], like: torch.Tensor) -> torch.Tensor:
    """Returns the background (C, 1, 1) in channels, dtype and value range of the image `like` (..., C, H, W)."""
    color = torch.tensor(alpha_background, dtype=torch.uint8, device=like.device)[:, None, None]
    color = _to_channels(color, like.shape[-3])
    return color if like.dtype == torch.uint8 else color.to(like.dtype) / 255


def _describe(image: ImageInput) -> str:
    if isinstance(image, str | os.PathLike):
        return str(image)
    if isinstance(image, bytes):
        return f"{len(image)} bytes"
    if isinstance(image, PIL.Image.Image):
        return str(getattr(image, "filename", "") or f"Pillow image of mode {image.mode}")
    if isinstance(image, np.ndarray | torch.Tensor):
        return f"{type(image).__name__} of shape {tuple(image.shape)} and dtype {image.dtype}"
    return "images"


def _read(image: ImageInput, input_data_format: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns values (c, H, W), c 1 or 3, and alpha (1, H, W) or None, both on the scale they came in."""
    if isinstance(image, str | os.PathLike):
        image = _read_file(image)
    if isinstance(image, bytes):
        image = _open_bytes(image)
    if isinstance(image, PIL.Image.Image):
        return _read_pillow(image)
    if isinstance(image, np.ndarray | torch.Tensor):
        return _split_alpha(_channels_first(image, input_data_format))
    raise InputError(f"{type(image).__name__} is no image; give a path, bytes, a Pillow image, an array or a tensor")


def _read_file(path: str | os.PathLike) -> bytes:
    # Read apart from decoding: a failing disk and a broken image are different faults, both OSError in Pillow.
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _ENVIRONMENT_ERRNOS:
            raise EnvironmentFault(f"{path}: reading failed ({error.strerror}); try again") from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot be read ({reason}); give the path of an image file") from error


def _open_bytes(data: bytes) -> PIL.Image.Image:
    if not data:
        raise InputError("the image file is empty; replace or remove it")
    try:
        return PIL.Image.open(io.BytesIO(data))
    except PIL.UnidentifiedImageError as error:
        raise InputError(f"not an image Pillow knows (starts with {data[:8]!r}); replace or remove it") from error
    except Exception as error:  # a broken header: codecs raise OSError, SyntaxError, ValueError, struct.error, ...
        raise InputError(f"broken image ({error}); replace or remove it") from error


def _read_pillow(image: PIL.Image.Image) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `_read`; of several frames the current one, which is the first unless the caller moved on."""
    if 0 in image.size:
        raise InputError(f"the image has no pixels (height {image.height}, width {image.width})")
    try:
        image = ImageOps.exif_transpose(image)  # loads; drops the orientation, so that it is applied once
    except Exception as error:  # see _open_bytes
        raise InputError(f"broken image ({error}); replace or remove it") from error
    if image.mode == "F" or image.mode.startswith("I"):
        return _read_deep_pillow(image)
    if image.mode in ("La", "RGBa"):  # premultiplied: Pillow converts these to their plain twins only
        image = image.convert(image.mode.upper())
    if image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode in ("1", "L"):
        image = image.convert("L")
    elif image.mode == "LAB":
        image = _lab_to_rgb(image)
    else:
        image = image.convert("RGB")
    return _split_alpha(_channels_first(np.array(image), "channels_last"))


def _read_deep_pillow(image: PIL.Image.Image) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `_read`, for I, I;16 and F, which Pillow's own conversion would clip at 255."""
    values = np.array(image)
    alpha = None
    if "transparency" in image.info:  # a PNG may declare one grey value transparent
        alpha = torch.from_numpy(values != image.info["transparency"])[None]
    if image.mode == "I" and values.min() >= 0 and values.max() <= 65535:
        values = values.astype(np.uint16)
    return _channels_first(values, None), alpha


def _lab_to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    from PIL import ImageCms  # an optional part of Pillow, needed by this rare mode alone

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB").apply(image)


def _channels_first(image: np.ndarray | torch.Tensor, input_data_format: str | None) -> torch.Tensor:
    """Returns the array as a tensor (c, H, W) of its own dtype."""
    if isinstance(image, np.ndarray):
        try:
            # A copy in the machine's byte order: torch takes neither read-only nor big-endian nor flipped arrays.
            image = torch.from_numpy(np.array(image, dtype=image.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise InputError("values must be integers, floats or booleans") from error
    if image.numel() == 0:
        raise InputError("the image has no pixels")
    if image.ndim == 2:
        return image[None]
    if image.ndim != 3:
        raise InputError("one image has 2 or 3 axes, a batch of images 4; pass several images as a list")
    return image if _channel_axis(tuple(image.shape), input_data_format) == 0 else image.permute(2, 0, 1)


def _channel_axis(shape: tuple[int, ...], input_data_format: str | None) -> int:
    possible = [axis for axis in (0, 2) if 1 <= shape[axis] <= 4]
    if input_data_format is not None:
        axis = 0 if input_data_format == "channels_first" else 2
        if axis not in possible:
            raise InputError(f"input_data_format={input_data_format!r} gives {shape[axis]} channels, not 1 to 4")
        return axis
    if len(possible) == 2:
        raise InputError(
            f"the first axis ({shape[0]}) and the last ({shape[2]}) may both be the channels; "
            'say which by input_data_format="channels_first" or "channels_last"'
        )
    if not possible:
        raise InputError("no axis of 1 to 4 channels at either end; pass a batch of grey images as a list of (H, W)")
    return possible[0]


def _split_alpha(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (image[:-1], image[-1:]) if image.shape[0] in (2, 4) else (image, None)


def _to_unit_interval(values: torch.Tensor, input_range: list[float] | None) -> torch.Tensor:
    """Returns `values` as uint8, or as float32 in [0, 1], by the table at the head of this file."""
    if values.dtype == torch.bool:
        return values.to(torch.uint8) * 255
    if values.is_complex():
        raise InputError("values must be integers, floats or booleans")
    if input_range is None and values.dtype == torch.uint8:
        return values
    if input_range is None and values.dtype == torch.uint16:
        return values.to(torch.float32) / 65535
    exact = values.to(torch.float64)
    smallest, largest = exact.min().item(), exact.max().item()  # NaN if any value is
    low, high = input_range if input_range is not None else _known_range(values, smallest, largest)
    slack = _ROUNDING * (high - low)
    if not (low - slack <= smallest and largest <= high + slack):
        raise InputError(
            f"values from {smallest:g} to {largest:g} are outside input_range=({low:g}, {high:g}); "
            "correct the values or input_range"
        )
    return ((exact - low) / (high - low)).clamp(0, 1).to(torch.float32)


def _known_range(values: torch.Tensor, smallest: float, largest: float) -> tuple[float, float]:
    if values.is_floating_point():
        if smallest >= -_ROUNDING and largest <= 1 + _ROUNDING:
            return 0.0, 1.0
        if smallest >= 0 and largest <= 255:
            return 0.0, 255.0
    raise InputError(
        f"{values.dtype} values from {smallest:g} to {largest:g} have no known scale (uint8, uint16, floats in "
        "[0, 1] or [0, 255] have); say it by input_range=(low, high)"
    )


def _compose(color: torch.Tensor, alpha: torch.Tensor, alpha_background: list[int]) -> torch.Tensor:
    """Returns `color` (1 or 3, H, W) over the background as (3, H, W), in the dtype of `color`."""
    opacity = alpha / 255 if alpha.dtype == torch.uint8 else alpha
    color = _to_channels(color, 3)
    composed = color * opacity + background_color(alpha_background, color) * (1 - opacity)
    return composed.round().to(torch.uint8) if color.dtype == torch.uint8 else composed


def _to_channels(color: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Returns (C, H, W) from (1 or 3, H, W): grey repeated, or the luminance of RGB."""
    if color.shape[0] == num_channels:
        return color
    if color.shape[0] == 1:
        return color.expand(num_channels, -1, -1)
    weights = torch.tensor(_LUMINANCE_WEIGHTS, device=color.device)[:, None, None]
    luminance = (color * weights).sum(dim=0, keepdim=True)
    return (luminance + 0.5).floor().to(torch.uint8) if color.dtype == torch.uint8 else luminance.clamp(max=1)

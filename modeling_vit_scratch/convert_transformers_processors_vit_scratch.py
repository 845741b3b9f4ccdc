"""Image processors of transformers as ours, and ours as transformers' `ViTImageProcessor`."""

import logging
import math
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor, PreTrainedConfig, ViTImageProcessor

from .convert_config_vit_scratch import check_processor_fields, stored_fields
from .convert_messages_vit_scratch import one_line
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor

__all__ = ["from_transformers_processor", "to_vit_processor"]

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

# Those whose steps are: resize, centre crop, rescale, normalize.
PROCESSOR_TYPES = (
    "BitImageProcessor",
    "CLIPImageProcessor",
    "DeiTImageProcessor",
    "DINOv3ViTImageProcessor",
    "SiglipImageProcessor",
    "ViTImageProcessor",
)
RESCALE_FACTOR = 1 / 255
FILTERS = (0, 2, 3)  # Pillow's numbers of nearest, bilinear, bicubic: those ours has
WHITE = [255, 255, 255]

_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_COVERED = {"resize_mode": "shorter", "crop_pct": 224 / 256, "resample": 3}

# Without a file: how the published checkpoints of each type were trained. For ViT, SigLIP and DINOv3 that is also the
# default of transformers' class; DeiT, DINOv2 and MAE publish the statistics of ImageNet, which theirs is not.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "vit": {"resample": 2},
    "vit_mae": {"resample": 2, **_IMAGENET},
    "deit": {**_COVERED, **_IMAGENET},
    "dinov2": {**_COVERED, **_IMAGENET},
    "dinov2_with_registers": {**_COVERED, **_IMAGENET},
    "dinov3_vit": {"resample": 2, **_IMAGENET},
    "siglip_vision_model": {"resample": 3},
}


def from_transformers_processor(
    folder: Path, model_type: str, config: PreTrainedConfig
) -> tuple[ViTScratchImageProcessor, list[str]]:
    """Returns our processor for the one stored in `folder`, and notes on what differs or was assumed.

    Args:
        folder: of the checkpoint; without a processor file, that of the published checkpoints of the type is assumed.
        model_type: of the checkpoint.
        config: ours, of the converted model.
    """
    files = [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]
    if files:
        fields, notes = _fields_of(_stored_processor(files[0]), files[0])
    else:
        notes = [f"there is no {PROCESSOR_FILES[0]}: that of the published {model_type} checkpoints is assumed"]
        fields = _PUBLISHED[model_type]
        if config.num_channels != 3:  # the statistics are of RGB
            fields = {name: value for name, value in fields.items() if name not in _IMAGENET}
    try:
        processor = ViTScratchImageProcessor.from_config(config, **fields)
    except InputError as error:
        raise InputError(f"{files[0] if files else folder}: {one_line(error)}") from error
    _fill_patches(processor, config, files[0] if files else folder, notes)
    return processor, notes


def _stored_processor(file: Path) -> Any:
    """Returns transformers' processor by the name in the file, old or new; without a name, the model's."""
    check_processor_fields(file.parent, str(file.parent))
    stored = stored_fields(file, str(file.parent))
    stored = stored.get("image_processor", stored)
    try:
        name = stored.get("image_processor_type") or stored.get("feature_extractor_type")
        if name is None:
            processor = AutoImageProcessor.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
            _known_type(type(processor).__name__, file)
            return processor
        return getattr(transformers, _known_type(name, file)).from_dict(stored)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise InputError(f"{file} cannot be read as an image processor: {one_line(error)}") from error


def _known_type(name: str, file: Path) -> str:
    known = re.sub("FeatureExtractor$", "ImageProcessor", re.sub("(Pil|Fast)$", "", str(name)))
    if known not in PROCESSOR_TYPES:
        raise InputError(f"{file}: image_processor_type={name!r} is not converted; of {', '.join(PROCESSOR_TYPES)}")
    return known


def _fields_of(processor: Any, file: Path) -> tuple[dict[str, Any], list[str]]:
    for name in ("do_pad", "do_grayscale"):
        if getattr(processor, name, None):
            raise InputError(f"{file}: {name}=true has no counterpart; remove it there to convert without it")
    notes: list[str] = []
    fields = _fields_of_size(processor, file, notes)
    if processor.do_resize:
        resample = 2 if processor.resample is None else processor.resample
        if not isinstance(resample, int) or resample not in FILTERS:
            raise InputError(f"{file}: resample={resample!r} must be one of {FILTERS} (Pillow's numbers)")
        fields["resample"] = int(resample)
        if type(processor).__name__ == "DINOv3ViTImageProcessor":
            notes.append(
                "images are resized in 8 bit: transformers' DINOv3 processor resizes in floats, up to a grey level "
                "away"
            )
    return fields | _statistics(processor), notes


def _fields_of_size(processor: Any, file: Path, notes: list[str]) -> dict[str, Any]:
    """Returns `size`, `resize_mode` and `crop_pct`."""
    crop = dict(processor.crop_size) if processor.do_center_crop else None
    if not processor.do_resize:
        if crop:
            raise InputError(f"{file}: do_center_crop=true with do_resize=false has no counterpart; set both or none")
        return {"resize_mode": "none"}
    size = {name: pixels for name, pixels in dict(processor.size).items() if pixels is not None}
    if set(size) == {"height", "width"}:
        if crop is None or _pair(crop) == _pair(size):
            return {"resize_mode": "squash", "size": {"height": size["height"], "width": size["width"]}}
        notes.append(
            f"size={size['height']}x{size['width']} with crop_size={crop['height']}x{crop['width']}: images keep "
            "their aspect before the crop, as in the original code; transformers squashes them, and only square "
            "images come out the same"
        )
        cover = _pair(size)
    elif set(size) == {"shortest_edge"} and crop:
        cover = (size["shortest_edge"], size["shortest_edge"])
        notes.append(
            "the centre crop rounds half a pixel to even, as torchvision does; transformers rounds it down, so that "
            "it may sit one pixel off"
        )
    else:
        raise InputError(
            f"{file}: size={size} {'with' if crop else 'without'} a centre crop gives images of many sizes or has no "
            "counterpart; it must be height and width, or shortest_edge with do_center_crop"
        )
    assert crop is not None
    return {"resize_mode": "shorter", "size": dict(crop), "crop_pct": _crop_pct(_pair(crop), cover, file)}


def _crop_pct(crop: tuple[int, int], cover: tuple[int, int], file: Path) -> float:
    """Returns the fraction that makes our processor cover exactly `cover` before it crops."""
    crop_pct = crop[0] / cover[0]
    while crop_pct > 0 and math.floor(crop[0] / crop_pct) < cover[0]:  # the division's last bit
        crop_pct = math.nextafter(crop_pct, 0)
    if crop_pct > 1 or tuple(math.floor(side / crop_pct) for side in crop) != cover:
        raise InputError(
            f"{file}: crop_size={crop[0]}x{crop[1]} out of {cover[0]}x{cover[1]} has no counterpart; the crop must "
            "lie inside and keep the same fraction of both sides"
        )
    return crop_pct


def _statistics(processor: Any) -> dict[str, Any]:
    """Returns `image_mean` and `image_std` with a scale other than 1 / 255 folded in."""
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    mean = processor.image_mean if processor.do_normalize else 0.0
    std = processor.image_std if processor.do_normalize else 1.0
    if scale == RESCALE_FACTOR:
        return {"image_mean": mean, "image_std": std}
    return {"image_mean": _divided(mean, scale * 255), "image_std": _divided(std, scale * 255)}


def _divided(value: Any, divisor: float) -> Any:
    return value / divisor if isinstance(value, int | float) else [part / divisor for part in value]


def _fill_patches(
    processor: ViTScratchImageProcessor, config: PreTrainedConfig, source: Path, notes: list[str]
) -> None:
    """Makes the images as large as their whole patches are: transformers drops the rest, the model here refuses it."""
    height, width = _pair(processor.size)
    filled = {
        name: pixels - pixels % patch
        for (name, pixels), patch in zip(processor.size.items(), config.patch_height_width, strict=True)
    }
    if processor.resize_mode == "none" or _pair(filled) == (height, width):
        return
    if 0 in filled.values():
        raise InputError(f"{source}: size={height}x{width} holds no patch of {config.patch_size} pixels")
    processor.size = filled
    notes.append(
        f"images are resized to {filled['height']}x{filled['width']} here; the source resizes to {height}x{width} and "
        "drops what fills no patch"
    )


def to_vit_processor(processor: ViTScratchImageProcessor) -> ViTImageProcessor:
    """Returns transformers' `ViTImageProcessor` with the same result for 8-bit RGB images.

    Raises:
        InputError: names the field that has no counterpart.
    """
    if processor.resize_mode == "pad":
        raise InputError("resize_mode='pad' has no counterpart in ViTImageProcessor; use squash, shorter or none")
    fields: dict[str, Any] = {
        "do_resize": processor.resize_mode != "none",
        "size": dict(processor.size),
        "resample": processor.resample,
        "image_mean": list(processor.image_mean),
        "image_std": list(processor.image_std),
        "do_convert_rgb": processor.num_channels == 3,
    }
    if processor.resize_mode == "shorter":
        crop = _pair(processor.size)
        if crop[0] != crop[1]:
            raise InputError(
                f"resize_mode='shorter' with size={crop[0]}x{crop[1]} has no counterpart in ViTImageProcessor, whose "
                "crop after shortest_edge must be square; use squash"
            )
        fields |= {
            "size": {"shortest_edge": math.floor(crop[0] / processor.crop_pct)},
            "do_center_crop": True,
            "crop_size": dict(processor.size),
        }
        logger.warning("resize_mode='shorter': transformers' centre crop may sit one pixel off, it rounds down")
    if processor.num_channels == 1:
        logger.warning("num_channels=1: ViTImageProcessor does not convert to grey, give it grey images")
    if processor.alpha_background != WHITE or processor.input_range is not None:
        logger.warning("alpha_background and input_range are left out: ViTImageProcessor has no such fields")
    return ViTImageProcessor(**fields)


def _pair(size: dict[str, int]) -> tuple[int, int]:
    return size["height"], size["width"]

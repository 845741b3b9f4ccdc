"""What the config.json of a timm repo says: checked value by value, and its preprocessing as an image processor."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor

__all__ = [
    "FILTERS",
    "assumed_pixels",
    "check_timm_config",
    "image_processor_of",
    "read_timm_config",
    "whole_patches",
]

FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # Pillow's numbers
RESIZE_MODES = {"center": "shorter", "squash": "squash", "border": "pad"}

# Of the eval transform of the DeiT, DINO and DINOv2 releases; and what timm's own networks mostly have.
IMAGENET_PIXELS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_pct": 0.875}
TIMM_PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "crop_pct": 0.9}


def read_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns architecture, pretrained_cfg and model_args of a timm repo's config.json, as `from_timm` takes them."""
    found = config.get("pretrained_cfg", config)  # older repos have one dictionary for all
    pretrained_cfg = dict(found) if isinstance(found, dict) else found or {}
    named = pretrained_cfg if isinstance(pretrained_cfg, dict) else {}  # what is none is refused by from_timm
    if (labels := config.get("label_names", config.get("labels"))) is not None:
        named["label_names"] = labels
    return {
        "architecture": config.get("architecture", named.get("architecture")),
        "pretrained_cfg": pretrained_cfg,
        "model_args": config.get("model_args") or {},
    }


def check_timm_config(architecture: Any, pretrained_cfg: Any, model_args: Any, source: str) -> None:
    """Raises `InputError` naming the value of a config.json that is of another type than timm writes."""
    if not isinstance(architecture, str | None):
        raise InputError(f"{source}: architecture={architecture!r:.100} must be a name of timm's; mend config.json")
    for name, value in {"pretrained_cfg": pretrained_cfg, "model_args": model_args}.items():
        if not isinstance(value, Mapping | None):
            raise InputError(f"{source}: {name}={value!r:.100} must be a dictionary; mend config.json")
    for name, (fits, wanted) in _FIELDS.items():
        value = (pretrained_cfg or {}).get(name)
        if value is not None and not fits(value):
            raise InputError(f"{source}: {name}={value!r:.100} must be {wanted}; mend config.json")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(map(_is_number, value))


def _is_input_size(value: Any) -> bool:
    return _is_list(value) and len(value) == 3 and all(isinstance(side, int) and side > 0 for side in value)


# Of pretrained_cfg: what fits, and that in words. null is timm's default.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "label_names": (_is_list, "a list of names"),
    "mean": (_are_numbers, "a list of numbers"),
    "std": (lambda value: _are_numbers(value) and min(value) > 0, "a list of numbers above 0"),
    "crop_pct": (lambda value: _is_number(value) and 0 < value <= 1, "a number in (0, 1]"),
    "crop_mode": (lambda value: isinstance(value, str), "a word"),
    "interpolation": (lambda value: isinstance(value, str), "a word"),
    "input_size": (_is_input_size, "[channels, height, width], each 1 or more"),
}


def whole_patches(size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Returns (height, width) in pixels of what the patches cover: timm's convolution drops the rest."""
    height, width = (side - side % patch for side, patch in zip(size, patch_size, strict=True))
    return height, width


def assumed_pixels(state: Mapping[str, Tensor], notes: list[str]) -> dict[str, Any]:
    is_release = bool({"mask_token", "register_tokens", "dist_token"} & state.keys())
    whose = (
        "of the DeiT and DINOv2 releases" if is_release else "of timm's ViT (mean and std 0.5; DeiT and DINO differ)"
    )
    notes.append(f"a state dict holds no preprocessing: that {whose} is assumed")
    return IMAGENET_PIXELS if is_release else TIMM_PIXELS


def image_processor_of(
    config: PreTrainedConfig, pixels: Mapping[str, Any], source: str, notes: list[str]
) -> ViTScratchImageProcessor:
    """Returns the processor of timm's eval transform, for images of whole patches."""
    from timm.data import resolve_data_config

    data = resolve_data_config(pretrained_cfg=dict(pixels))
    height, width = whole_patches(data["input_size"][1:], config.patch_height_width)
    if (height, width) != tuple(data["input_size"][1:]):
        theirs, patch = "{1}x{2}".format(*data["input_size"]), "{}x{}".format(*config.patch_height_width)
        notes.append(
            f"timm resizes to {theirs} and drops what fills no patch of {patch}: here images are resized to "
            f"{height}x{width}, the size of the comparison"
        )
    fields: dict[str, Any] = {
        "size": {"height": height, "width": width},
        "resize_mode": RESIZE_MODES.get(data["crop_mode"], "shorter"),  # timm takes any other word for center
        "resample": FILTERS.get(data["interpolation"], FILTERS["bicubic"]),
        "image_mean": list(data["mean"]),
        "image_std": list(data["std"]),
    }
    if len(data["mean"]) != config.num_channels:  # timm leaves RGB's where in_chans was changed
        fields |= {f"image_{name}": sum(data[name]) / len(data[name]) for name in ("mean", "std")}
        notes.append(f"mean and std of {len(data['mean'])} channels are averaged for in_chans={config.num_channels}")
    if data["interpolation"] not in FILTERS:
        notes.append(f"interpolation={data['interpolation']!r} is no filter here: bicubic takes its place")
    if fields["resize_mode"] == "shorter":
        fields["crop_pct"] = data["crop_pct"]
    elif data["crop_pct"] != 1:
        notes.append(f"crop_pct={data['crop_pct']} is left out: crop_mode={data['crop_mode']!r} does not crop here")
    if fields["resize_mode"] == "pad":
        fields["alpha_background"] = [round(255 * mean) for mean in data["mean"]]
    try:
        return ViTScratchImageProcessor.from_config(config, **fields)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error

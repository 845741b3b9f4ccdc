"""What a configuration must not say: fields out of range, and fields that contradict each other."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .errors_vit_scratch import InputError

__all__ = ["ADDED_POSITIONS", "check_architecture", "check_grid", "check_labels", "check_pretraining", "check_tokens"]

COUNTS = ("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
FINITE = ("layer_norm_eps", "layer_scale_init", "rope_theta", "head_bias_init")
RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "patch_dropout_rate")
DECODER_COUNTS = (
    "decoder_hidden_size",
    "decoder_num_hidden_layers",
    "decoder_num_attention_heads",
    "decoder_intermediate_size",
)
ROPE_THETA = 100.0  # what the config has where it says nothing
ADDED_POSITIONS = ("learned_1d", "learned_2d", "sincos_2d")


def check_architecture(config: PreTrainedConfig) -> None:
    """Raises `InputError` unless the layers can be built as they are described."""
    _check_ranges(config)
    if config.hidden_size % config.num_attention_heads:
        raise InputError(
            f"hidden_size={config.hidden_size} must be a multiple of num_attention_heads={config.num_attention_heads}"
        )
    if config.hidden_act not in ACT2FN:
        close = difflib.get_close_matches(config.hidden_act, list(ACT2FN), n=3)
        raise InputError(f"hidden_act={config.hidden_act!r} must be one of transformers' activations; near: {close}")
    if config.mlp_type == "swiglu" and config.hidden_act != "silu":
        raise InputError(f"mlp_type='swiglu' is gated by a SiLU: set hidden_act='silu', not {config.hidden_act!r}")
    if config.representation_size is not None and config.representation_size < 1:
        raise InputError(f"representation_size={config.representation_size} must be at least 1, or None for no layer")
    _check_stem(config)


def _check_ranges(config: PreTrainedConfig) -> None:
    for name in COUNTS:
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)} must be at least 1")
    for name in FINITE:
        if not math.isfinite(getattr(config, name) or 0):
            raise InputError(f"{name}={getattr(config, name)} must be a finite number")
    for name in RATES:
        if not 0 <= getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)} must be in [0, 1)")
    if not config.layer_norm_eps > 0:
        raise InputError(f"layer_norm_eps={config.layer_norm_eps} must be above 0")
    if config.layer_scale_init is not None and not config.layer_scale_init > 0:
        raise InputError(f"layer_scale_init={config.layer_scale_init} must be above 0, or None for no LayerScale")
    if not config.rope_theta > 1:
        raise InputError(f"rope_theta={config.rope_theta} must be above 1")
    if config.drop_path_rate > 0 and config.num_hidden_layers == 1:
        raise InputError(
            f"drop_path_rate={config.drop_path_rate} rises from 0 at the first layer, and num_hidden_layers=1 has no "
            "other; use 0.0"
        )


def _check_stem(config: PreTrainedConfig) -> None:
    if config.stem_width_factor < 1:
        raise InputError(f"stem_width_factor={config.stem_width_factor} must be at least 1")
    if config.stem_depths is None:
        if config.stem_width_factor != 1:
            raise InputError(
                f"stem_width_factor={config.stem_width_factor} needs stem_depths: there is no ResNet stem"
            )
    elif any(depth < 1 for depth in config.stem_depths):
        raise InputError(f"stem_depths={config.stem_depths} must be at least 1 unit a stage; [] is the root alone")


def check_tokens(config: PreTrainedConfig) -> None:
    """Raises `InputError` unless pooling, tokens and positions go together."""
    if config.num_register_tokens < 0:
        raise InputError(f"num_register_tokens={config.num_register_tokens} must be at least 0")
    if config.pooling in ("class_token", "class_token_and_mean") and not config.use_class_token:
        raise InputError(f"pooling={config.pooling!r} reads the class token, so use_class_token must not be False")
    if config.use_distillation_token and config.pooling != "class_token":
        raise InputError(
            f"use_distillation_token=True needs pooling='class_token', whose head it is twin to; got pooling="
            f"{config.pooling!r}"
        )
    if config.use_distillation_token and config.representation_size is not None:
        raise InputError(
            f"use_distillation_token=True has no pre-logits layer: representation_size must be None, not "
            f"{config.representation_size}"
        )
    if config.final_norm == "after_pooling" and config.pooling != "mean":
        raise InputError(f"final_norm='after_pooling' is for pooling='mean'; got pooling={config.pooling!r}")
    _check_positions(config)


def _check_positions(config: PreTrainedConfig) -> None:
    kind, placement = config.position_embedding_type, config.position_embedding_placement
    if placement != "stem" and kind not in ADDED_POSITIONS:
        raise InputError(
            f"position_embedding_placement={placement!r} is for positions that are added ({', '.join(ADDED_POSITIONS)}"
            f"); position_embedding_type={kind!r} leaves it at 'stem'"
        )
    if placement == "every_layer" and kind == "sincos_2d":
        raise InputError(
            "position_embedding_placement='every_layer' learns a table a layer, and position_embedding_type="
            "'sincos_2d' learns none; use 'every_layer_shared'"
        )
    if not config.class_token_position and kind != "learned_1d":
        raise InputError(f"class_token_position=False is for position_embedding_type='learned_1d'; got {kind!r}")
    if config.rope_theta != ROPE_THETA and kind != "rope_2d":
        raise InputError(
            f"rope_theta={config.rope_theta} is for position_embedding_type='rope_2d'; {kind!r} leaves it at "
            f"{ROPE_THETA}"
        )
    for of_kind, width, multiple in (
        ("learned_2d", "hidden_size", 2),
        ("sincos_2d", "hidden_size", 4),
        ("rope_2d", "head_dim", 4),
    ):
        if kind == of_kind and getattr(config, width) % multiple:
            detail = f" = hidden_size / num_attention_heads = {config.hidden_size} / {config.num_attention_heads}"
            raise InputError(
                f"position_embedding_type={kind!r} needs {width} to be a multiple of {multiple}; got "
                f"{getattr(config, width)}{detail if width == 'head_dim' else ''}"
            )


def check_pretraining(config: PreTrainedConfig) -> None:
    """Raises `InputError` unless the heads of self-supervised training can be built."""
    if not 0 < config.corruption_ratio <= 1:
        raise InputError(f"corruption_ratio={config.corruption_ratio} must be in (0, 1]")
    if not 0 < config.mask_ratio < 1:
        raise InputError(f"mask_ratio={config.mask_ratio} must be in (0, 1)")
    for name in DECODER_COUNTS:
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)} must be at least 1")
    if config.decoder_hidden_size % config.decoder_num_attention_heads or config.decoder_hidden_size % 4:
        raise InputError(
            f"decoder_hidden_size={config.decoder_hidden_size} must be a multiple of 4 and of "
            f"decoder_num_attention_heads={config.decoder_num_attention_heads}"
        )
    if (config.image_mean is None) != (config.image_std is None):
        raise InputError(
            f"image_mean={config.image_mean} and image_std={config.image_std} go together: give both, those of the "
            "image processor, or neither"
        )
    if not all(0 <= mean <= 1 for mean in config.image_mean or []):
        raise InputError(f"image_mean={config.image_mean} must be in [0, 1], of pixels on that scale")
    if not all(0 < std < math.inf for std in config.image_std or []):
        raise InputError(f"image_std={config.image_std} must be above 0 and finite")


def check_grid(config: PreTrainedConfig) -> None:
    """Raises `InputError` unless the image can be cut into whole patches."""
    for name in ("image_size", "patch_size"):
        value = getattr(config, name)
        if isinstance(value, list) and len(value) != 2:
            raise InputError(f"{name}={value} must be one number or [height, width]")
        if min(value if isinstance(value, list) else [value]) < 1:
            raise InputError(f"{name}={value} must be at least 1 pixel a side")
    sides = zip(("height", "width"), config.image_height_width, config.patch_height_width, strict=True)
    for side, pixels, patch in sides:
        if patch % config.stem_stride:
            raise InputError(
                f"patch_size={config.patch_size} must be a multiple of {config.stem_stride}, the pixels behind one "
                f"feature of a ResNet stem with stem_depths={config.stem_depths}"
            )
        if pixels % patch:
            raise InputError(
                f"image_size={config.image_size} must be a multiple of patch_size={config.patch_size}: the {side} of "
                f"{pixels} leaves {pixels % patch} pixels; use {max(patch, pixels - pixels % patch)}"
            )


def check_labels(id2label: Mapping[Any, str] | None, label2id: Mapping[str, Any] | None) -> None:
    """Raises `InputError` unless the classes are numbered from 0, named once each, and both maps agree."""
    if id2label is None:
        return
    if sorted(id2label) != list(range(len(id2label))):
        raise InputError(f"id2label must number its classes 0..{len(id2label) - 1}; got {list(id2label)}")
    names = list(id2label.values())
    if numbers := [str(name) for name in names if not isinstance(name, str)]:  # JSON would turn them into text
        raise InputError(f"id2label must name its classes by text; got {', '.join(numbers)}")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InputError(f"id2label must name each class once; {twice} stand more than once")
    if {label: int(index) for label, index in (label2id or {}).items()} != {
        label: index for index, label in id2label.items()
    }:
        raise InputError("label2id must be the inverse of id2label; leave it out to have it derived")

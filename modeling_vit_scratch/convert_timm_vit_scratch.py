"""timm's vit, deit and dinov2 checkpoints into ViTScratch and back, by one table of names for both ways.

timm itself builds the network and is the reference. D hidden_size, N patches, R register tokens.
"""

import copy
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_vit_scratch import ViTScratchConfig
from .convert_messages_vit_scratch import one_line
from .convert_npz_vit_scratch import IMAGENET_21K_CLASSES
from .convert_proof_vit_scratch import Conversion, built, proof_dtype
from .convert_timm_config_vit_scratch import (
    FILTERS,
    assumed_pixels,
    check_timm_config,
    image_processor_of,
    read_timm_config,
    whole_patches,
)
from .convert_timm_network_vit_scratch import (
    POOLINGS,
    activation_of,
    import_timm,
    load_timm_network,
    network_of_shapes,
    obstacles,
    registered_network,
    rename_release,
)
from .convert_timm_tensors_vit_scratch import fold_register_positions, tensors_of_timm, tensors_of_vit_scratch
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

__all__ = ["from_timm", "read_timm_config", "to_timm"]

logger = logging.getLogger(__name__)

# timm's names of what HIDDEN_ACTS lists by class.
ACT_LAYERS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "relu": "relu",
}
SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant", 1664: "gigantic"}

# Fields whose other values timm's VisionTransformer has nothing for. An eps is no argument that JSON can hold; two are
# those of registered architectures.
FITTING: dict[str, tuple[Any, ...]] = {
    "stem_depths": (None,),
    "position_embedding_type": ("none", "learned_1d"),
    "position_embedding_placement": ("stem",),
    "pooling": tuple(POOLINGS.values()),
    "representation_size": (None,),
    "layer_norm_eps": (1e-6, 1e-5),
    "hidden_act": tuple(ACT_LAYERS),
}


def from_timm(
    state_dict: Mapping[str, Tensor],
    *,
    source: str,
    architecture: str | None = None,
    pretrained_cfg: dict[str, Any] | None = None,
    model_args: dict[str, Any] | None = None,
    num_attention_heads: int | None = None,
    image_size: int | list[int] | None = None,
) -> Conversion:
    """Returns a network of timm's, or a DeiT, DINO or DINOv2 release in nearly its names, as a ViTScratch.

    Args:
        state_dict: the checkpoint's tensors.
        source: its name, for messages.
        architecture: timm's name, as in a repo's config.json; None: names and shapes of the tensors tell the network.
        pretrained_cfg: preprocessing and label_names, as in config.json.
        model_args: what differs from the architecture's own arguments, as in config.json.
        num_attention_heads: without architecture, where the width does not tell.
        image_size: pixels, or [height, width]; without architecture, where the grid is no square.

    Raises:
        InputError: the network has a part that has no place here, or the tensors are not its.
        EnvironmentFault: timm is not installed.
    """
    check_timm_config(architecture, pretrained_cfg, model_args, source)
    notes: list[str] = []
    arguments = dict(model_args or {})
    if architecture is None:
        state, pixels = rename_release(state_dict, notes), pretrained_cfg or assumed_pixels(state_dict, notes)
        network = network_of_shapes(
            state, source=source, num_attention_heads=num_attention_heads, image_size=image_size, notes=notes
        )
    else:
        state, pixels = dict(state_dict), pretrained_cfg or {}
        network = registered_network(architecture, arguments, pixels, state, source=source)
    _load(network, state, architecture, source, notes)
    takes_any_size = architecture is None or bool(arguments.get("dynamic_img_size"))
    return _converted(network, _sized(pixels, network, takes_any_size), source, notes)


def _load(network: Any, state: Mapping[str, Tensor], architecture: str | None, source: str, notes: list[str]) -> None:
    if found := list(obstacles(network)):
        raise InputError(f"{source}: timm's {architecture or type(network).__name__} has {'; '.join(found)}")
    load_timm_network(network, state, source)
    fold_register_positions(network, notes)


def _sized(pixels: Mapping[str, Any], network: Any, takes_any_size: bool) -> dict[str, Any]:
    own = {"input_size": (network.patch_embed.proj.in_channels, *network.patch_embed.img_size)}
    given = {name: value for name, value in pixels.items() if value is not None}
    return own | given if takes_any_size else given | own


def _converted(network: Any, pixels: Mapping[str, Any], source: str, notes: list[str]) -> Conversion:
    has_head = network.num_classes > 0
    try:
        config = ViTScratchConfig(**_fields(network, notes), **_label_fields(network, pixels, notes))
    except (StrictDataclassError, InputError) as error:
        raise InputError(f"{source}: {one_line(error)}") from error
    model_class = ViTScratchForImageClassification if has_head else ViTScratchModel
    model = built(model_class, config, tensors_of_vit_scratch(network.state_dict(), config, has_head), source)
    return Conversion(
        source=source,
        model=model,
        image_processor=image_processor_of(config, pixels, source, notes),
        reference=_reference(network),
        reference_dtype=proof_dtype(model),
        notes=notes,
    )


def to_timm(
    model: PreTrainedModel, image_processor: ViTScratchImageProcessor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns state dict and config of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads.

    The files are model.safetensors and config.json. Not carried, since timm has no field for them: head_bias_init,
    position_interpolation (timm's is bicubic with antialiasing), and what only our pre-training heads read.

    Raises:
        InputError: names the field whose value timm has nothing for.
        EnvironmentFault: timm is not installed; it says which architectures there are.
    """
    config = model.config
    has_head = isinstance(model, ViTScratchForImageClassification)
    if not has_head and not isinstance(model, ViTScratchModel):
        raise InputError(
            f"{type(model).__name__} is no class of timm's; load it as a ViTScratchForImageClassification"
        )
    _check_fitting(config, has_head)
    _check_fitting_pixels(config, image_processor)
    _warn_of_positions(config)
    exported = {
        "architecture": _nearest_architecture(config),
        "num_classes": config.num_labels if has_head else 0,
        "num_features": config.hidden_size,
        "global_pool": _global_pool(config),
        "model_args": _model_args(config),
        "pretrained_cfg": _pretrained_cfg(config, image_processor, has_head),
    }
    names = list((config.id2label or {}).values())
    if has_head and not all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        exported["label_names"] = names
    return tensors_of_timm(model.state_dict(), config, has_head), exported


# From timm


def _reference(network: Any) -> Callable[[Tensor], dict[str, Tensor]]:
    @torch.no_grad()
    def reference(pixel_values: Tensor) -> dict[str, Tensor]:
        original = copy.deepcopy(network).to(pixel_values.device, pixel_values.dtype)
        features = original.forward_features(pixel_values)
        outputs = {"last_hidden_state": features}
        if original.num_classes:
            outputs["logits"] = original.forward_head(features)
        elif original.global_pool and getattr(original, "dist_token", None) is None:
            outputs["pooler_output"] = original.forward_head(features, pre_logits=True)
        return outputs

    return reference


def _fields(network: Any, notes: list[str]) -> dict[str, Any]:
    """Returns the fields of our config for a network of timm's without obstacles."""
    block, embed, has_class_token = network.blocks[0], network.patch_embed, network.cls_token is not None
    if not network.global_pool:
        notes.append("global_pool='' pools nothing: pooler_output is the class token here, or the mean without one")
    return {
        "image_size": _side_or_sides(whole_patches(embed.img_size, embed.patch_size)),
        "patch_size": _side_or_sides(embed.patch_size),
        "num_channels": embed.proj.in_channels,
        "hidden_size": embed.proj.out_channels,
        "num_hidden_layers": len(network.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc2.in_features,
        "hidden_act": activation_of(block.mlp.act),
        "mlp_type": "mlp" if block.mlp.fc1.out_features == block.mlp.fc2.in_features else "swiglu",
        "layer_norm_eps": block.norm1.eps,
        "attention_probs_dropout_prob": block.attn.attn_drop.p,
        "hidden_dropout_prob": _hidden_dropout_prob(network, notes),
        "drop_path_rate": getattr(network.blocks[-1].drop_path1, "drop_prob", 0.0),
        "patch_dropout_rate": getattr(network.patch_drop, "prob", 0.0),
        "qkv_bias": block.attn.qkv.bias is not None,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "layer_scale_init": getattr(block.ls1, "init_values", None),
        "position_embedding_type": "none" if network.pos_embed is None else "learned_1d",
        "class_token_position": network.pos_embed is None or not (network.no_embed_class and has_class_token),
        "position_interpolation": "bicubic_antialias",
        "use_class_token": has_class_token,
        "use_distillation_token": getattr(network, "dist_token", None) is not None,
        "num_register_tokens": network.num_reg_tokens,
        "pooling": POOLINGS.get(network.global_pool, "class_token" if has_class_token else "mean"),
        "final_norm": "before_pooling" if isinstance(network.fc_norm, nn.Identity) else "after_pooling",
    }


def _side_or_sides(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _hidden_dropout_prob(network: Any, notes: list[str]) -> float:
    block = network.blocks[0]
    rates = {network.pos_drop.p, block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p}
    if network.head_drop.p:
        notes.append(f"drop_rate={network.head_drop.p} before the head is left out; it is for training only")
    if len(rates) > 1:
        notes.append("pos_drop_rate and proj_drop_rate differ and are left out; they are for training only")
        return 0.0
    return rates.pop()


def _problem_type(num_classes: int) -> str:
    """Returns the objective, which timm's config does not hold: a softmax over one class is always 1."""
    is_multi_label = num_classes in (1, IMAGENET_21K_CLASSES)
    return "multi_label_classification" if is_multi_label else "single_label_classification"


def _label_fields(network: Any, pixels: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    if not network.num_classes:
        return {}
    fields: dict[str, Any] = {
        "num_labels": network.num_classes,
        "problem_type": _problem_type(network.num_classes),
    }
    if network.num_classes == IMAGENET_21K_CLASSES:
        notes.append(
            f"{network.num_classes} classes are ImageNet-21k, which AugReg trained with one sigmoid a class: "
            "problem_type is multi_label_classification"
        )
    names = [str(name) for name in pixels.get("label_names") or ()]
    if len(names) == len(set(names)) == network.num_classes:
        fields["id2label"] = dict(enumerate(names))
    elif names:
        notes.append(f"label_names are left out: {len(set(names))} different ones for {network.num_classes} classes")
    return fields


# To timm


def _check_fitting(config: PreTrainedConfig, has_head: bool) -> None:
    for name, values in FITTING.items():
        if (value := getattr(config, name)) not in values and not (
            name == "hidden_act" and config.mlp_type == "swiglu"
        ):
            listed = ", ".join(map(repr, values))
            raise InputError(f"{name}={value!r} does not fit timm's VisionTransformer, which has {listed}")
    num_labels = len(config.id2label or {})
    if has_head and config.problem_type != (inferred := _problem_type(num_labels)):
        raise InputError(
            f"problem_type={config.problem_type!r} does not fit timm, whose config holds no objective: "
            f"{num_labels} classes come back as {inferred!r}"
        )
    if config.mlp_type == "swiglu" and config.pooling == "attention":
        raise InputError("mlp_type='swiglu' does not fit timm's global_pool='map', whose own MLP is not gated")
    if config.mlp_type == "swiglu" and config.layer_norm_eps != 1e-6:
        raise InputError(
            f"layer_norm_eps={config.layer_norm_eps} does not fit timm's networks with SwiGLU, all of 1e-6"
        )
    if not config.use_distillation_token:
        return
    for name, value in {
        "mlp_type": "mlp",
        "layer_norm_eps": 1e-6,
        "position_embedding_type": "learned_1d",
        "class_token_position": True,
        "num_register_tokens": 0,
    }.items():
        if getattr(config, name) != value:
            raise InputError(
                f"{name}={getattr(config, name)!r} does not fit timm's distilled networks, which have {value!r}"
            )


def _check_fitting_pixels(config: PreTrainedConfig, image_processor: ViTScratchImageProcessor) -> None:
    size = (image_processor.size["height"], image_processor.size["width"])
    if size != config.image_height_width:
        raise InputError(
            f"size={image_processor.size} of the image processor does not fit timm, where it is the network's own: "
            f"image_size={config.image_size}; call resize_input(image_size=...) first"
        )
    if image_processor.resize_mode not in ("squash", "shorter"):
        raise InputError(
            f"resize_mode={image_processor.resize_mode!r} does not fit timm, which has squash and shorter"
        )


def _warn_of_positions(config: PreTrainedConfig) -> None:
    theirs = "bicubic_antialias"
    if config.position_embedding_type == "learned_1d" and config.position_interpolation != theirs:
        logger.warning(
            "position_interpolation=%r is left out: at other sizes timm resamples positions by %r",
            config.position_interpolation,
            theirs,
        )


def _nearest_architecture(config: PreTrainedConfig) -> str:
    """Returns a registered name whose arguments are those of the network, or can be set to them in model_args."""
    size, (patch, _), (image, _) = SIZES.get(config.hidden_size), config.patch_height_width, config.image_height_width
    if config.mlp_type == "swiglu":  # the rest is set by name, which no argument in JSON can
        return "vit_giant_patch14_dinov2"
    if config.layer_norm_eps != 1e-6:
        return "vit_base_patch16_clip_224"
    kind = "deit_{}_distilled" if config.use_distillation_token else "vit_{}"
    is_model = import_timm("to_timm").is_model
    names = [f"{kind.format(size)}_patch{patch}_{image}", f"{kind.format(size)}_patch16_224"]
    return next(filter(is_model, names), f"{kind.format('base')}_patch16_224")


def _global_pool(config: PreTrainedConfig) -> str:
    return next(theirs for theirs, ours in POOLINGS.items() if ours == config.pooling)


def _model_args(config: PreTrainedConfig) -> dict[str, Any]:
    has_swiglu = config.mlp_type == "swiglu"
    ratio = config.intermediate_size * (2 if has_swiglu else 1) / config.hidden_size
    return {
        "img_size": list(config.image_height_width),
        "patch_size": list(config.patch_height_width),
        "in_chans": config.num_channels,
        "global_pool": _global_pool(config),
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio if ratio == int(ratio) else ratio + 0.5 / config.hidden_size,  # int(ratio * D) in timm
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale_init or 0.0,
        "class_token": bool(config.use_class_token),
        "pos_embed": "none" if config.position_embedding_type == "none" else "learn",
        "no_embed_class": config.num_prefix_positions == 0,
        "reg_tokens": config.num_register_tokens,
        "pre_norm": False,
        "fc_norm": config.final_norm == "after_pooling",
        "act_layer": "silu" if has_swiglu else ACT_LAYERS[config.hidden_act],
        "pos_drop_rate": config.hidden_dropout_prob,
        "proj_drop_rate": config.hidden_dropout_prob,
        "attn_drop_rate": config.attention_probs_dropout_prob,
        "patch_drop_rate": config.patch_dropout_rate,
        "drop_path_rate": config.drop_path_rate,
    }


def _pretrained_cfg(
    config: PreTrainedConfig, image_processor: ViTScratchImageProcessor, has_head: bool
) -> dict[str, Any]:
    shorter = image_processor.resize_mode == "shorter"
    return {
        "custom_load": False,
        "input_size": [config.num_channels, *config.image_height_width],
        "fixed_input_size": True,
        "interpolation": next(name for name, number in FILTERS.items() if number == image_processor.resample),
        "crop_pct": image_processor.crop_pct if shorter else 1.0,
        "crop_mode": "center" if shorter else "squash",
        "mean": image_processor.image_mean,
        "std": image_processor.image_std,
        "num_classes": config.num_labels if has_head else 0,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if config.use_distillation_token else "head",
    }

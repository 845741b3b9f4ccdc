"""torchvision's vit_b_16, vit_b_32, vit_l_16, vit_l_32 and vit_h_14 into ViTScratch.

The reference is torchvision's own network of the shape that names and shapes of the tensors tell. D hidden_size.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision.models import VisionTransformer
from transformers import PreTrainedConfig

from .configuration_vit_scratch import ViTScratchConfig
from .convert_proof_vit_scratch import Conversion, built, proof_dtype
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

__all__ = ["from_torchvision"]

HEADS = {768: 12, 1024: 16, 1280: 16}  # by width: all that torchvision has

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
DEFAULT_CROP = 224
RESIZE_SIZE, RESIZE_SIZE_OF_L_16 = 256, 242  # in IMAGENET1K_V1

# Ours and torchvision's names within a layer; q, k and v are one there.
LAYER = {
    "layernorm_before": "ln_1",
    "attention.o_proj": "self_attention.out_proj",
    "layernorm_after": "ln_2",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}


def from_torchvision(
    state_dict: Mapping[str, Tensor], source: str, *, num_attention_heads: int | None = None
) -> Conversion:
    """Returns a VisionTransformer of torchvision's as a ViTScratch: an encoder, where it has no heads.head.

    Args:
        state_dict: the checkpoint's tensors, in the names of torchvision since 0.13 or before.
        source: its name, for messages.
        num_attention_heads: where the width is none of torchvision's own, 768, 1024 and 1280.

    Raises:
        InputError: the tensors are not those of such a network.
    """
    state = {re.sub(r"\.mlp\.linear_([12])\.", _new_mlp_name, name): tensor for name, tensor in state_dict.items()}
    arguments = _arguments(state, num_attention_heads, source)
    has_head = "heads.head.weight" in state
    network = _network(arguments, state, has_head, source)
    config = ViTScratchConfig(**_fields(arguments, state))
    model_class = ViTScratchForImageClassification if has_head else ViTScratchModel
    model = built(model_class, config, _tensors(state, config, has_head), source)
    notes = _notes(config, num_attention_heads)
    return Conversion(
        source=source,
        model=model,
        image_processor=_image_processor(config, notes),
        reference=_reference(network, has_head),
        reference_dtype=proof_dtype(model),
        notes=notes,
    )


def _notes(config: PreTrainedConfig, num_attention_heads: int | None) -> list[str]:
    width, heads = config.hidden_size, config.num_attention_heads
    notes = [
        "a state dict does not tell the eps of LayerNorms: torchvision's own is assumed, 1e-6",
        "at other image sizes positions are resampled with half a patch between the corners and the border "
        "(align_corners=False); torchvision's interpolate_embeddings puts the corners on each other",
    ]
    if num_attention_heads is None:
        notes.append(f"{heads} heads, as torchvision's networks of width {width}; else give num_attention_heads=...")
    return notes


def _new_mlp_name(match: re.Match[str]) -> str:
    return ".mlp.0." if match[1] == "1" else ".mlp.3."


def _arguments(state: Mapping[str, Tensor], num_attention_heads: int | None, source: str) -> dict[str, Any]:
    if any(name.startswith("conv_proj.conv_") for name in state):
        raise InputError(
            f"{source}: conv_proj is a stack of convolutions (conv_stem_configs); one that cuts patches fits"
        )
    width, _, patch, patch_width = _shape(state, "conv_proj.weight", 4, source)
    num_patches = _shape(state, "encoder.pos_embedding", 3, source)[1] - 1
    rows = math.isqrt(max(0, num_patches))
    if num_patches < 1 or rows * rows != num_patches or patch != patch_width:
        raise InputError(f"{source}: {num_patches} patches of {patch}x{patch_width} pixels are no square of squares")
    if num_attention_heads is None and width not in HEADS:
        raise InputError(f"{source}: no tensor tells the heads of a width of {width}; give num_attention_heads=...")
    num_heads = HEADS[width] if num_attention_heads is None else num_attention_heads
    if num_heads < 1 or width % num_heads:
        raise InputError(f"{source}: num_attention_heads={num_heads} does not divide the width of {width}")
    return {
        "image_size": rows * patch,
        "patch_size": patch,
        "num_layers": len({name.split(".")[2] for name in state if name.startswith("encoder.layers.")}),
        "num_heads": num_heads,
        "hidden_dim": width,
        "mlp_dim": _shape(state, "encoder.layers.encoder_layer_0.mlp.0.weight", 2, source)[0],
        "representation_size": _width(state, "heads.pre_logits.weight", source) or None,
        "num_classes": _width(state, "heads.head.weight", source) or 1,
    }


def _width(state: Mapping[str, Tensor], name: str, source: str) -> int:
    return _shape(state, name, 2, source)[0] if name in state else 0


def _shape(state: Mapping[str, Tensor], name: str, num_axes: int, source: str) -> tuple[int, ...]:
    if name not in state or state[name].ndim != num_axes:
        found = f"has shape {tuple(state[name].shape)}" if name in state else "is missing"
        raise InputError(f"{source}: {name} {found}, so this is no VisionTransformer of torchvision's")
    return tuple(state[name].shape)


def _network(arguments: dict[str, Any], state: Mapping[str, Tensor], has_head: bool, source: str) -> VisionTransformer:
    with torch.device("meta"):
        network = VisionTransformer(**arguments)
    if not has_head:
        network.heads = torch.nn.Sequential()
    try:
        network.load_state_dict(dict(state), strict=True, assign=True)
    except RuntimeError as error:
        raise InputError(
            f"{source} does not hold the tensors of a VisionTransformer: {' '.join(str(error).split())[:400]}"
        ) from error
    return network.eval().requires_grad_(False)


def _reference(network: VisionTransformer, has_head: bool) -> Callable[[Tensor], dict[str, Tensor]]:
    @torch.no_grad()
    def reference(pixel_values: Tensor) -> dict[str, Tensor]:
        original = copy.deepcopy(network).to(pixel_values.device, pixel_values.dtype)
        outputs: dict[str, Tensor] = {}
        original.encoder.register_forward_hook(lambda *call: outputs.update(last_hidden_state=call[2]))
        pooled = original(pixel_values)
        return outputs | {"logits" if has_head else "pooler_output": pooled}

    return reference


def _fields(arguments: dict[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    fields = {
        "image_size": arguments["image_size"],
        "patch_size": arguments["patch_size"],
        "num_channels": state["conv_proj.weight"].shape[1],
        "hidden_size": arguments["hidden_dim"],
        "num_hidden_layers": arguments["num_layers"],
        "num_attention_heads": arguments["num_heads"],
        "intermediate_size": arguments["mlp_dim"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "representation_size": arguments["representation_size"],
        "position_interpolation": "bicubic",
    }
    if "heads.head.weight" in state:
        fields["num_labels"] = arguments["num_classes"]
        if arguments["num_classes"] == 1:
            fields["problem_type"] = "multi_label_classification"  # a softmax over one class is always 1
    return fields


def _tensors(state: Mapping[str, Tensor], config: PreTrainedConfig, has_head: bool) -> dict[str, Tensor]:
    encoder = {
        "embeddings.cls_token": state["class_token"],
        "embeddings.position_embeddings": state["encoder.pos_embedding"],
    }
    modules = {"embeddings.patch_embeddings.projection": "conv_proj", "layernorm": "encoder.ln"}
    for index in range(config.num_hidden_layers):
        ours, theirs = f"layers.{index}", f"encoder.layers.encoder_layer_{index}"
        modules |= {f"{ours}.{name}": f"{theirs}.{their_name}" for name, their_name in LAYER.items()}
        for kind in ("weight", "bias"):
            parts = state[f"{theirs}.self_attention.in_proj_{kind}"].chunk(3)
            encoder |= {f"{ours}.attention.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
    if config.representation_size is not None:
        modules["pooler.dense"] = "heads.pre_logits"
    prefix = "vit." if has_head else ""
    tensors = {f"{prefix}{name}": tensor for name, tensor in encoder.items()}
    heads = {"classifier": "heads.head"} if has_head else {}
    for ours, theirs in {**{f"{prefix}{name}": other for name, other in modules.items()}, **heads}.items():
        tensors |= {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in ("weight", "bias")}
    return tensors


def _image_processor(config: PreTrainedConfig, notes: list[str]) -> ViTScratchImageProcessor:
    """Returns torchvision's ImageClassification preset; a state dict does not hold it, the size tells it in part."""
    size = config.image_size
    fields: dict[str, Any] = {
        "resize_mode": "shorter",
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "crop_pct": 1.0,
        "resample": BICUBIC,
    }
    if size == DEFAULT_CROP:
        is_l_16 = (config.hidden_size, config.patch_size) == (1024, 16)
        resize_size = RESIZE_SIZE_OF_L_16 if is_l_16 else RESIZE_SIZE
        fields |= {"crop_pct": DEFAULT_CROP / resize_size, "resample": BILINEAR}
        notes.append(
            f"preprocessing is that of IMAGENET1K_V1 (shorter side {resize_size}, bilinear); "
            "IMAGENET1K_SWAG_LINEAR_V1, whose shapes are the same, has crop_pct=1.0 and bicubic"
        )
    else:
        notes.append(f"preprocessing is that of IMAGENET1K_SWAG_E2E_V1 (shorter side {size}, bicubic)")
    return ViTScratchImageProcessor.from_config(config, **fields)

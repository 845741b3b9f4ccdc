"""Fields and tensor names of transformers' ViT, DeiT, DINOv2, DINOv3, SigLIP and ViTMAE in terms of ours.

Tensor names are those of the loaded models; transformers itself renames what older files hold.
D hidden_size, N patches.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .errors_vit_scratch import InputError

__all__ = [
    "backbone_fields",
    "decoder_fields",
    "decoder_tensors",
    "encoder_fields",
    "encoder_tensors",
    "height_width",
    "label_fields",
    "without_distillation",
]

_NORMS_OF_DINO = ((r"\.norm1\.", ".layernorm_before."), (r"\.norm2\.", ".layernorm_after."))
_DINOV2 = (
    (r"^encoder\.layer\.", "layers."),
    *_NORMS_OF_DINO,
    # So transformers has them in memory before 5.24.
    (r"\.attention\.attention\.query\.", ".attention.q_proj."),
    (r"\.attention\.attention\.key\.", ".attention.k_proj."),
    (r"\.attention\.attention\.value\.", ".attention.v_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.mlp\.weights_out\.", ".mlp.down_proj."),
)

# transformers' ViT, DeiT and ViTMAE name their tensors as we do.
_RENAMINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "vit": (),
    "deit": (),
    "vit_mae": (),
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "dinov3_vit": (
        (r"^model\.layer\.", "layers."),
        *_NORMS_OF_DINO,
        (r"^norm\.", "layernorm."),
        (r"^embeddings\.patch_embeddings\.", "embeddings.patch_embeddings.projection."),
    ),
    "siglip_vision_model": (
        (r"^embeddings\.patch_embedding\.", "embeddings.patch_embeddings.projection."),
        (r"^embeddings\.position_embedding\.weight$", "embeddings.position_embeddings"),
        (r"^encoder\.layers\.", "layers."),
        (r"\.layer_norm1\.", ".layernorm_before."),
        (r"\.layer_norm2\.", ".layernorm_after."),
        (r"\.self_attn\.", ".attention."),
        (r"\.out_proj\.", ".o_proj."),
        (r"^post_layernorm\.", "layernorm."),
        (r"^head\.", "attention_pooling."),
    ),
}
_MLP_OF_DINOV3 = ((r"\.mlp\.up_proj\.", ".mlp.fc1."), (r"\.mlp\.down_proj\.", ".mlp.fc2."))
_DECODER = (
    (r"^decoder_embed\.", "embed."),
    (r"^decoder_pos_embed$", "position_embeddings"),
    (r"^decoder_layers\.", "layers."),
    (r"^decoder_norm\.", "layernorm."),
    (r"^decoder_pred\.", "prediction."),
)


def encoder_fields(config: PreTrainedConfig, source: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of `ViTScratchConfig` for the encoder of `config`, and notes on what they do not hold."""
    fields = {
        "patch_size": _size(config.patch_size),
        "num_channels": config.num_channels,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "layer_norm_eps": config.layer_norm_eps,
        "position_interpolation": "bicubic",
    }
    fields["image_size"], notes = _whole_patches(config)
    if getattr(config, "head_dim", None) not in (None, config.hidden_size // config.num_attention_heads):
        raise InputError(
            f"{source}: head_dim={config.head_dim} is not hidden_size / num_attention_heads = "
            f"{config.hidden_size} / {config.num_attention_heads}; such an attention is not converted"
        )
    if config.model_type.startswith("dino"):
        more, more_notes = _fields_of_dino(config, source)
    elif config.model_type == "siglip_vision_model":
        more = {
            "intermediate_size": config.intermediate_size,
            "attention_probs_dropout_prob": config.attention_dropout,
            # Before 5.24 the field is there only where it was set.
            "pooling": "attention" if getattr(config, "vision_use_head", True) else "mean",
        }
        more_notes = []
    else:
        more, more_notes = _fields_of_vit(config)
    return fields | more, notes + more_notes


def _fields_of_vit(config: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    fields = {
        "intermediate_size": config.intermediate_size,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "attention_probs_dropout_prob": config.attention_probs_dropout_prob,
    }
    if config.hidden_dropout_prob:
        return fields, [
            f"hidden_dropout_prob={config.hidden_dropout_prob} acts after the MLP's activation too, in training: "
            "transformers has no dropout there"
        ]
    return fields, []


def _fields_of_dino(config: PreTrainedConfig, source: str) -> tuple[dict[str, Any], list[str]]:
    fields = {"layer_scale_init": config.layerscale_value, "drop_path_rate": config.drop_path_rate}
    notes = []
    if config.drop_path_rate:
        notes.append(
            f"drop_path_rate={config.drop_path_rate} grows linearly from 0 over the layers, in training; that of "
            "transformers is the same in every layer"
        )
    if config.model_type != "dinov2":
        fields["num_register_tokens"] = config.num_register_tokens
    if config.model_type == "dinov3_vit":
        more, more_notes = _fields_of_dinov3(config, source)
    else:
        more, more_notes = _fields_of_dinov2(config, source)
    return fields | more, notes + more_notes


def _fields_of_dinov2(config: PreTrainedConfig, source: str) -> tuple[dict[str, Any], list[str]]:
    height, width = height_width(config.image_size)
    patch_height, patch_width = height_width(config.patch_size)
    if height // patch_height != width // patch_width:
        raise InputError(
            f"{source}: image_size={config.image_size} with patch_size={config.patch_size} is a grid that is not "
            f"square, and transformers' {config.model_type} cannot run it (it takes the square root of the number of "
            "positions), so that no conversion of it can be checked"
        )
    intermediate_size = int(config.hidden_size * config.mlp_ratio)
    fields: dict[str, Any] = {
        "qkv_bias": config.qkv_bias,
        "attention_probs_dropout_prob": config.attention_probs_dropout_prob,
        "intermediate_size": intermediate_size,
    }
    if config.use_swiglu_ffn:  # two thirds of the width, rounded up to a multiple of 8
        fields["intermediate_size"] = (int(intermediate_size * 2 / 3) + 7) // 8 * 8
        fields |= {"mlp_type": "swiglu", "hidden_act": "silu"}
    if config.model_type == "dinov2_with_registers":
        fields["position_interpolation"] = "bicubic_antialias"
    if config.hidden_dropout_prob:
        return fields, [
            f"hidden_dropout_prob={config.hidden_dropout_prob} is left out: it acts on the embeddings alone there, "
            "and would act in every layer here"
        ]
    return fields, []


def _fields_of_dinov3(config: PreTrainedConfig, source: str) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {
        "intermediate_size": config.intermediate_size,
        "qkv_bias": config.query_bias or config.key_bias or config.value_bias,
        "attention_probs_dropout_prob": config.attention_dropout,
        "position_embedding_type": "rope_2d",
        "rope_theta": config.rope_theta,
    }
    if config.use_gated_mlp:
        if config.hidden_act not in ("silu", "swish"):
            raise InputError(
                f"{source}: use_gated_mlp=True with hidden_act={config.hidden_act!r} has no counterpart; the gated "
                "MLP here is SwiGLU, whose hidden_act is 'silu'"
            )
        fields |= {"mlp_type": "swiglu", "hidden_act": "silu"}
    augmented = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
    values = [f"{name}={getattr(config, name)}" for name in augmented if getattr(config, name) is not None]
    if values:
        return fields, [f"{', '.join(values)}: coordinates are not augmented in training here"]
    return fields, []


def backbone_fields(config: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of `ViTScratchBackbone`, and notes on what differs."""
    notes = []
    if not config.reshape_hidden_states:
        notes.append("reshape_hidden_states=False: feature maps are maps here, never sequences")
    if not config.apply_layernorm and config.model_type == "dinov3_vit":
        notes.append("apply_layernorm=False: transformers' DINOv3 norms the last feature map nevertheless, we do not")
    return {"out_indices": list(config.out_indices), "apply_layernorm": config.apply_layernorm}, notes


def decoder_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of `ViTScratchForMaskedAutoencoding`."""
    names = (
        "mask_ratio",
        "norm_pix_loss",
        "decoder_hidden_size",
        "decoder_num_hidden_layers",
        "decoder_num_attention_heads",
        "decoder_intermediate_size",
    )
    return {name: getattr(config, name) for name in names}


def label_fields(config: PreTrainedConfig, source: str) -> tuple[dict[str, Any], list[str]]:
    """Returns `id2label` and `problem_type`; names that two classes share get their number, and a note says so."""
    labels = {int(index): name for index, name in (config.id2label or {}).items()}
    notes, problem_type = [], config.problem_type
    if not labels:
        raise InputError(f"{source}: num_labels=0, a classifier without classes; convert the encoder's checkpoint")
    if problem_type == "regression":
        raise InputError(
            f"{source}: problem_type='regression' has no counterpart; it must be single_label_classification or "
            "multi_label_classification"
        )
    if problem_type is None:
        problem_type = "single_label_classification" if len(labels) > 1 else "multi_label_classification"
        if len(labels) == 1:
            notes.append("one class: taken for a sigmoid, as in transformers' pipeline")
    names = list(labels.values())
    shared = {index: name for index, name in labels.items() if names.count(name) > 1}
    for index, name in shared.items():
        labels[index] = f"{name} ({index})"
    if shared:
        notes.append(
            f"class names that stand more than once got their number: {', '.join(sorted(set(shared.values())))}"
        )
    return {"id2label": labels, "problem_type": problem_type}, notes


def encoder_tensors(config: PreTrainedConfig, state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a loaded encoder by our names, and notes on those left out or filled in."""
    renamings = _RENAMINGS[config.model_type]
    notes = []
    if config.model_type == "dinov3_vit" and not config.use_gated_mlp:
        renamings += _MLP_OF_DINOV3
    tensors = _renamed(state_dict, renamings)
    _split_fused(config, tensors)
    if tensors.pop("embeddings.mask_token", None) is not None:
        notes.append("the mask token of its pre-training is left out")
    if config.model_type == "siglip_vision_model":
        tensors["embeddings.position_embeddings"] = tensors["embeddings.position_embeddings"].unsqueeze(0)
    if (registers := tensors.get("embeddings.register_tokens")) is not None and registers.shape[1] == 0:
        del tensors["embeddings.register_tokens"]
    if config.model_type == "dinov3_vit":
        notes += _fill_biases(config, tensors)
    if config.model_type == "vit_mae":
        notes.append(
            "its fixed sine-cosine positions are taken as learned_1d: the stored numbers stay, but training moves them"
        )
    return tensors, notes


def without_distillation(tensors: Mapping[str, Tensor], *, as_register: bool) -> dict[str, Tensor]:
    """Returns the tensors of a DeiT without its distillation token, or with the token and its position as a register.

    A register has no position of its own: the sum of both is what the token enters the first layer with.
    """
    kept = dict(tensors)
    token, positions = kept.pop("embeddings.distillation_token"), kept["embeddings.position_embeddings"]
    kept["embeddings.position_embeddings"] = torch.cat((positions[:, :1], positions[:, 2:]), dim=1)
    if as_register:
        kept["embeddings.register_tokens"] = token + positions[:, 1:2]
    return kept


def decoder_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a ViTMAE decoder by our names."""
    return {f"decoder.{name}": tensor for name, tensor in _renamed(state_dict, _DECODER).items()}


def _renamed(state_dict: Mapping[str, Tensor], renamings: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in state_dict.items():
        for pattern, replacement in renamings:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    return tensors


def _split_fused(config: PreTrainedConfig, tensors: dict[str, Tensor]) -> None:
    """Puts the parts of what is one tensor there, and several here, in its place."""
    for kind in ("weight", "bias"):
        _split(tensors, "attention_pooling.attention.", f"in_proj_{kind}", [f"{name}_proj.{kind}" for name in "qkv"])
        for index in range(config.num_hidden_layers):  # DINOv2's SwiGLU before 5.24
            _split(tensors, f"layers.{index}.mlp.", f"weights_in.{kind}", [f"gate_proj.{kind}", f"up_proj.{kind}"])


def _split(tensors: dict[str, Tensor], prefix: str, fused: str, parts: list[str]) -> None:
    tensor = tensors.pop(prefix + fused, None)
    if tensor is not None:
        tensors |= {prefix + name: part for name, part in zip(parts, tensor.chunk(len(parts)), strict=True)}


def _fill_biases(config: PreTrainedConfig, tensors: dict[str, Tensor]) -> list[str]:
    """Puts zeros where DINOv3 has no bias and a layer of ours has one."""
    any_of_qkv = config.query_bias or config.key_bias or config.value_bias
    absent = {
        "query_bias": any_of_qkv and not config.query_bias,
        "key_bias": any_of_qkv and not config.key_bias,
        "value_bias": any_of_qkv and not config.value_bias,
        "proj_bias": not config.proj_bias,
        "mlp_bias": not config.mlp_bias,
    }
    for name, weight in list(tensors.items()):
        bias = name.removesuffix("weight") + "bias"
        of_qkv = re.search(r"\.attention\.[qkv]_proj\.weight$", name)
        has_bias_here = any_of_qkv if of_qkv else re.search(r"\.(o_proj|fc1|fc2|(gate|up|down)_proj)\.weight$", name)
        if has_bias_here and bias not in tensors:
            tensors[bias] = weight.new_zeros(len(weight))
    names = [f"{name}=False" for name, is_absent in absent.items() if is_absent]
    return [f"{', '.join(names)}: biases of zeros stand in, which training moves"] if names else []


def _whole_patches(config: PreTrainedConfig) -> tuple[int | list[int], list[str]]:
    patches = height_width(config.patch_size)
    sides = [pixels - pixels % patch for pixels, patch in zip(height_width(config.image_size), patches, strict=True)]
    if tuple(sides) == height_width(config.image_size):
        return _size(config.image_size), []
    size = sides[0] if sides[0] == sides[1] else sides
    return size, [f"image_size={config.image_size} is {size} here: whole patches of {config.patch_size}"]


def _size(size: int | list[int] | tuple[int, int]) -> int | list[int]:
    return size if isinstance(size, int) else list(size)


def height_width(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])

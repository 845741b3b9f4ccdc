"""timm's VisionTransformer (the vit, deit and dinov2 names) into ViTScratch and back.

The network's shape is read off timm's own module, never off a name: whatever timm can build, a config.json with any
model_args included, is either converted or refused by the part that has no place here. One table of names serves both
ways. D hidden_size.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_vit_scratch import ViTScratchConfig
from .conversion_vit_scratch import Conversion, built, proof_dtype
from .errors_vit_scratch import EnvironmentFault, InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

__all__ = ["from_timm", "read_timm_config", "to_timm"]

# timm's class and its name in model_args, and transformers'.
ACTIVATIONS = {
    "GELU": ("gelu", "gelu"),
    "GELUTanh": ("gelu_tanh", "gelu_pytorch_tanh"),
    "QuickGELU": ("quick_gelu", "quick_gelu"),
    "SiLU": ("silu", "silu"),
    "ReLU": ("relu", "relu"),
}
POOLINGS = {"token": "class_token", "avg": "mean", "map": "attention"}
FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # Pillow's numbers

# Heads of timm's registered networks by width, where all of a width agree but vit_base_patch16_gap_224 (768: 16) and
# the SigLIP giants (1536: 16, without SwiGLU, for which the heads must be given).
HEADS = {
    192: 3, 256: 4, 320: 5, 384: 6, 512: 8, 640: 10, 768: 12, 832: 13, 896: 14, 1024: 16, 1152: 16, 1280: 16,
    1408: 16, 1536: 24, 1664: 16,
}  # fmt: skip
SIZES = {
    192: "tiny", 384: "small", 512: "medium", 768: "base", 1024: "large", 1280: "huge", 1408: "giant",
    1664: "gigantic",
}  # fmt: skip

# What timm's eval transform does by default, and what the DeiT and DINOv2 releases say of their pixels.
UNKNOWN_PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "crop_pct": 0.9}
IMAGENET_PIXELS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_pct": 0.875}


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
    """Returns timm's network, or a DeiT, DINO or DINOv2 release in nearly its names, as a ViTScratch.

    Args:
        state_dict: the checkpoint's tensors.
        source: its name, for messages.
        architecture: timm's name, as in the repo's config.json; None: the shape is told by the tensors.
        pretrained_cfg: preprocessing and label_names of config.json.
        model_args: changes to the architecture's own arguments.
        num_attention_heads: for a state dict without architecture, whose tensors do not tell it.
        image_size: pixels, or [height, width]; for a state dict without architecture whose grid is no square.

    Raises:
        InputError: the network has a part that has no place here, or the tensors are not its.
        EnvironmentFault: timm is not installed; it builds the network and is the reference.
    """
    state, notes = dict(state_dict), list[str]()
    if architecture is None:
        pretrained_cfg = pretrained_cfg or _assumed_pixels(state, notes)
        _rename_release(state, notes)
        arguments = _inferred_arguments(state, num_attention_heads, image_size, source, notes)
        peer = _build(source, None, arguments)
    else:
        num_classes = len(state["head.weight"]) if "head.weight" in state else 0
        arguments = {**(model_args or {}), "num_classes": num_classes}
        peer = _build(source, architecture, arguments, pretrained_cfg)
    if problems := list(_obstacles(peer)):
        raise InputError(f"{source}: timm's {architecture or 'VisionTransformer'} has {'; '.join(problems)}")
    _load(peer, state, source)
    _fold_register_positions(peer, notes)
    fields = _fields(peer, notes)
    config = ViTScratchConfig(**fields, **_labels(peer, pretrained_cfg or {}, notes))
    model_class = ViTScratchForImageClassification if peer.num_classes else ViTScratchModel
    model = built(model_class, config, _to_ours(peer.state_dict(), config, bool(peer.num_classes)), source)
    return Conversion(
        source=source,
        model=model,
        image_processor=_image_processor(config, pretrained_cfg or {}, notes),
        reference=_reference(peer),
        reference_dtype=proof_dtype(model),
        notes=notes,
    )


def read_timm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns architecture, pretrained_cfg and model_args of a timm repo's config.json, as `from_timm` takes them."""
    pretrained_cfg = dict(config.get("pretrained_cfg") or config)  # older repos have one dictionary for everything
    labels = config.get("label_names", config.get("labels"))
    if labels is not None:
        pretrained_cfg["label_names"] = labels
    architecture = config.get("architecture", pretrained_cfg.get("architecture"))
    return {"architecture": architecture, "pretrained_cfg": pretrained_cfg, "model_args": config.get("model_args")}


# timm's module


def _timm(source: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise EnvironmentFault(f"{source}: timm builds its networks itself and is not installed; pip install timm") from error
    return timm


def _build(
    source: str, architecture: str | None, arguments: dict[str, Any], pretrained_cfg: dict[str, Any] | None = None
) -> Any:
    """Returns timm's module without storage, ready for images of any size."""
    timm = _timm(source)
    try:
        with torch.device("meta"):
            if architecture is None:
                return _class_for(arguments)(**arguments, dynamic_img_size=True)
            if not timm.is_model(architecture.partition(".")[0]):
                raise InputError(f"{source}: architecture={architecture!r} is none of timm {timm.__version__}; upgrade it")
            from timm.models import PretrainedCfg

            known = PretrainedCfg.__dataclass_fields__
            cfg = {name: value for name, value in (pretrained_cfg or {}).items() if name in known}
            return timm.create_model(
                architecture, pretrained_cfg=cfg or None, **{**arguments, "dynamic_img_size": True}
            )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{source}: timm {timm.__version__} does not build a VisionTransformer of architecture={architecture!r} "
            f"and {arguments}: {_line(error)}"
        ) from error


def _class_for(arguments: dict[str, Any]) -> Any:
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformerDistilled if arguments.pop("distilled", False) else VisionTransformer


def _load(peer: Any, state: dict[str, Tensor], source: str) -> None:
    try:
        peer.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise InputError(f"{source} does not hold the tensors of its network: {_line(error)}") from error
    peer.eval().requires_grad_(False)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:397]}..."


def _reference(peer: Any) -> Callable[[Tensor], dict[str, Tensor]]:
    @torch.no_grad()
    def reference(pixel_values: Tensor) -> dict[str, Tensor]:
        model = copy.deepcopy(peer).to(pixel_values.device, pixel_values.dtype)
        features = model.forward_features(pixel_values)
        outputs = {"last_hidden_state": features}
        if model.num_classes:
            outputs["logits"] = model.forward_head(features)
        elif model.global_pool and getattr(model, "dist_token", None) is None:
            outputs["pooler_output"] = model.forward_head(features, pre_logits=True)
        return outputs

    return reference


# What has no place here


def _obstacles(peer: Any) -> Iterator[str]:
    from timm.models import deit
    from timm.models import vision_transformer as vit

    if type(peer) not in (vit.VisionTransformer, deit.VisionTransformerDistilled):
        yield f"the class {type(peer).__name__}; VisionTransformer and VisionTransformerDistilled are converted"
        return
    if hasattr(peer.patch_embed, "backbone"):
        yield (
            "a patch_embed.backbone: of timm's ResNet stems the standardised convolutions divide by sqrt(var + 1e-8) "
            "and the GroupNorms have eps 1e-5, where the official code has std + 1e-5 and 1e-6, and logits move by "
            "up to 0.4; convert the official .npz instead"
        )
        return
    if type(peer.patch_embed) is not vit.PatchEmbed or not isinstance(peer.patch_embed.norm, nn.Identity):
        yield f"embed_layer={type(peer.patch_embed).__name__} or a norm in it; only a plain PatchEmbed has a place"
    if not isinstance(peer.norm_pre, nn.Identity):
        yield "pre_norm=True (norm_pre, a norm before the first block), as CLIP has"
    yield from _obstacles_of_blocks(peer)
    yield from _obstacles_of_pooling(peer)
    norms = {name: module for name, module in peer.named_modules() if "norm" in name.rpartition(".")[2]}
    norms = {name: module for name, module in norms.items() if not isinstance(module, nn.Identity)}
    kinds = {type(module).__name__ for module in norms.values()}
    if kinds - {"LayerNorm"} or len({module.eps for module in norms.values()}) > 1:
        yield f"norm_layer of {', '.join(sorted(kinds))} or of several eps; LayerNorms of one eps have a place"


def _obstacles_of_blocks(peer: Any) -> Iterator[str]:
    from timm.layers import GluMlp
    from timm.models import vision_transformer as vit

    block = peer.blocks[0]
    if type(block) is not vit.Block:
        yield f"block_fn={type(block).__name__}; only Block has a place"
        return
    attention, mlp = block.attn, block.mlp
    is_swiglu = type(mlp) is GluMlp and not mlp.gate_last and isinstance(mlp.act, nn.SiLU)
    if type(attention) is not vit.Attention or getattr(attention, "gate", None) is not None:
        yield f"attn_layer={type(attention).__name__}, or a gate in it; only a plain Attention has a place"
    elif not isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity):
        yield "scale_attn_norm=True"
    if type(mlp) is not vit.Mlp and not is_swiglu:
        yield f"mlp_layer={type(mlp).__name__}; Mlp and SwiGLUPacked have a place"
    elif not isinstance(mlp.norm, nn.Identity):
        yield "scale_mlp_norm=True"
    elif _hidden_act(mlp.act) is None:
        yield f"act_layer={type(mlp.act).__name__}; {', '.join(ACTIVATIONS)} have a place"
    if mlp.fc2.bias is None:
        yield "proj_bias=False"
    if is_swiglu and peer.global_pool == "map":
        yield "global_pool='map' beside a SwiGLU, where only one of the MLPs is gated"


def _obstacles_of_pooling(peer: Any) -> Iterator[str]:
    prefix, norms = peer.num_prefix_tokens, [not isinstance(norm, nn.Identity) for norm in (peer.norm, peer.fc_norm)]
    if peer.global_pool not in POOLINGS and (peer.num_classes or peer.global_pool):
        yield f"global_pool={peer.global_pool!r}; {', '.join(POOLINGS)} have a place"
    if not any(norms):
        yield "final_norm=False"
    if norms[1] and peer.global_pool != "avg":
        yield f"fc_norm=True with global_pool={peer.global_pool!r}; it has a place with 'avg'"
    if prefix and peer.global_pool == "avg" and peer.pool_include_prefix:
        yield "pool_include_prefix=True; the mean here is that of the patch tokens"
    if prefix and peer.global_pool == "map" and not peer.pool_include_prefix:
        yield f"pool_include_prefix=False with {prefix} tokens before the patches; attention pooling here reads all"
    if getattr(peer, "dist_token", None) is not None and peer.num_reg_tokens:
        yield "reg_tokens beside a dist_token"


def _hidden_act(act: nn.Module) -> str | None:
    if getattr(act, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return ACTIVATIONS.get(type(act).__name__, (None, None))[1]


# From timm


def _fields(peer: Any, notes: list[str]) -> dict[str, Any]:
    """Returns the fields of our config that hold timm's module."""
    block, embed = peer.blocks[0], peer.patch_embed
    has_class_token, has_scale = peer.cls_token is not None, not isinstance(block.ls1, nn.Identity)
    is_swiglu = type(block.mlp).__name__ == "GluMlp"
    if not peer.global_pool:
        notes.append("global_pool='' leaves the pooling open: pooler_output is the class token, or else the mean")
    pooling = POOLINGS.get(peer.global_pool, "class_token" if has_class_token else "mean")
    dropouts = {peer.pos_drop.p, block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p}
    if len(dropouts) > 1 or peer.head_drop.p:
        notes.append("dropout: pos_drop_rate unlike proj_drop_rate, or a drop_rate before the head, is left out")
    return {
        "image_size": _side_or_sides(embed.img_size),
        "patch_size": _side_or_sides(embed.patch_size),
        "num_channels": embed.proj.in_channels,
        "hidden_size": embed.proj.out_channels,
        "num_hidden_layers": len(peer.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc2.in_features,
        "hidden_act": _hidden_act(block.mlp.act),
        "mlp_type": "swiglu" if is_swiglu else "mlp",
        "layer_norm_eps": block.norm1.eps,
        "hidden_dropout_prob": dropouts.pop() if len(dropouts) == 1 else 0.0,
        "attention_probs_dropout_prob": block.attn.attn_drop.p,
        "drop_path_rate": getattr(peer.blocks[-1].drop_path1, "drop_prob", 0.0),
        "patch_dropout_rate": getattr(peer.patch_drop, "prob", 0.0),
        "qkv_bias": block.attn.qkv.bias is not None,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "layer_scale_init": block.ls1.init_values if has_scale else None,
        "position_embedding_type": "none" if peer.pos_embed is None else "learned_1d",
        "class_token_position": peer.pos_embed is None or not (peer.no_embed_class and has_class_token),
        "position_interpolation": "bicubic_antialias",
        "use_class_token": has_class_token,
        "use_distillation_token": getattr(peer, "dist_token", None) is not None,
        "num_register_tokens": peer.num_reg_tokens,
        "pooling": pooling,
        "final_norm": "before_pooling" if isinstance(peer.fc_norm, nn.Identity) else "after_pooling",
    }


def _side_or_sides(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _labels(peer: Any, pretrained_cfg: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if not peer.num_classes:
        return {}
    names = pretrained_cfg.get("label_names") or []
    objective = {"problem_type": "multi_label_classification"} if peer.num_classes == 1 else {}
    if len(names) == peer.num_classes == len(set(names)):
        return {**objective, "id2label": {index: str(name) for index, name in enumerate(names)}}
    if names:
        notes.append(f"label_names: {len(names)} names, {len(set(names))} unlike, for {peer.num_classes} classes; left out")
    return {**objective, "num_labels": peer.num_classes}


def _fold_register_positions(peer: Any, notes: list[str]) -> None:
    """Moves the position rows of register tokens, which have none here, into the tokens: on both sides of the proof."""
    if peer.reg_token is None or peer.pos_embed is None or peer.no_embed_class:
        return
    first = peer.num_prefix_tokens - peer.num_reg_tokens
    rows = slice(first, peer.num_prefix_tokens)
    if not peer.pos_embed[:, rows].any():  # so that -0.0 stays what it is
        return
    peer.reg_token = nn.Parameter(peer.reg_token + peer.pos_embed[:, rows], requires_grad=False)
    peer.pos_embed = nn.Parameter(peer.pos_embed.clone(), requires_grad=False)
    peer.pos_embed[:, rows] = 0
    notes.append("the register tokens' position embeddings were added to the tokens, rounded to the stored dtype")


def _image_processor(
    config: PreTrainedConfig, pretrained_cfg: dict[str, Any], notes: list[str]
) -> ViTScratchImageProcessor:
    from timm.data import resolve_data_config

    height, width = config.image_height_width
    size = {"input_size": (config.num_channels, height, width)}
    pixels = resolve_data_config(pretrained_cfg={**size, **pretrained_cfg})
    mode, crop_pct = pixels["crop_mode"], pixels["crop_pct"]
    fields: dict[str, Any] = {
        "size": dict(zip(("height", "width"), pixels["input_size"][1:], strict=True)),
        "resample": FILTERS.get(pixels["interpolation"], FILTERS["bicubic"]),
        "image_mean": list(pixels["mean"]),
        "image_std": list(pixels["std"]),
        "resize_mode": {"squash": "squash", "border": "pad"}.get(mode, "shorter"),
    }
    if fields["resize_mode"] == "shorter":
        fields["crop_pct"] = crop_pct
    elif crop_pct != 1:
        notes.append(f"preprocessing: crop_mode={mode!r} is kept, its crop_pct={crop_pct} is not")
    if fields["resize_mode"] == "pad":
        fields["alpha_background"] = [round(255 * mean) for mean in fields["image_mean"]]
    if pixels["interpolation"] not in FILTERS:
        notes.append(f"preprocessing: interpolation={pixels['interpolation']!r} became bicubic")
    return ViTScratchImageProcessor.from_config(config, **fields)


# A state dict without architecture


def _assumed_pixels(state: Mapping[str, Tensor], notes: list[str]) -> dict[str, Any]:
    is_release = bool({"mask_token", "register_tokens", "dist_token"} & state.keys())
    notes.append(
        "a state dict holds no preprocessing: that of the DeiT and DINOv2 releases is assumed"
        if is_release
        else "a state dict holds no preprocessing: mean and std of 0.5 are assumed; DeiT and DINO have ImageNet's"
    )
    return IMAGENET_PIXELS if is_release else UNKNOWN_PIXELS

"""timm's VisionTransformer as a module: built by its name or from the shapes of its tensors, and what of it fits.

The shape of a network is read off timm's own module, never off a name: whatever timm builds, with any model_args, is
converted or refused by the part that has no place in a ViTScratch. D hidden_size, N patches.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .convert_messages_vit_scratch import one_line
from .errors_vit_scratch import EnvironmentFault, InputError

__all__ = [
    "HIDDEN_ACTS",
    "POOLINGS",
    "activation_of",
    "import_timm",
    "load_timm_network",
    "network_of_shapes",
    "obstacles",
    "registered_network",
    "rename_release",
]

# timm's class, and transformers' name.
HIDDEN_ACTS = {
    "GELU": "gelu",
    "GELUTanh": "gelu_pytorch_tanh",
    "QuickGELU": "quick_gelu",
    "SiLU": "silu",
    "ReLU": "relu",
}
POOLINGS = {"token": "class_token", "avg": "mean", "map": "attention"}

# Heads of timm's registered networks by width; those of a width agree, but for vit_base_patch16_gap_224 (768: 16), the
# SigLIP giants (1536: 16; DINOv2's have 24 and a SwiGLU) and AIMv2, which does not fit anyway.
HEADS = {
    192: 3, 256: 4, 320: 5, 384: 6, 512: 8, 640: 10, 768: 12, 832: 13, 896: 14, 1024: 16, 1152: 16, 1280: 16,
    1408: 16, 1536: 24, 1664: 16,
}  # fmt: skip
WIDTH_WITH_SEVERAL_HEADS = 1536

# Arguments of timm.create_model itself: with them a config.json could have other files fetched and unpickled.
NO_MODEL_ARGS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}

HYBRID = (
    "a patch_embed.backbone: the standardised convolutions of timm's ResNet stems divide by sqrt(var + 1e-8) and the "
    "GroupNorms have eps 1e-5, where the official code has std + 1e-5 and 1e-6, so outputs differ; convert the "
    "official .npz instead"
)


def import_timm(source: str) -> Any:
    """Returns the package.

    Raises:
        EnvironmentFault: it is not installed.
    """
    try:
        import timm
    except ImportError as error:
        raise EnvironmentFault(f"{source}: timm builds its networks itself; pip install timm") from error
    return timm


def registered_network(
    architecture: str,
    arguments: Mapping[str, Any],
    pretrained_cfg: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    source: str,
) -> Any:
    """Returns timm's network of this name with the tensors' head, without storage and for images of any size."""
    timm = import_timm(source)
    if not timm.is_model(architecture.partition(".")[0]):
        raise InputError(
            f"{source}: architecture={architecture!r:.100} is none that timm {timm.__version__} has; upgrade it"
        )
    known = timm.models.PretrainedCfg.__dataclass_fields__
    cfg = {name: value for name, value in pretrained_cfg.items() if name in known}
    if foreign := sorted(NO_MODEL_ARGS & arguments.keys()):
        raise InputError(f"{source}: model_args names {', '.join(foreign)}, no argument of a network; remove it")
    ours = {"num_classes": _num_classes(state, source), "dynamic_img_size": True}
    try:
        with torch.device("meta"):
            return timm.create_model(architecture, pretrained_cfg=cfg or None, **{**arguments, **ours})
    except Exception as error:  # arguments come out of a file: what timm raises depends on what is wrong with them
        raise InputError(
            f"{source}: timm {timm.__version__} does not build {architecture} as a VisionTransformer with "
            f"model_args={arguments!s:.200}: {one_line(error)}"
        ) from error


def network_of_shapes(
    state: Mapping[str, Tensor],
    *,
    source: str,
    num_attention_heads: int | None,
    image_size: int | list[int] | None,
    notes: list[str],
) -> Any:
    """Returns the network whose tensors these are by their names and shapes, without storage."""
    import_timm(source)
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    arguments = _inferred_arguments(state, num_attention_heads, source, notes)
    arguments |= _inferred_grid(state, arguments, image_size, source)
    network = VisionTransformerDistilled if "dist_token" in state else VisionTransformer
    try:
        with torch.device("meta"):
            return network(**arguments, dynamic_img_size=True)
    except AssertionError as error:  # tokens, pooling and heads that do not go together
        raise InputError(f"{source}: no VisionTransformer of timm has these tensors: {one_line(error)}") from error


def load_timm_network(network: Any, state: Mapping[str, Tensor], source: str) -> None:
    """Puts exactly these tensors, not copies, into a network; in evaluation mode, without gradients."""
    try:
        network.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise InputError(f"{source} does not hold the tensors of its network: {one_line(error)}") from error
    network.eval().requires_grad_(False)


def rename_release(state: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Returns the tensors of a DINOv2 release under timm's names; those of other networks as they are."""
    renamed = {}
    for name, tensor in state.items():
        if name == "mask_token":
            notes.append("mask_token, for pre-training only, is left out")
            continue
        name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
        renamed["reg_token" if name == "register_tokens" else name] = tensor
    if "register_tokens" in state and "pos_embed" in state:  # inserted behind the positions, so they have none
        positions, registers = renamed["pos_embed"], renamed["reg_token"]
        renamed["pos_embed"] = torch.cat((positions[:, :1], torch.zeros_like(registers), positions[:, 1:]), dim=1)
    return renamed


def _num_classes(state: Mapping[str, Tensor], source: str) -> int:
    """Returns the width of the head, 0 without one."""
    return _shape(state, "head.weight", 2, source)[0] if "head.weight" in state else 0


def activation_of(act: nn.Module) -> str | None:
    """Returns transformers' name of an activation of timm's, or None."""
    if getattr(act, "approximate", "none") == "tanh":
        return "gelu_pytorch_tanh"
    return HIDDEN_ACTS.get(type(act).__name__)


def _inferred_arguments(
    state: Mapping[str, Tensor], num_attention_heads: int | None, source: str, notes: list[str]
) -> dict[str, Any]:
    from timm.models.vision_transformer import Mlp, SwiGLUPacked

    if any(name.startswith("patch_embed.backbone.") for name in state):
        raise InputError(f"{source}: the network has {HYBRID}")
    kernel = _shape(state, "patch_embed.proj.weight", 4, source)
    packed, width = (_shape(state, f"blocks.0.mlp.{name}.weight", 2, source) for name in ("fc1", "fc2"))
    is_swiglu = packed[0] == 2 * width[1]
    known = "erf GELU and " * (not is_swiglu)
    notes.append(f"a state dict tells neither activation nor eps: timm's own are assumed, {known}1e-6")
    return {
        "patch_size": kernel[2:],
        "in_chans": kernel[1],
        "embed_dim": kernel[0],
        "depth": len({name.split(".")[1] for name in state if re.match(r"blocks\.\d+\.", name)}),
        "num_heads": _num_heads(state, num_attention_heads, is_swiglu, source, notes),
        "mlp_ratio": (packed[0] + 0.5) / kernel[0],  # timm takes the integer part of the product
        "num_classes": _num_classes(state, source),
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "class_token": "cls_token" in state,
        "reg_tokens": _shape(state, "reg_token", 3, source)[1] if "reg_token" in state else 0,
        "pos_embed": "learn" if "pos_embed" in state else "none",
        "pre_norm": "norm_pre.weight" in state,
        "global_pool": _global_pool(state),
        "fc_norm": "fc_norm.weight" in state,
        "mlp_layer": SwiGLUPacked if is_swiglu else Mlp,
        "act_layer": nn.SiLU if is_swiglu else nn.GELU,
    }


def _shape(state: Mapping[str, Tensor], name: str, num_axes: int, source: str) -> tuple[int, ...]:
    if name not in state or state[name].ndim != num_axes:
        found = f"has shape {tuple(state[name].shape)}" if name in state else "is missing"
        raise InputError(f"{source}: {name} {found}, so this is no ViT, DeiT or DINOv2 in timm's names")
    return tuple(state[name].shape)


def _num_heads(state: Mapping[str, Tensor], given: int | None, is_swiglu: bool, source: str, notes: list[str]) -> int:
    width = state["patch_embed.proj.weight"].shape[0]
    if given is not None:
        if given < 1 or width % given:
            raise InputError(f"{source}: num_attention_heads={given} does not divide the width of {width}")
        return given
    if "blocks.0.attn.q_norm.weight" in state:
        return width // len(state["blocks.0.attn.q_norm.weight"])
    if width not in HEADS or (width == WIDTH_WITH_SEVERAL_HEADS and not is_swiglu):
        raise InputError(f"{source}: no tensor tells the heads of a width of {width}; give num_attention_heads=...")
    notes.append(f"{HEADS[width]} heads, as timm's networks of width {width}; else give num_attention_heads=...")
    return HEADS[width]


def _global_pool(state: Mapping[str, Tensor]) -> str:
    if "attn_pool.latent" in state:
        return "map"
    return "avg" if "fc_norm.weight" in state or "cls_token" not in state else "token"


def _inferred_grid(
    state: Mapping[str, Tensor], arguments: dict[str, Any], image_size: int | list[int] | None, source: str
) -> dict[str, Any]:
    """Returns img_size and no_embed_class: the table has a row for each patch, and for each token before them or none.

    Without `image_size` the patches stand in a square.
    """
    patch_height, patch_width = arguments["patch_size"]
    num_rows = _shape(state, "pos_embed", 3, source)[1] if "pos_embed" in state else 0
    num_prefix = arguments["class_token"] + ("dist_token" in state) + arguments["reg_tokens"]
    numbers = {num_rows - num_prefix: False, num_rows: num_prefix > 0}  # of patches: no_embed_class
    if image_size is not None:
        height, width = [image_size] * 2 if isinstance(image_size, int) else image_size
        num_patches = (height // patch_height) * (width // patch_width)
        if num_rows and num_patches not in numbers:
            raise InputError(f"{source}: pos_embed has {num_rows} rows, image_size={image_size} {num_patches} patches")
        return {"img_size": (height, width), "no_embed_class": numbers.get(num_patches, False)}
    squares = {number: free for number, free in numbers.items() if number > 0 and math.isqrt(number) ** 2 == number}
    if len(squares) != 1:
        raise InputError(
            f"{source}: a pos_embed of {num_rows} rows does not tell the grid; give image_size=[height, width]"
        )
    [(number, no_embed_class)] = squares.items()
    side = math.isqrt(number)
    return {"img_size": (side * patch_height, side * patch_width), "no_embed_class": no_embed_class}


def obstacles(network: Any) -> Iterator[str]:
    """Yields each part of a network of timm's that has no place in a ViTScratch, by timm's argument for it."""
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import PatchEmbed, VisionTransformer

    if type(network) not in (VisionTransformer, VisionTransformerDistilled):
        yield f"the class {type(network).__name__}, not VisionTransformer or VisionTransformerDistilled"
        return
    if hasattr(network.patch_embed, "backbone"):
        yield HYBRID
        return
    if not len(network.blocks):
        yield "depth=0, so no block"
        return
    embed = network.patch_embed
    if type(embed) is not PatchEmbed or not isinstance(embed.norm, nn.Identity) or embed.dynamic_img_pad:
        yield f"embed_layer={type(embed).__name__}, a norm in it or dynamic_img_pad; a plain PatchEmbed fits"
    if not isinstance(network.norm_pre, nn.Identity):
        yield "pre_norm=True (norm_pre stands before the first block), as CLIP has"
    yield from _obstacles_in_norms(network)
    yield from _obstacles_in_blocks(network)
    yield from _obstacles_in_pooling(network)


def _obstacles_in_norms(network: Any) -> Iterator[str]:
    named = {name: module for name, module in network.named_modules() if "norm" in name.rpartition(".")[2]}
    norms = [module for module in named.values() if not isinstance(module, nn.Identity)]
    kinds = sorted({type(module).__name__ for module in norms})
    if kinds != ["LayerNorm"]:
        yield f"norm_layer={' and '.join(kinds)}; LayerNorm fits"
    elif len({module.eps for module in norms}) > 1:
        yield f"LayerNorms of eps {sorted({module.eps for module in norms})}; one for all fits"


def _obstacles_in_blocks(network: Any) -> Iterator[str]:
    from timm.layers import GluMlp
    from timm.models.vision_transformer import Attention, Block, Mlp

    block: Any = network.blocks[0]
    if type(block) is not Block:
        yield f"block_fn={type(block).__name__}; Block fits"
        return
    attention: Any = block.attn
    mlp: Any = block.mlp
    if type(attention) is not Attention or getattr(attention, "gate", None) is not None:
        yield f"attn_layer={type(attention).__name__} or a gate in it; Attention fits"
    elif not isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity):
        yield "scale_attn_norm=True"
    is_swiglu = type(mlp) is GluMlp and not mlp.gate_last and isinstance(mlp.act, nn.SiLU)
    if type(mlp) is not Mlp and not is_swiglu:
        yield f"mlp_layer={type(mlp).__name__}; Mlp and SwiGLUPacked fit"
        return
    if not isinstance(mlp.norm, nn.Identity):
        yield "scale_mlp_norm=True"
    if activation_of(mlp.act) is None:
        yield f"act_layer={type(mlp.act).__name__}; {', '.join(HIDDEN_ACTS)} fit"
    if mlp.fc2.bias is None:
        yield "proj_bias=False"
    if is_swiglu and network.global_pool == "map":
        yield "global_pool='map' beside SwiGLUPacked, where the pooling's own MLP is not gated"


def _obstacles_in_pooling(network: Any) -> Iterator[str]:
    pool, prefix, includes = network.global_pool, network.num_prefix_tokens, network.pool_include_prefix
    norm, fc_norm = (not isinstance(module, nn.Identity) for module in (network.norm, network.fc_norm))
    if pool not in POOLINGS and (network.num_classes or pool):
        yield f"global_pool={pool!r}; {', '.join(POOLINGS)} fit"
    if not norm and not fc_norm:
        yield "final_norm=False"
    if fc_norm and pool != "avg":
        yield f"fc_norm=True with global_pool={pool!r}; it fits with 'avg'"
    if prefix and pool in ("avg", "map") and includes:
        yield f"pool_include_prefix=True with global_pool={pool!r}; a head that reads the patch tokens alone fits"
    if getattr(network, "dist_token", None) is not None and (network.num_reg_tokens or network.no_embed_class):
        yield "reg_tokens or no_embed_class beside a dist_token, with which timm's own forward fails"

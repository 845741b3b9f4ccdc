"""The tensors of timm's VisionTransformer and ours: one table of names for both ways.

D hidden_size, N patches.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

__all__ = ["fold_register_positions", "tensors_of_timm", "tensors_of_vit_scratch"]

KINDS = ("weight", "bias")


def _tensor_names(config: PreTrainedConfig, has_head: bool) -> dict[str, tuple[str, ...]]:
    """Returns timm's name of every tensor: ours, several where timm keeps them as one along axis 0."""
    encoder = "vit." if has_head else ""
    modules: dict[str, tuple[str, ...]] = {
        "patch_embed.proj": ("embeddings.patch_embeddings.projection",),
        "norm" if config.final_norm == "before_pooling" else "fc_norm": ("layernorm",),
    }
    for index in range(config.num_hidden_layers):
        modules |= _modules_of_layer(config, f"blocks.{index}", f"layers.{index}")
    if config.pooling == "attention":
        theirs, ours = "attn_pool", "attention_pooling"
        modules |= {
            f"{theirs}.q": (f"{ours}.attention.q_proj",),
            f"{theirs}.kv": (f"{ours}.attention.k_proj", f"{ours}.attention.v_proj"),
            f"{theirs}.proj": (f"{ours}.attention.o_proj",),
            f"{theirs}.norm": (f"{ours}.layernorm",),
            f"{theirs}.mlp.fc1": (f"{ours}.mlp.fc1",),
            f"{theirs}.mlp.fc2": (f"{ours}.mlp.fc2",),
        }
    tensors = {
        f"{theirs}.{kind}": tuple(f"{encoder}{name}.{kind}" for name in ours)
        for theirs, ours in modules.items()
        for kind in KINDS
        if config.qkv_bias or not theirs.endswith(".attn.qkv") or kind == "weight"
    }
    for theirs, ours, is_there in _single_tensors(config):
        if is_there:
            tensors[theirs] = (f"{encoder}{ours}",)
    heads = {"head": "classifier"} if has_head else {}
    if has_head and config.use_distillation_token:
        heads["head_dist"] = "distillation_classifier"
    return tensors | {f"{theirs}.{kind}": (f"{ours}.{kind}",) for theirs, ours in heads.items() for kind in KINDS}


def _modules_of_layer(config: PreTrainedConfig, theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    modules = {
        f"{theirs}.norm1": (f"{ours}.layernorm_before",),
        f"{theirs}.norm2": (f"{ours}.layernorm_after",),
        f"{theirs}.attn.qkv": tuple(f"{ours}.attention.{part}_proj" for part in "qkv"),
        f"{theirs}.attn.proj": (f"{ours}.attention.o_proj",),
        f"{theirs}.mlp.fc1": (f"{ours}.mlp.fc1",),
        f"{theirs}.mlp.fc2": (f"{ours}.mlp.fc2",),
    }
    if config.mlp_type == "swiglu":  # SwiGLUPacked: silu(first half) * second half
        modules[f"{theirs}.mlp.fc1"] = (f"{ours}.mlp.gate_proj", f"{ours}.mlp.up_proj")
        modules[f"{theirs}.mlp.fc2"] = (f"{ours}.mlp.down_proj",)
    if config.qk_norm:
        modules |= {f"{theirs}.attn.{part}_norm": (f"{ours}.attention.{part}_norm",) for part in "qk"}
    return modules


def _single_tensors(config: PreTrainedConfig) -> list[tuple[str, str, bool]]:
    """Returns timm's name, ours, and whether there is such a tensor."""
    has_scales = config.layer_scale_init is not None
    scales = [
        (f"blocks.{index}.ls{part}.gamma", f"layers.{index}.layer_scale{part}.lambda1", has_scales)
        for index in range(config.num_hidden_layers)
        for part in (1, 2)
    ]
    return [
        ("cls_token", "embeddings.cls_token", bool(config.use_class_token)),
        ("dist_token", "embeddings.distillation_token", config.use_distillation_token),
        ("reg_token", "embeddings.register_tokens", config.num_register_tokens > 0),
        ("pos_embed", "embeddings.position_embeddings", config.position_embedding_type == "learned_1d"),
        ("attn_pool.latent", "attention_pooling.probe", config.pooling == "attention"),
        *scales,
    ]


def tensors_of_vit_scratch(state: Mapping[str, Tensor], config: PreTrainedConfig, has_head: bool) -> dict[str, Tensor]:
    """Returns the tensors of a network of timm's, its register positions folded, under our names; views of them."""
    tensors: dict[str, Tensor] = {}
    for theirs, ours in _tensor_names(config, has_head).items():
        tensor = state[theirs]
        if theirs == "pos_embed":  # its rows for registers are zero by now
            first = config.num_prefix_positions
            num_others = tensor.shape[1] - config.num_patches - first
            tensor = torch.cat((tensor[:, :first], tensor[:, first + num_others :]), dim=1)
        tensors |= dict(zip(ours, tensor.chunk(len(ours)), strict=True))
    return tensors


def tensors_of_timm(state: Mapping[str, Tensor], config: PreTrainedConfig, has_head: bool) -> dict[str, Tensor]:
    """Returns copies of our tensors under timm's names."""
    tensors: dict[str, Tensor] = {}
    for theirs, ours in _tensor_names(config, has_head).items():
        tensor = torch.cat([state[name].detach() for name in ours])
        if theirs == "pos_embed" and config.num_prefix_positions:  # then timm has rows for registers too
            first = config.num_prefix_positions
            rows = tensor.new_zeros(1, config.num_register_tokens, config.hidden_size)
            tensor = torch.cat((tensor[:, :first], rows, tensor[:, first:]), dim=1)
        tensors[theirs] = tensor
    return tensors


def fold_register_positions(network: Any, notes: list[str]) -> None:
    """Adds to the register tokens their rows of timm's table, which then are zero: here they have no positions."""
    if network.reg_token is None or network.pos_embed is None or network.no_embed_class:
        return
    rows = slice(network.num_prefix_tokens - network.num_reg_tokens, network.num_prefix_tokens)
    if not network.pos_embed[:, rows].any():
        return  # nor must -0.0 + 0.0 lose its sign
    table = network.pos_embed.clone()
    table[:, rows] = 0
    network.reg_token = nn.Parameter(network.reg_token + network.pos_embed[:, rows], requires_grad=False)
    network.pos_embed = nn.Parameter(table, requires_grad=False)
    notes.append(
        "positions of the register tokens were added to the tokens, in the dtype they are stored in; the original is "
        "compared with the same rounding"
    )

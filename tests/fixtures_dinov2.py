"""transformers' Dinov2, with and without registers: its tensors under our names."""

from typing import Any

from fixtures_modeling import TINY
from torch import Tensor

# The tiny shape in Dinov2's fields, which have the MLP's width as a ratio.
TINY_DINOV2: dict[str, Any] = {name: value for name, value in TINY.items() if name != "intermediate_size"}
TINY_DINOV2["mlp_ratio"] = 2

NAMES = {
    "dinov2.": "vit.",
    "dinov2_with_registers.": "vit.",
    "encoder.layer.": "layers.",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    # In transformers 5.17.
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "weights_out": "down_proj",
}


def dinov2_to_ours(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a model without its mask token, which is for training."""
    ours = {}
    for name, tensor in state.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "weights_in" in name:  # gate and value in one matrix, of those versions too
            ours[name.replace("weights_in", "gate_proj")], ours[name.replace("weights_in", "up_proj")] = tensor.chunk(
                2
            )
        elif not name.endswith("mask_token"):
            ours[name] = tensor
    return ours

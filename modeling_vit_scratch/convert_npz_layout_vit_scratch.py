"""Which array of Google's npz files holds which of our tensors, and the names that their code has given the arrays.

One table, `slots`, serves reading and writing. Its names are those of the released files of the paper and of AugReg:
`MultiHeadDotProductAttention_1`, `LayerNorm_0` and `_2`, `MlpBlock_3`. Today's code and big_vision name otherwise;
`released_name` and `big_vision_name` lead from one to the other.

D hidden_size, A heads, d head_dim.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from .convert_files_vit_scratch import as_array

__all__ = [
    "BLOCK",
    "MAP_HEAD",
    "POSITIONS",
    "STACKED",
    "STEM_WIDTH",
    "Slot",
    "big_vision_name",
    "released_name",
    "slots",
]

BLOCK = "Transformer/encoderblock_"
STACKED = "Transformer/encoderblock/"  # big_vision, where it scans over the layers
MAP_HEAD = "MAPHead_0/"
STEM_WIDTH = 64  # channels of the root of a ResNet of width factor 1
POSITIONS = "Transformer/posembed_input/pos_embedding"
_BIG_VISION_POSITIONS = "pos_embedding"
_POSITIONS_OF_2022 = "Transformer/pos_embedding"  # big_vision, for a while

# Linen counts the submodules of each class; the code of the released files counted all of them together.
_RELEASED = {
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
}
_LINEN = {released: linen for linen, released in _RELEASED.items()}


@dataclass(frozen=True)
class Slot:
    """The place of one of our tensors in an npz file."""

    ours: str
    shape: tuple[int, ...]
    """In the file."""
    layout: Literal["same", "dense", "conv"] = "same"
    """dense: (inputs, outputs), with heads as an axis of their own, ours (outputs, inputs); conv: HWIO, ours OIHW."""
    num_inputs: int = 1

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        if self.layout == "conv":
            return array.transpose(3, 2, 0, 1)
        if self.layout == "dense":
            return array.reshape(self.num_inputs, -1).T
        return array.reshape(-1) if self.ours.endswith("bias") else array

    def from_ours(self, tensor: Tensor) -> np.ndarray:
        if self.layout == "conv":
            tensor = tensor.permute(2, 3, 1, 0)
        elif self.layout == "dense":
            tensor = tensor.T
        return as_array(tensor).reshape(self.shape)


Slots = dict[str, Slot]


def released_name(name: str) -> str:
    """The name in the released files of an array that today's code or big_vision named."""
    if name in (_BIG_VISION_POSITIONS, _POSITIONS_OF_2022):
        return POSITIONS
    return _renamed(name, _RELEASED) if name.startswith((BLOCK, STACKED)) else name


def big_vision_name(name: str) -> str:
    """The name in big_vision's files of an array that has its released name."""
    if name == POSITIONS:
        return _BIG_VISION_POSITIONS
    return _renamed(name, _LINEN) if name.startswith(BLOCK) else name


def _renamed(name: str, parts: dict[str, str]) -> str:
    return "/".join(parts.get(part, part) for part in name.split("/"))


def slots(config: PreTrainedConfig, *, with_head: bool) -> Slots:
    """Returns the place of every tensor of our encoder, or with a head of our classifier, by its released name."""
    found = _stem_slots(config)
    if config.use_class_token:
        found["cls"] = Slot("embeddings.cls_token", (1, 1, config.hidden_size))
    if config.position_embedding_type == "learned_1d":
        num_positions = config.num_prefix_positions + config.num_patches
        found[POSITIONS] = Slot("embeddings.position_embeddings", (1, num_positions, config.hidden_size))
    for index in range(config.num_hidden_layers):
        found |= _layer_slots(f"{BLOCK}{index}", f"layers.{index}", config)
    found |= _norm("Transformer/encoder_norm", "layernorm", config.hidden_size)
    if config.pooling == "attention":
        found |= _map_head_slots(config)
    num_features = config.hidden_size
    if config.representation_size is not None:
        found |= _dense("pre_logits", "pooler.dense", (num_features,), (config.representation_size,))
        num_features = config.representation_size
    if not with_head:
        return found
    assert config.num_labels is not None
    of_encoder = {name: Slot(f"vit.{s.ours}", s.shape, s.layout, s.num_inputs) for name, s in found.items()}
    return of_encoder | _dense("head", "classifier", (num_features,), (config.num_labels,))


def _stem_slots(config: PreTrainedConfig) -> Slots:
    ours, channels = "embeddings.patch_embeddings", config.num_channels
    found: Slots = {}
    if config.stem_depths is not None:
        width = STEM_WIDTH * config.stem_width_factor
        found |= _conv("conv_root", f"{ours}.stem.root.conv", (7, 7, channels, width))
        found |= _norm("gn_root", f"{ours}.stem.root.norm", width)
        channels = width
        for stage, depth in enumerate(config.stem_depths):
            for unit in range(depth):
                name, ours_unit = f"block{stage + 1}/unit{unit + 1}", f"{ours}.stem.stages.{stage}.{unit}"
                found |= _unit_slots(name, ours_unit, channels, width * 2**stage, is_first=unit == 0)
                channels = 4 * width * 2**stage
    patch = [side // config.stem_stride for side in config.patch_height_width]
    found |= _conv("embedding", f"{ours}.projection", (*patch, channels, config.hidden_size))
    found["embedding/bias"] = Slot(f"{ours}.projection.bias", (config.hidden_size,))
    return found


def _unit_slots(name: str, ours: str, channels: int, middle: int, *, is_first: bool) -> Slots:
    found = (
        _conv(f"{name}/conv1", f"{ours}.conv1", (1, 1, channels, middle))
        | _conv(f"{name}/conv2", f"{ours}.conv2", (3, 3, middle, middle))
        | _conv(f"{name}/conv3", f"{ours}.conv3", (1, 1, middle, 4 * middle))
        | _norm(f"{name}/gn1", f"{ours}.norm1", middle)
        | _norm(f"{name}/gn2", f"{ours}.norm2", middle)
        | _norm(f"{name}/gn3", f"{ours}.norm3", 4 * middle)
    )
    if is_first:
        found |= _conv(f"{name}/conv_proj", f"{ours}.downsample_conv", (1, 1, channels, 4 * middle))
        found |= _norm(f"{name}/gn_proj", f"{ours}.downsample_norm", 4 * middle)
    return found


def _layer_slots(name: str, ours: str, config: PreTrainedConfig) -> Slots:
    return (
        _norm(f"{name}/LayerNorm_0", f"{ours}.layernorm_before", config.hidden_size)
        | _attention(f"{name}/MultiHeadDotProductAttention_1", f"{ours}.attention", config)
        | _norm(f"{name}/LayerNorm_2", f"{ours}.layernorm_after", config.hidden_size)
        | _mlp(f"{name}/MlpBlock_3", f"{ours}.mlp", config)
    )


def _map_head_slots(config: PreTrainedConfig) -> Slots:
    ours = "attention_pooling"
    probe = {f"{MAP_HEAD}probe": Slot(f"{ours}.probe", (1, 1, config.hidden_size))}
    return (
        probe
        | _attention(f"{MAP_HEAD}MultiHeadDotProductAttention_0", f"{ours}.attention", config)
        | _norm(f"{MAP_HEAD}LayerNorm_0", f"{ours}.layernorm", config.hidden_size)
        | _mlp(f"{MAP_HEAD}MlpBlock_0", f"{ours}.mlp", config)
    )


def _attention(name: str, ours: str, config: PreTrainedConfig) -> Slots:
    width, heads = (config.hidden_size,), (config.num_attention_heads, config.head_dim)
    return (
        _dense(f"{name}/query", f"{ours}.q_proj", width, heads)
        | _dense(f"{name}/key", f"{ours}.k_proj", width, heads)
        | _dense(f"{name}/value", f"{ours}.v_proj", width, heads)
        | _dense(f"{name}/out", f"{ours}.o_proj", heads, width)
    )


def _mlp(name: str, ours: str, config: PreTrainedConfig) -> Slots:
    width, hidden = (config.hidden_size,), (config.intermediate_size,)
    first = _dense(f"{name}/Dense_0", f"{ours}.fc1", width, hidden)
    return first | _dense(f"{name}/Dense_1", f"{ours}.fc2", hidden, width)


def _dense(name: str, ours: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Slots:
    num_inputs = int(np.prod(inputs))
    return {
        f"{name}/kernel": Slot(f"{ours}.weight", (*inputs, *outputs), "dense", num_inputs),
        f"{name}/bias": Slot(f"{ours}.bias", outputs),
    }


def _conv(name: str, ours: str, shape: tuple[int, ...]) -> Slots:
    return {f"{name}/kernel": Slot(f"{ours}.weight", shape, "conv")}


def _norm(name: str, ours: str, width: int) -> Slots:
    return {f"{name}/scale": Slot(f"{ours}.weight", (width,)), f"{name}/bias": Slot(f"{ours}.bias", (width,))}

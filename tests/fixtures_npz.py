"""Npz files as Google's code writes them: tiny networks whose parameters are given by a formula."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling_vit_scratch.convert_proof_vit_scratch import Conversion, prove

Arrays = dict[str, np.ndarray]

WIDTH, MLP, NUM_HEADS, NUM_LAYERS, NUM_LABELS = 32, 64, 4, 2, 7
STEM_WIDTH = 64
RELEASED = {
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
}
POSITIONS = "Transformer/posembed_input/pos_embedding"


def dense(name: str, *shape: int, num_outputs: int = 1) -> dict[str, tuple[int, ...]]:
    """Kernel and bias; the bias has the last `num_outputs` axes of the kernel."""
    return {f"{name}/kernel": shape, f"{name}/bias": shape[-num_outputs:]}


def norm(name: str, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def attention_and_mlp(name: str) -> dict[str, tuple[int, ...]]:
    head_dim = WIDTH // NUM_HEADS
    shapes = dense(f"{name}/MlpBlock_0/Dense_0", WIDTH, MLP) | dense(f"{name}/MlpBlock_0/Dense_1", MLP, WIDTH)
    for part in ("query", "key", "value"):
        shapes |= dense(f"{name}/MultiHeadDotProductAttention_0/{part}", WIDTH, NUM_HEADS, head_dim, num_outputs=2)
    return shapes | dense(f"{name}/MultiHeadDotProductAttention_0/out", NUM_HEADS, head_dim, WIDTH)


def unit(name: str, channels: int, middle: int, is_first: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}/conv1/kernel": (1, 1, channels, middle),
        f"{name}/conv2/kernel": (3, 3, middle, middle),
        f"{name}/conv3/kernel": (1, 1, middle, 4 * middle),
    }
    shapes |= norm(f"{name}/gn1", middle) | norm(f"{name}/gn2", middle) | norm(f"{name}/gn3", 4 * middle)
    if is_first:
        shapes |= norm(f"{name}/gn_proj", 4 * middle)
        shapes[f"{name}/conv_proj/kernel"] = (1, 1, channels, 4 * middle)
    return shapes


def linen_shapes(
    *,
    pooling: str = "class_token",
    representation_size: int | None = None,
    stem_depths: list[int] | None = None,
    patch: int = 8,
    num_positions: int = 17,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes as today's Flax Linen writes them; the patch kernel is of `patch` features a side."""
    channels, shapes = 3, norm("Transformer/encoder_norm")
    if stem_depths is not None:
        shapes |= norm("gn_root", STEM_WIDTH)
        shapes["conv_root/kernel"] = (7, 7, 3, STEM_WIDTH)
        channels = STEM_WIDTH
        for stage, depth in enumerate(stem_depths):
            middle = STEM_WIDTH * 2**stage
            for index in range(depth):
                shapes |= unit(f"block{stage + 1}/unit{index + 1}", channels, middle, index == 0)
                channels = 4 * middle
    shapes |= dense("embedding", patch, patch, channels, WIDTH)
    shapes[POSITIONS] = (1, num_positions, WIDTH)
    for index in range(NUM_LAYERS):
        block = f"Transformer/encoderblock_{index}"
        shapes |= norm(f"{block}/LayerNorm_0") | norm(f"{block}/LayerNorm_1") | attention_and_mlp(block)
    if pooling == "class_token":
        shapes["cls"] = (1, 1, WIDTH)
    elif pooling == "attention":
        shapes["MAPHead_0/probe"] = (1, 1, WIDTH)
        shapes |= norm("MAPHead_0/LayerNorm_0") | attention_and_mlp("MAPHead_0")
    if representation_size:
        shapes |= dense("pre_logits", WIDTH, representation_size)
    return shapes | dense("head", representation_size or WIDTH, NUM_LABELS)


def by_formula(shapes: Mapping[str, tuple[int, ...]], dtype: type = np.float32) -> Arrays:
    """Every array by the formula of the golden values: of the flat index i and the place j among the sorted names."""
    arrays = {}
    for j, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        i = np.arange(math.prod(shape), dtype=np.float64)
        if name.endswith("/scale"):
            values = 1 + 0.1 * np.sin(i + j)
        elif name.endswith("/kernel"):
            from_width = name.split("/")[-2] in ("query", "key", "value")
            values = np.sin(0.7 * i + j) / np.sqrt(shape[0] if from_width else math.prod(shape[:-1]))
        else:
            values = 0.1 * np.sin(i + j)
        arrays[name] = values.reshape(shape).astype(dtype)
    return arrays


def linen_arrays(**fields) -> Arrays:
    return by_formula(linen_shapes(**fields))


def released(arrays: Arrays) -> Arrays:
    """Under the names of the released files."""
    return {
        name if name.startswith("MAPHead") else "/".join(RELEASED.get(part, part) for part in name.split("/")): array
        for name, array in arrays.items()
    }


def below(root: str, arrays: Arrays) -> Arrays:
    return {f"{root}{name}": array for name, array in arrays.items()}


def big_vision(arrays: Arrays) -> Arrays:
    """With the positions at the top level, and for the patches alone."""
    arrays = dict(arrays)
    positions = arrays.pop(POSITIONS)
    return arrays | {"pos_embedding": positions[:, 1:] if "cls" in arrays else positions}


def scanned(arrays: Arrays) -> Arrays:
    """With the layers stacked along an axis in front."""
    first = "Transformer/encoderblock_0/"
    stacked = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in arrays:
        if name.startswith(first):
            rest = name.removeprefix(first)
            layers = [arrays[f"Transformer/encoderblock_{index}/{rest}"] for index in range(NUM_LAYERS)]
            stacked[f"Transformer/encoderblock/{rest}"] = np.stack(layers)
    return stacked


def write_npz(folder: Path, arrays: Arrays, name: str = "network.npz") -> Path:
    np.savez(folder / name, **arrays)  # type: ignore[arg-type]
    return folder / name


def golden_pixels() -> Tensor:
    """The two images of the golden values, (2, 3, 32, 32), in float64."""
    flat = np.sin(0.01 * np.arange(2 * 32 * 32 * 3))
    return torch.from_numpy(flat.reshape(2, 32, 32, 3).transpose(0, 3, 1, 2).copy())


def worst(conversion: Conversion) -> float:
    """The largest difference that the proof finds, in units of its tolerance: below 1 it passes."""
    return max(found.largest / (found.tolerance * found.scale) for found in prove(conversion))

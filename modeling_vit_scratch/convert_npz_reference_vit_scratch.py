"""The official network in NumPy, straight from the arrays of an npz file: what a conversion is compared with.

Written from the equations of the paper and the choices of the official code. It shares nothing with the torch model,
not even the reading of names: a mistake in one of the two shows as a difference.

B images, H x W pixels, C channels (last, as in Flax), h x w patches, T tokens, D width, A heads, d width of a head.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["reference_outputs"]

Array = np.ndarray
Tree = Mapping[str, Any]

LAYER_NORM_EPS = 1e-6  # Flax's default; the paper gives none
GROUP_NORM_EPS, NUM_GROUPS = 1e-6, 32
STANDARDISATION_EPS = 1e-5  # added to the deviation


def reference_outputs(arrays: Mapping[str, Array], pixels: Array, grid_size: tuple[int, int]) -> dict[str, Array]:
    """Returns last_hidden_state (B, T, D), pooler_output and, where the file has a head, logits, in the pixels' dtype.

    Args:
        arrays: as in the file, under any of the official naming schemes.
        pixels: (B, H, W, C), float64 or float32.
        grid_size: (rows, columns) of patches that the file's positions stand for.
    """
    network = _network(arrays, pixels.dtype)
    tokens = _encode(network, pixels, grid_size)
    pooled = _pool(network, tokens)
    if "pre_logits" in network:
        pooled = np.tanh(_dense(network["pre_logits"], pooled))
    outputs = {"last_hidden_state": tokens, "pooler_output": pooled}
    if "head" in network:
        outputs["logits"] = _dense(network["head"], pooled)
    return outputs


def _network(arrays: Mapping[str, Array], dtype: np.dtype) -> Tree:
    """The arrays as a tree, from where the patch embedding hangs; in `dtype`."""
    (root,) = (name.removesuffix("embedding/kernel") for name in arrays if re.search(r"(^|/)embedding/kernel$", name))
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.startswith(root):
            *path, leaf = name.removeprefix(root).split("/")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = _widened(array).astype(dtype)
    return tree


def _widened(array: Array) -> Array:
    """bfloat16, which NumPy has as two void bytes, as the float32 with these upper bytes."""
    if array.dtype != np.dtype("V2"):
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _encode(network: Tree, pixels: Array, grid_size: tuple[int, int]) -> Array:
    features = _resnet(network, pixels) if "conv_root" in network else pixels
    kernel = network["embedding"]["kernel"]
    patches = _conv(features, kernel, kernel.shape[:2]) + network["embedding"]["bias"]  # (B, h, w, D)
    tokens = _add_positions(network, patches, grid_size)
    transformer = network["Transformer"]
    for block in _blocks(transformer):
        (attention,), (mlp,) = _numbered(block, "MultiHeadDotProductAttention"), _numbered(block, "MlpBlock")
        first_norm, second_norm = _numbered(block, "LayerNorm")
        normed = _layer_norm(first_norm, tokens)
        tokens = tokens + _attention(attention, normed, normed)
        tokens = tokens + _mlp(mlp, _layer_norm(second_norm, tokens))
    return _layer_norm(transformer["encoder_norm"], tokens)


def _blocks(transformer: Tree) -> list[Tree]:
    if "encoderblock" not in transformer:
        return _numbered(transformer, "encoderblock")
    stacked = transformer["encoderblock"]  # every array with a leading axis over the layers
    depth = len(stacked["LayerNorm_0"]["scale"])
    return [_layer_of(stacked, index) for index in range(depth)]


def _layer_of(node: Any, index: int) -> Any:
    return {name: _layer_of(child, index) for name, child in node.items()} if isinstance(node, dict) else node[index]


def _numbered(node: Tree, kind: str) -> list[Tree]:
    """The children called `kind` and a number, in the order of the numbers, whichever they are."""
    numbers = {name: re.fullmatch(rf"{kind}_?(\d+)", name) for name in node}
    found = sorted((int(match[1]), name) for name, match in numbers.items() if match)
    return [node[name] for _, name in found]


def _add_positions(network: Tree, patches: Array, grid_size: tuple[int, int]) -> Array:
    """Class token and patches (B, T, D) with their positions."""
    rows, columns, width = patches.shape[1:]
    num_patches = grid_size[0] * grid_size[1]
    table = _position_table(network)
    if table is None:
        patches = patches + _sincos(rows, columns, width).astype(patches.dtype)
        class_position = np.zeros(width, patches.dtype)
    else:
        class_position = table[0] if len(table) > num_patches else np.zeros(width, patches.dtype)
        grid = table[len(table) - num_patches :].reshape(*grid_size, width)
        if grid_size != (rows, columns):
            across = np.tensordot(_corner_to_corner(grid_size[0], rows), grid, 1)  # (h, old w, D)
            grid = np.tensordot(_corner_to_corner(grid_size[1], columns), across, (1, 1)).swapaxes(0, 1)
        patches = patches + grid.astype(patches.dtype)
    tokens = patches.reshape(len(patches), -1, width)
    if "cls" not in network:
        return tokens
    class_token = np.broadcast_to(network["cls"] + class_position, (len(tokens), 1, width))
    return np.concatenate((class_token, tokens), axis=1)


def _position_table(network: Tree) -> Array | None:
    """(N or N + 1, D), from the three places where the official code has kept it; None: there is none."""
    for node in (network, network["Transformer"], network["Transformer"].get("posembed_input", {})):
        if "pos_embedding" in node:
            return node["pos_embedding"][0]
    return None


def _sincos(rows: int, columns: int, width: int) -> Array:
    """big_vision's fixed positions (h, w, D): sine and cosine of the column, then of the row."""
    frequencies = 10_000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    row, column = np.mgrid[:rows, :columns]
    of_row, of_column = row[..., None] * frequencies, column[..., None] * frequencies
    return np.concatenate((np.sin(of_column), np.cos(of_column), np.sin(of_row), np.cos(of_row)), axis=2)


def _corner_to_corner(old: int, new: int) -> Array:
    """Weights (new, old) of linear interpolation in which first and last points stay where they are."""
    places = np.linspace(0, old - 1, new)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


def _pool(network: Tree, tokens: Array) -> Array:
    if "MAPHead_0" in network:
        head = network["MAPHead_0"]
        (attention,), (norm,), (mlp,) = (
            _numbered(head, kind) for kind in ("MultiHeadDotProductAttention", "LayerNorm", "MlpBlock")
        )
        probe = np.broadcast_to(head["probe"], (len(tokens), 1, tokens.shape[2]))
        pooled = _attention(attention, probe, tokens)
        return (pooled + _mlp(mlp, _layer_norm(norm, pooled)))[:, 0]
    return tokens[:, 0] if "cls" in network else tokens.mean(axis=1)


def _attention(node: Tree, queries_from: Array, tokens: Array) -> Array:
    query = np.tensordot(queries_from, node["query"]["kernel"], 1) + node["query"]["bias"]  # (B, T, A, d)
    key = np.tensordot(tokens, node["key"]["kernel"], 1) + node["key"]["bias"]
    value = np.tensordot(tokens, node["value"]["kernel"], 1) + node["value"]["bias"]
    scores = query.transpose(0, 2, 1, 3) @ key.transpose(0, 2, 3, 1) / np.sqrt(query.shape[3])  # (B, A, T, T)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (scores / scores.sum(axis=-1, keepdims=True)).astype(tokens.dtype)
    context = (weights @ value.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # (B, T, A, d)
    return np.tensordot(context, node["out"]["kernel"], 2) + node["out"]["bias"]


def _mlp(node: Tree, tokens: Array) -> Array:
    hidden = _dense(node["Dense_0"], tokens)
    # Flax's gelu is the tanh form.
    hidden = hidden * 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (hidden + 0.044715 * hidden * hidden * hidden)))
    return _dense(node["Dense_1"], hidden)


def _dense(node: Tree, values: Array) -> Array:
    return values @ node["kernel"] + node["bias"]


def _layer_norm(node: Tree, tokens: Array) -> Array:
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + LAYER_NORM_EPS) * node["scale"] + node["bias"]


def _resnet(network: Tree, pixels: Array) -> Array:
    root = _same_conv(pixels, network["conv_root"]["kernel"], stride=2)
    root = np.maximum(_group_norm(network["gn_root"], root), 0)
    features = _windows(_same_pad(root, (3, 3), 2, -np.inf), (3, 3), (2, 2)).max(axis=(4, 5))
    for stage, block in enumerate(_numbered(network, "block")):
        for index, unit in enumerate(_numbered(block, "unit")):
            features = _unit(unit, features, stride=2 if stage > 0 and index == 0 else 1)
    return features


def _unit(unit: Tree, features: Array, stride: int) -> Array:
    shortcut = features
    if "conv_proj" in unit:
        shortcut = _group_norm(unit["gn_proj"], _same_conv(features, unit["conv_proj"]["kernel"], stride))
    features = np.maximum(_group_norm(unit["gn1"], _same_conv(features, unit["conv1"]["kernel"], 1)), 0)
    features = np.maximum(_group_norm(unit["gn2"], _same_conv(features, unit["conv2"]["kernel"], stride)), 0)
    features = _group_norm(unit["gn3"], _same_conv(features, unit["conv3"]["kernel"], 1))
    return np.maximum(shortcut + features, 0)


def _same_conv(features: Array, kernel: Array, stride: int) -> Array:
    """TensorFlow's SAME convolution with the standardised kernel (p, q, C, O)."""
    axes = (0, 1, 2)
    kernel = (kernel - kernel.mean(axis=axes)) / (kernel.std(axis=axes) + STANDARDISATION_EPS)
    return _conv(_same_pad(features, kernel.shape[:2], stride, 0), kernel, (stride, stride))


def _conv(features: Array, kernel: Array, stride: tuple[int, int]) -> Array:
    """Unpadded convolution of (B, H, W, C) with a kernel (p, q, C, O)."""
    windows = _windows(features, kernel.shape[:2], stride)
    return np.tensordot(windows, kernel, ((4, 5, 3), (0, 1, 2)))


def _windows(features: Array, size: tuple[int, int], stride: tuple[int, int]) -> Array:
    """(B, h, w, C, p, q)."""
    windows = np.lib.stride_tricks.sliding_window_view(features, size, axis=(1, 2))  # type: ignore[call-overload]
    return windows[:, :: stride[0], :: stride[1]]


def _same_pad(features: Array, size: tuple[int, int], stride: int, value: float) -> Array:
    """Padded so that a window gives ceil(H / stride) rows; of an odd number the larger half goes below and right."""
    pads = []
    for length, window in zip(features.shape[1:3], size, strict=True):
        total = max((-(-length // stride) - 1) * stride + window - length, 0)
        pads.append((total // 2, total - total // 2))
    return np.pad(features, ((0, 0), *pads, (0, 0)), constant_values=value)


def _group_norm(node: Tree, features: Array) -> Array:
    grouped = features.reshape(*features.shape[:3], NUM_GROUPS, -1)
    centred = grouped - grouped.mean(axis=(1, 2, 4), keepdims=True)
    variance = (centred**2).mean(axis=(1, 2, 4), keepdims=True)
    normed = (centred / np.sqrt(variance + GROUP_NORM_EPS)).reshape(features.shape)
    return normed * node["scale"].reshape(-1) + node["bias"].reshape(-1)

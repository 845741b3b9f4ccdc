"""DINOv2 (https://arxiv.org/abs/2304.07193) out of an ONNX file, whatever else the file computes from its features.

The names are those of transformers' Dinov2, of versions 4 and 5. The reference is onnxruntime on the same file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from .configuration_vit_scratch import ViTScratchConfig
from .convert_messages_vit_scratch import one_line, some
from .convert_onnx_graph_vit_scratch import OnnxGraph, check_input
from .convert_proof_vit_scratch import Conversion, built
from .errors_vit_scratch import EnvironmentFault, InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchModel

__all__ = ["from_onnx"]

# Preprocessing of the DINOv2 release: the shorter side to 256, the centre of 224, ImageNet's mean and deviation.
_PIXELS: dict[str, Any] = {
    "resize_mode": "shorter",
    "crop_pct": 0.875,
    "resample": 3,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}

_CLASS_TOKEN = "embeddings.cls_token"
_PATCH_KERNEL = "embeddings.patch_embeddings.projection.weight"

# What a graph raises that a flipped bit or an unknown exporter made: a missing input, a shape of another length, ...
_ODD_GRAPH = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# Parts of a name in transformers 4 or 5, and ours.
_RENAMED = (
    ("encoder.layer.", "layers."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
)


@dataclass(frozen=True, eq=False)
class _Encoder:
    """The part of a file that is a DINOv2. Keys of both dictionaries are our names."""

    source: str
    graph: OnnxGraph
    tensors: dict[str, np.ndarray]
    names_in_file: dict[str, str]

    @property
    def patch_size(self) -> tuple[int, int]:
        height, width = self.tensors[_PATCH_KERNEL].shape[2:]
        return height, width


@dataclass(frozen=True)
class _Positions:
    table: np.ndarray
    """(1, 1 + N, D)"""
    resize: Any | None
    """The node that resamples the N patch positions to the grid of the image; None: the file is for one grid."""


def from_onnx(path: str | Path, *, num_attention_heads: int | None = None) -> Conversion:
    """Returns the DINOv2 encoder of an ONNX file; `num_attention_heads` is for graphs that do not tell.

    Raises:
        InputError: not a whole ONNX file, or no DINOv2 in it.
    """
    try:
        return _from_onnx(path, num_attention_heads)
    except InputError:
        raise
    except _ODD_GRAPH as error:
        raise InputError(
            f"{path} is damaged, or its graph is none that is understood ({type(error).__name__}: {one_line(error)}); "
            "export the network again"
        ) from error


def _from_onnx(path: str | Path, num_attention_heads: int | None) -> Conversion:
    encoder = _find_encoder(path)
    graph = encoder.graph
    check_input(graph.model.graph, path)
    positions = _find_positions(encoder)
    declared_size = _declared_size(encoder)
    config = _config(encoder, positions, declared_size, num_attention_heads)
    state_dict = {name: torch.tensor(array) for name, array in encoder.tensors.items()}
    state_dict["embeddings.position_embeddings"] = torch.tensor(positions.table)
    model = built(ViTScratchModel, config, state_dict, encoder.source)
    height, width = declared_size or config.image_height_width
    fields = {**_PIXELS, "size": {"height": height, "width": width}}
    fits_any_size = positions.resize is not None and any(map(graph.depends_on_input, positions.resize.input[2:]))
    own_sizes = [config.image_height_width] if fits_any_size else []
    return Conversion(
        source=encoder.source,
        model=model,
        image_processor=ViTScratchImageProcessor.from_config(config, **fields),
        reference=_reference(encoder),
        reference_dtype=torch.float32,  # the graph's own
        notes=_notes(encoder, positions),
        image_sizes=list(dict.fromkeys([(height, width), *own_sizes])),
        taken_from_user="" if num_attention_heads is None else f"--num_attention_heads {num_attention_heads}",
    )


def _find_encoder(path: str | Path) -> _Encoder:
    graph = OnnxGraph(path)
    named = graph.named_parameters()
    prefixes = [name.removesuffix(_PATCH_KERNEL) for name in named if name.endswith(_PATCH_KERNEL)]
    if len(prefixes) != 1:
        raise InputError(
            f"{path} holds no DINOv2: none of its {len(named)} parameters is called {_PATCH_KERNEL}; of ONNX files, "
            "exports of transformers' Dinov2 are converted, with or without something behind the features"
        )
    tensors, names_in_file = {}, {}
    for name, array in named.items():
        own = name.removeprefix(prefixes[0])
        if name.startswith(prefixes[0]) and own.startswith(("embeddings.", "encoder.layer.", "layernorm.")):
            for theirs, ours in _RENAMED:
                own = own.replace(theirs, ours)
            tensors[own], names_in_file[own] = array, name
    if _CLASS_TOKEN not in tensors:
        tensors[_CLASS_TOKEN] = _folded_class_token(graph, tensors[_PATCH_KERNEL].shape[0], path)
    return _Encoder(str(path), graph, tensors, names_in_file)


def _folded_class_token(graph: OnnxGraph, width: int, path: str | Path) -> np.ndarray:
    """Returns the token of a graph for one size of batch, into which it was folded as B equal rows (B, 1, D)."""
    for concat in graph.concatenations():
        first = graph.constants.get(concat.input[0])
        if first is not None and first.shape[1:] == (1, width) and (first == first[:1]).all():
            return first[:1]
    raise InputError(
        f"{path}: the class token was folded into the graph's constants; export the network with a dynamic batch"
    )


def _find_positions(encoder: _Encoder) -> _Positions:
    """Returns the table, which an export may have cut into class token and patches, or fitted to one grid."""
    graph, width = encoder.graph, encoder.tensors[_PATCH_KERNEL].shape[0]
    for concat in graph.concatenations():
        first = graph.constants.get(concat.input[0])
        if first is None or first.shape != (1, 1, width) or len(concat.input) != 2:
            continue
        found = graph.path_to_constant(concat.input[1])
        if found is not None and found[0].size > width:
            patches, path = found
            resize = next((node for node in path if node.op_type == "Resize"), None)
            return _Positions(np.concatenate((first, patches.reshape(1, -1, width)), axis=1), resize)
    for node in graph.model.graph.node:
        table = graph.split_inputs(node)[0] if node.op_type == "Add" else None
        if table is not None and table.ndim == 3 and table.shape[::2] == (1, width) and table.shape[1] > 1:
            return _Positions(table, None)
    raise InputError(f"{encoder.source}: no table of position embeddings was found, as a DINOv2 has")


def _declared_size(encoder: _Encoder) -> tuple[int, int] | None:
    """Returns (height, width) of the graph's input where they are fixed."""
    shape = encoder.graph.model.graph.input[0].type.tensor_type.shape.dim
    height, width = (dim.dim_value for dim in shape[2:])
    return (height, width) if height and width else None


def _config(
    encoder: _Encoder, positions: _Positions, declared_size: tuple[int, int] | None, num_attention_heads: int | None
) -> ViTScratchConfig:
    kernel = encoder.tensors[_PATCH_KERNEL]
    layers = {name.split(".")[1] for name in encoder.tensors if name.startswith("layers.")}
    fields: dict[str, Any] = {
        "image_size": _image_size(encoder, positions, declared_size),
        "patch_size": list(encoder.patch_size) if len(set(encoder.patch_size)) > 1 else encoder.patch_size[0],
        "num_channels": kernel.shape[1],
        "hidden_size": kernel.shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": num_attention_heads or _num_attention_heads(encoder),
        "intermediate_size": len(encoder.tensors.get("layers.0.mlp.fc1.bias", kernel)),
        "qkv_bias": "layers.0.attention.q_proj.bias" in encoder.tensors,
        "hidden_act": _hidden_act(encoder),
        "layer_norm_eps": _layer_norm_eps(encoder),
        "layer_scale_init": 1.0,  # transformers' default; the tensors are in the file
        "position_interpolation": _position_interpolation(encoder, positions),
    }
    try:
        return ViTScratchConfig(**fields)
    except (StrictDataclassError, InputError) as error:
        raise InputError(f"{encoder.source}: its graph makes no network: {one_line(error)}") from error


def _image_size(encoder: _Encoder, positions: _Positions, declared_size: tuple[int, int] | None) -> int | list[int]:
    """Returns the size whose grid the table is made for: the input's where it has as many patches, else a square."""
    patch_height, patch_width = encoder.patch_size
    num_patches = positions.table.shape[1] - 1
    if declared_size is not None and num_patches == (declared_size[0] // patch_height) * (
        declared_size[1] // patch_width
    ):
        return declared_size[0] if declared_size[0] == declared_size[1] else list(declared_size)
    side = math.isqrt(num_patches)
    if side * side != num_patches or patch_height != patch_width:
        raise InputError(
            f"{encoder.source}: a table of {num_patches} patch positions is that of no square image, and the graph's "
            f"input does not say of which"
        )
    return side * patch_height


def _num_attention_heads(encoder: _Encoder) -> int:
    bias = encoder.names_in_file.get("layers.0.attention.q_proj.bias")
    head_dim = None if bias is None else encoder.graph.last_dimension_after(bias)
    if head_dim is None:
        raise InputError(f"{encoder.source}: the graph does not tell the heads; give --num_attention_heads")
    return encoder.tensors[_PATCH_KERNEL].shape[0] // head_dim


def _hidden_act(encoder: _Encoder) -> str:
    bias = encoder.names_in_file.get("layers.0.mlp.fc1.bias")
    operators = {} if bias is None else encoder.graph.operators_until_matmul(bias)
    if "Gelu" in operators:
        tanh = any(a.name == "approximate" and a.s == b"tanh" for a in operators["Gelu"].attribute)
        return "gelu_pytorch_tanh" if tanh else "gelu"
    if "Erf" in operators:
        return "gelu"
    if bias is None:
        raise InputError(
            f"{encoder.source}: the layers have no mlp.fc1, as a DINOv2 with a plain MLP has; SwiGLU has not"
        )
    raise InputError(f"{encoder.source}: the layers' MLP is none with a GELU ({some(sorted(operators))} found)")


def _layer_norm_eps(encoder: _Encoder) -> float:
    norms = [name for name in encoder.tensors if "layernorm" in name and name.endswith(".weight")]
    found = {encoder.graph.epsilon(encoder.names_in_file[name].removesuffix(".weight")) for name in norms}
    values = [value for value in found if value is not None]
    if len(found) != 1 or not values:
        raise InputError(f"{encoder.source}: the LayerNorms must have one epsilon; found {sorted(map(str, found))}")
    return values[0]


def _position_interpolation(encoder: _Encoder, positions: _Positions) -> Literal["bicubic", "bicubic_antialias"]:
    if positions.resize is None:
        return "bicubic"  # transformers' Dinov2
    options = {attribute.name: attribute for attribute in positions.resize.attribute}
    mode = options["mode"].s if "mode" in options else b"nearest"
    transformation = options["coordinate_transformation_mode"].s if len(options) > 1 else b"half_pixel"
    if mode != b"cubic" or transformation not in (b"half_pixel", b"pytorch_half_pixel"):
        raise InputError(
            f"{encoder.source}: positions are resampled by {mode.decode()}, {transformation.decode()}, which is no "
            "position_interpolation here"
        )
    return "bicubic_antialias" if "antialias" in options and options["antialias"].i else "bicubic"


def _notes(encoder: _Encoder, positions: _Positions) -> list[str]:
    notes = ["an ONNX file holds no preprocessing: that of the DINOv2 release is assumed"]
    names = set(encoder.names_in_file.values())
    others = [name for name in encoder.graph.parameters if "::" not in name and name not in names]
    if others:
        parts = sorted({name.partition(".")[0] for name in others})
        notes.append(f"left out what the file computes from the features: {len(others)} tensors of {', '.join(parts)}")
    if positions.resize is None:
        notes.append("the file is for one size of image: how positions are resampled to others is assumed, bicubic")
    return notes


def _reference(encoder: _Encoder) -> Callable[[Tensor], dict[str, Tensor]]:
    """Returns onnxruntime's features, image by image, each in a batch of copies where the file fixes its size."""
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentFault(
            f"{encoder.source}: the proof runs on a package that is not here; pip install onnxruntime"
        ) from error
    bias = encoder.names_in_file.get("layernorm.bias", "")
    features = encoder.graph.output_of(bias.removesuffix(".bias"))
    if features is None:
        raise InputError(f"{encoder.source}: nothing computes with the last LayerNorm; export the whole network")
    try:
        session = onnxruntime.InferenceSession(encoder.graph.computing(features), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception a status, most of them below RuntimeError
        raise InputError(
            f"{encoder.source}: onnxruntime cannot run it ({one_line(error)}); export it for an opset that it knows"
        ) from error
    name = session.get_inputs()[0].name
    batch_size = encoder.graph.model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 1

    def reference(pixel_values: Tensor) -> dict[str, Tensor]:
        batches = [image.expand(batch_size, -1, -1, -1).numpy() for image in pixel_values]
        try:
            rows = [session.run([features], {name: batch})[0][:1] for batch in batches]
        except Exception as error:
            raise InputError(
                f"{encoder.source}: onnxruntime cannot compute its features ({one_line(error)})"
            ) from error
        return {"last_hidden_state": torch.from_numpy(np.concatenate(rows))}

    return reference

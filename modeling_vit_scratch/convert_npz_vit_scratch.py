"""Google's npz checkpoints in and out: the ViT paper's, AugReg's, the hybrids', and those of big_vision.

What the shapes of the arrays tell becomes the config; where each array belongs is in npz_layout_vit_scratch.py.

D hidden_size, A heads, d head_dim, N patches.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint_files_vit_scratch import StrPath, as_tensor, read_arrays
from .configuration_vit_scratch import ViTScratchConfig
from .conversion_vit_scratch import Conversion, built, proof_dtype
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from .npz_layout_vit_scratch import (
    BLOCK,
    MAP_HEAD,
    POSITIONS,
    STACKED,
    STEM_WIDTH,
    Slot,
    big_vision_name,
    released_name,
    slots,
)
from .reference_npz_vit_scratch import reference_outputs

__all__ = ["from_npz", "to_npz"]

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

IMAGENET_21K_CLASSES = 21_843
SINCOS_IMAGE_SIZE = 224  # of big_vision's baselines, whose positions are in no file

# Where the network hangs in a file: alone, beside a Flax or an Optax optimizer, as the image tower beside a text tower.
_ROOTS = ("", "opt/target/", "params/", "params/img/", "img/")
_TRAINING_STATE = ("opt/", "chrono/", "extra/")
_TEXT_TOWER = re.compile(r"(params/)?(txt/.*|t|b)")


def from_npz(path: StrPath, *, image_size: int | list[int] | None = None) -> Conversion:
    """Returns the Vision Transformer of an npz file: a classifier, or the encoder where the file has no head.

    Args:
        path: the file.
        image_size: pixels, or [height, width]; None: what a square grid of the file's positions comes to.

    Raises:
        InputError: the file cannot be read, an array has no place in the network or the network none in the file.
    """
    source = str(path)
    stored = read_arrays(path)
    arrays, notes = _network_of(stored, source)
    config = _config_of(arrays, image_size, source, notes)
    model_class = ViTScratchForImageClassification if "head/kernel" in arrays else ViTScratchModel
    places = slots(config, with_head="head/kernel" in arrays)
    _check_arrays(arrays, places, source)
    state_dict = {
        slot.ours: as_tensor(slot.to_ours(arrays[name]), f"{source}: {name}") for name, slot in places.items()
    }
    model = built(model_class, config, state_dict, source)
    return Conversion(
        source=source,
        model=model,
        image_processor=ViTScratchImageProcessor.from_config(config),
        reference=_Reference(stored, config.grid_size),
        reference_dtype=proof_dtype(model),
        notes=notes,
    )


@dataclass(frozen=True)
class _Reference:
    """The network in NumPy, from the arrays as they are in the file."""

    arrays: Arrays
    grid_size: tuple[int, int]

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        pixels = pixel_values.detach().cpu().permute(0, 2, 3, 1).numpy()  # Flax has the channels last
        outputs = reference_outputs(self.arrays, pixels, self.grid_size)
        return {name: torch.from_numpy(np.ascontiguousarray(output)) for name, output in outputs.items()}


def _network_of(stored: Arrays, source: str) -> tuple[Arrays, list[str]]:
    """The arrays of the one network in a file, under the released names, and notes on what was left out."""
    roots = [root for root in _ROOTS if f"{root}embedding/kernel" in stored]
    if len(roots) != 1:
        raise InputError(
            f"{source}: holds {len(roots)} Vision Transformers instead of 1 (by embedding/kernel, alone or below "
            f"{', '.join(_ROOTS[1:])}); its arrays are {_some(stored)}"
        )
    root, notes = roots[0], []
    arrays: Arrays = {}
    others = []
    for name, array in stored.items():
        if name.startswith(root) and not (root == "" and name.startswith(_TRAINING_STATE)):
            _add(arrays, released_name(name.removeprefix(root)), array, source)
        else:
            others.append(name)
    training = [name for name in others if name.startswith(_TRAINING_STATE)]
    text = [name for name in others if root.endswith("img/") and _TEXT_TOWER.fullmatch(name)]
    if unknown := sorted(set(others) - set(training) - set(text)):
        raise InputError(
            f"{source}: {_some(unknown)} beside the network below {root}; only its arrays can be converted"
        )
    if training:
        notes.append(f"left out the training state: {len(training)} arrays such as {training[0]}")
    if text:
        notes.append(f"left out the text tower: {len(text)} arrays such as {text[0]}")
    return _unstacked(arrays, source), notes


def _add(arrays: Arrays, name: str, array: np.ndarray, source: str) -> None:
    if name in arrays:
        raise InputError(f"{source}: {name} is there twice, under an old and a new name; keep one of them")
    if re.fullmatch(r"gn(_root|_proj|\d)", name.split("/")[-2] if "/" in name else ""):
        array = array.reshape(-1) if array.shape[:-1] == (1,) * (array.ndim - 1) else array  # once (1, 1, 1, C)
    arrays[name] = array


def _unstacked(arrays: Arrays, source: str) -> Arrays:
    """Layers that were scanned over, with an axis for the layers in front, as one array a layer."""
    stacked = {name: array for name, array in arrays.items() if name.startswith(STACKED)}
    depths = {array.shape[:1] for array in stacked.values()}
    if len(depths) > 1 or () in depths:
        raise InputError(f"{source}: the arrays below {STACKED} are of different numbers of layers: {sorted(depths)}")
    unstacked = {name: array for name, array in arrays.items() if name not in stacked}
    for name, array in stacked.items():
        for index, of_layer in enumerate(array):
            _add(unstacked, f"{BLOCK}{index}/{name.removeprefix(STACKED)}", of_layer, source)
    return unstacked


def _config_of(arrays: Arrays, image_size: int | list[int] | None, source: str, notes: list[str]) -> ViTScratchConfig:
    """The config that the shapes tell; choices that they do not tell become notes."""
    shapes = _Shapes(arrays, source)
    query = f"{BLOCK}0/MultiHeadDotProductAttention_1/query/kernel"
    hidden_size, num_heads, head_dim = shapes.of(query, "width", "heads", "width of a head")
    if num_heads * head_dim != hidden_size:
        raise InputError(
            f"{source}: {num_heads} heads of {head_dim} are not as wide together as the network, {hidden_size}; "
            "such attention cannot be converted"
        )
    _, mlp_size = shapes.of(f"{BLOCK}0/MlpBlock_3/Dense_0/kernel", "width", "hidden width")
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "intermediate_size": mlp_size,
        "num_hidden_layers": _count(arrays, rf"{BLOCK}(\d+)/"),
        "pooling": _pooling(arrays),
        "hidden_act": "gelu_pytorch_tanh",  # Flax's default
        "layer_norm_eps": 1e-6,  # Flax's default
        "position_interpolation": "bilinear_corners",
    }
    if "pre_logits/kernel" in arrays:
        _, fields["representation_size"] = shapes.of("pre_logits/kernel", "width", "width")
    fields |= _patch_fields(arrays, shapes)
    fields |= _position_fields(arrays, shapes, fields, image_size, notes)
    fields |= _head_fields(arrays, shapes, notes)
    try:
        return ViTScratchConfig(**fields)
    except StrictDataclassError as error:
        raise InputError(f"{source}: its arrays make no network: {' '.join(str(error).split())}") from None


@dataclass(frozen=True)
class _Shapes:
    arrays: Arrays
    source: str

    def of(self, name: str, *axes: str) -> tuple[int, ...]:
        """The shape of an array that must be there and have these axes."""
        if name not in self.arrays:
            raise InputError(f"{self.source}: has no array {name}; it is incomplete or not a Vision Transformer")
        shape = self.arrays[name].shape
        if len(shape) != len(axes):
            raise InputError(f"{self.source}: {name} is {shape}, but its axes must be ({', '.join(axes)})")
        return shape


def _count(names: Iterable[str], pattern: str) -> int:
    """How many are numbered in the place of the group; gaps show later, as arrays that are missing."""
    numbers = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    return len(numbers)


def _pooling(arrays: Arrays) -> str:
    if any(name.startswith(MAP_HEAD) for name in arrays):
        return "attention"
    return "class_token" if "cls" in arrays else "mean"


def _patch_fields(arrays: Arrays, shapes: _Shapes) -> dict[str, Any]:
    *patch, num_channels, _ = shapes.of("embedding/kernel", "height", "width", "channels", "outputs")
    fields: dict[str, Any] = {"num_channels": num_channels}
    if "conv_root/kernel" in arrays:
        *_, fields["num_channels"], width = shapes.of("conv_root/kernel", "height", "width", "channels", "outputs")
        num_stages = _count(arrays, r"block(\d+)/")
        fields["stem_depths"] = [_count(arrays, rf"block{stage}/unit(\d+)/") for stage in range(1, num_stages + 1)]
        fields["stem_width_factor"] = max(1, width // STEM_WIDTH)
        stride = 4 * 2 ** max(0, num_stages - 1)  # of root and stages, which the patches are cut behind
        patch = [side * stride for side in patch]
    fields["patch_size"] = patch[0] if patch[0] == patch[1] else patch
    return fields


def _position_fields(
    arrays: Arrays, shapes: _Shapes, fields: dict[str, Any], image_size: int | list[int] | None, notes: list[str]
) -> dict[str, Any]:
    has_class_token = "cls" in arrays
    found: dict[str, Any] = {"use_class_token": has_class_token}
    if POSITIONS not in arrays:
        found["position_embedding_type"] = "sincos_2d"
        notes.append("the file has no positions, so they are taken for big_vision's fixed ones (sincos_2d)")
        if image_size is None:
            image_size = SINCOS_IMAGE_SIZE
            notes.append(f"fixed positions do not tell the image size: {image_size} was assumed")
        return found | {"image_size": image_size}
    _, num_rows, _ = shapes.of(POSITIONS, "1", "positions", "width")
    patch_size = fields["patch_size"]
    patch = patch_size if isinstance(patch_size, list) else [patch_size, patch_size]
    if image_size is None:
        side = math.isqrt(num_rows - (1 if has_class_token and not _is_square(num_rows) else 0))
        image_size = side * patch[0] if patch[0] == patch[1] else [side * patch[0], side * patch[1]]
    if isinstance(image_size, list) and len(image_size) != 2:
        raise InputError(f"image_size={image_size} must be one number or [height, width]")
    sides = image_size if isinstance(image_size, list) else [image_size, image_size]
    num_patches = math.prod(pixels // side for pixels, side in zip(sides, patch, strict=True))
    if num_rows not in ((num_patches, num_patches + 1) if has_class_token else (num_patches,)):
        raise InputError(
            f"{shapes.source}: {num_rows} positions fit no grid of {num_patches} patches, which image_size={image_size} "
            f"and patch_size={patch_size} make; pass image_size=[height, width] of the network"
        )
    if has_class_token:
        found["class_token_position"] = num_rows == num_patches + 1
    return found | {"image_size": image_size}


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _head_fields(arrays: Arrays, shapes: _Shapes, notes: list[str]) -> dict[str, Any]:
    if "head/kernel" not in arrays:
        notes.append("the file has no head: the result is the encoder alone")
        return {}
    _, num_labels = shapes.of("head/kernel", "width", "classes")
    if not arrays["head/kernel"].astype(np.float32).any():
        notes.append("the head is all zeros, as in Google's imagenet21k files: its predictions mean nothing")
    if num_labels == IMAGENET_21K_CLASSES:
        notes.append(
            f"{num_labels} classes are ImageNet-21k, which the paper and AugReg trained with one sigmoid a class: "
            "problem_type is multi_label_classification"
        )
    is_multi_label = num_labels in (1, IMAGENET_21K_CLASSES)
    problem_type = "multi_label_classification" if is_multi_label else "single_label_classification"
    return {"num_labels": num_labels, "problem_type": problem_type}


def _check_arrays(arrays: Arrays, places: dict[str, Slot], source: str) -> None:
    problems = {
        "missing": sorted(places.keys() - arrays.keys()),
        "without a place": sorted(arrays.keys() - places.keys()),
        "of another shape": [
            f"{name} {arrays[name].shape} instead of {slot.shape}"
            for name, slot in places.items()
            if name in arrays and arrays[name].shape != slot.shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise InputError(f"{source}: not a Vision Transformer as Google's code writes it: {listed}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return (", ".join(listed[:6]) or "none") + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def to_npz(model: PreTrainedModel, image_processor: ViTScratchImageProcessor) -> Arrays:
    """Returns the arrays of an npz file with this model, under the released names, in the model's dtypes.

    Models that the released code has no place for but big_vision has (attention pooling, fixed sine-cosine positions,
    a class token without a position) come under big_vision's names, below `params/`.

    Raises:
        InputError: a field of the config or of the image processor is one that Google's code has not.
    """
    config = model.config
    with_head = isinstance(model, ViTScratchForImageClassification)
    if not with_head and not isinstance(model, ViTScratchModel):
        raise InputError(
            f"{type(model).__name__} has no place in an npz file; only classifiers and bare encoders have"
        )
    _check_fields(config, image_processor)
    tensors, places = model.state_dict(), slots(config, with_head=with_head)
    if odd := tensors.keys() ^ {slot.ours for slot in places.values()}:
        raise InputError(f"an npz file holds the plain network: merge or unload what made {_some(sorted(odd))}")
    arrays = {name: slot.from_ours(tensors[slot.ours]) for name, slot in places.items()}
    if not _needs_big_vision(config):
        return arrays
    return {f"params/{big_vision_name(name)}": array for name, array in arrays.items()}


def _needs_big_vision(config: PreTrainedConfig) -> bool:
    has_bare_class_token = config.use_class_token and not config.class_token_position
    return config.pooling == "attention" or config.position_embedding_type == "sincos_2d" or has_bare_class_token


def _check_fields(config: PreTrainedConfig, image_processor: ViTScratchImageProcessor) -> None:
    """Raises unless Google's code computes what this config says and feeds it what this processor does."""
    has_other_class_token = config.use_class_token and config.pooling != "class_token"
    fitting: dict[str, tuple[Any, tuple]] = {  # field: its value, the values that fit
        "mlp_type": (config.mlp_type, ("mlp",)),
        "hidden_act": (config.hidden_act, ("gelu_pytorch_tanh", "gelu_new")),
        "layer_norm_eps": (config.layer_norm_eps, (1e-6,)),
        "qkv_bias": (config.qkv_bias, (True,)),
        "qk_norm": (config.qk_norm, (False,)),
        "layer_scale_init": (config.layer_scale_init, (None,)),
        "position_embedding_type": (config.position_embedding_type, ("learned_1d", "sincos_2d")),
        "position_embedding_placement": (config.position_embedding_placement, ("stem",)),
        "use_distillation_token": (config.use_distillation_token, (False,)),
        "num_register_tokens": (config.num_register_tokens, (0,)),
        "pooling": (config.pooling, ("class_token", "mean", "attention")),
        "use_class_token": (config.use_class_token, (not has_other_class_token and config.use_class_token,)),
        "final_norm": (config.final_norm, ("before_pooling",)),
        "image_mean": (set(image_processor.image_mean), ({0.5},)),
        "image_std": (set(image_processor.image_std), ({0.5},)),
    }
    if _needs_big_vision(config):  # it has no hybrids
        fitting["stem_depths"] = (config.stem_depths, (None,))
    for name, (value, values) in fitting.items():
        if value not in values:
            raise InputError(
                f"{name}={value!r} has no place in an npz file: Google's code has "
                f"{' or '.join(map(repr, values))}; export to another format"
            )
    logger.warning("an npz file holds no preprocessing: Google's code squashes images to %s", config.image_size)

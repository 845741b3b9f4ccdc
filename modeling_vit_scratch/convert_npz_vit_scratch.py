"""Google's npz checkpoints in and out: the ViT paper's, AugReg's, the hybrids', and those of big_vision.

What the shapes of the arrays tell becomes the config; convert_npz_layout_vit_scratch.py says where each belongs.

D hidden_size, A heads, d head_dim, N patches.
"""

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_vit_scratch import ViTScratchConfig
from .convert_files_vit_scratch import StrPath, as_tensor, read_arrays
from .convert_messages_vit_scratch import one_line, some
from .convert_npz_layout_vit_scratch import (
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
from .convert_npz_reference_vit_scratch import reference_outputs
from .convert_proof_vit_scratch import Conversion, built, proof_dtype
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

__all__ = ["from_npz", "to_npz"]

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]

IMAGENET_21K_CLASSES = 21_843
SINCOS_IMAGE_SIZE = 224  # of big_vision's baselines, whose positions are in no file

# Where the network hangs in a file: alone, beside a Flax or an Optax optimizer, or as the image tower beside a text
# tower.
_ROOTS = ("", "opt/target/", "params/", "params/img/", "img/")
_TRAINING_STATE = ("opt/", "chrono/")
_TEXT_TOWER = re.compile(r"(params/)?(txt/.*|t|b)")


def from_npz(path: StrPath, *, image_size: int | list[int] | None = None) -> Conversion:
    """Returns the Vision Transformer of an npz file: a classifier, or the encoder where the file has no head.

    Args:
        path: the file.
        image_size: pixels, or [height, width]; None: what a square grid of the file's positions comes to.

    Raises:
        InputError: the file cannot be read, an array has no place in the network or the network none in the file.
    """
    stored = read_arrays(path)
    network = _network_of(stored, str(path))
    config = _config_of(network, image_size)
    places = slots(config, with_head=network.has_head)
    _check_arrays(network, places)
    model = built(
        ViTScratchForImageClassification if network.has_head else ViTScratchModel,
        config,
        {slot.ours: network.tensor(name, slot) for name, slot in places.items()},
        network.source,
    )
    return Conversion(
        source=network.source,
        model=model,
        image_processor=ViTScratchImageProcessor.from_config(config),
        reference=_Reference(stored, config.grid_size),
        reference_dtype=proof_dtype(model),
        notes=network.notes,
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


@dataclass(frozen=True, eq=False)
class _Network:
    """The one network in a file."""

    source: str
    arrays: Arrays
    """Under the released names."""
    notes: list[str]
    is_released_layout: bool
    """Whether the positions stand where the paper's code has them, with a row for the class token if there is one."""

    @property
    def has_head(self) -> bool:
        return "head/kernel" in self.arrays

    @property
    def has_class_token(self) -> bool:
        return "cls" in self.arrays

    def shape(self, name: str, *axes: str) -> tuple[int, ...]:
        """The shape of an array that must be there and have these axes."""
        if name not in self.arrays:
            raise InputError(f"{self.source}: has no array {name}; it is incomplete or not a Vision Transformer")
        shape = self.arrays[name].shape
        if len(shape) != len(axes):
            raise InputError(f"{self.source}: {name} is {shape}, but its axes must be ({', '.join(axes)})")
        if 0 in shape:
            raise InputError(f"{self.source}: {name} is {shape}: it holds nothing; the file is damaged, get it again")
        return shape

    def tensor(self, name: str, slot: Slot) -> Tensor:
        return as_tensor(slot.to_ours(self.arrays[name]), f"{self.source}: {name}")


def _network_of(stored: Arrays, source: str) -> _Network:
    roots = [root for root in _ROOTS if f"{root}embedding/kernel" in stored]
    if len(roots) != 1:
        raise InputError(
            f"{source}: holds {len(roots)} Vision Transformers instead of 1 (by embedding/kernel, alone or below "
            f"{', '.join(_ROOTS[1:])}); its arrays are {some(stored)}"
        )
    root = roots[0]
    arrays: Arrays = {}
    others = []
    for name, array in stored.items():
        if name.startswith(root) and not (root == "" and name.startswith(_TRAINING_STATE)):
            _add(arrays, released_name(name.removeprefix(root)), array, source)
        else:
            others.append(name)
    return _Network(
        source=source,
        arrays=_unstacked(arrays, source),
        notes=_notes_on(others, root, source),
        is_released_layout=f"{root}{POSITIONS}" in stored,
    )


def _notes_on(others: list[str], root: str, source: str) -> list[str]:
    """What may be left out of a file; raises where there is more."""
    training = [name for name in others if name.startswith(_TRAINING_STATE)]
    text = [name for name in others if root.endswith("img/") and _TEXT_TOWER.fullmatch(name)]
    if unknown := sorted(set(others) - set(training) - set(text)):
        raise InputError(
            f"{source}: {some(unknown)} beside the network below {root}; only its arrays can be converted"
        )
    return [
        f"left out the {what}: {len(names)} arrays such as {names[0]}"
        for what, names in (("training state", training), ("text tower", text))
        if names
    ]


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


def _config_of(network: _Network, image_size: int | list[int] | None) -> ViTScratchConfig:
    """The config that the shapes tell; choices that they do not tell become notes."""
    query = f"{BLOCK}0/MultiHeadDotProductAttention_1/query/kernel"
    hidden_size, num_heads, head_dim = network.shape(query, "width", "heads", "width of a head")
    if num_heads * head_dim != hidden_size:
        raise InputError(
            f"{network.source}: {num_heads} heads of {head_dim} are not as wide together as the network, "
            f"{hidden_size}; such attention cannot be converted"
        )
    _, mlp_size = network.shape(f"{BLOCK}0/MlpBlock_3/Dense_0/kernel", "width", "hidden width")
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "intermediate_size": mlp_size,
        "num_hidden_layers": _count(network.arrays, rf"{BLOCK}(\d+)/"),
        "pooling": _pooling(network),
        "use_class_token": network.has_class_token,
        "hidden_act": "gelu_pytorch_tanh",  # Flax's default
        "layer_norm_eps": 1e-6,  # Flax's default
        "position_interpolation": "bilinear_corners",
    }
    if "pre_logits/kernel" in network.arrays:
        _, fields["representation_size"] = network.shape("pre_logits/kernel", "width", "width")
    fields |= _patch_fields(network)
    fields |= _position_fields(network, fields["patch_size"], image_size)
    fields |= _head_fields(network)
    try:
        return ViTScratchConfig(**fields)
    except (StrictDataclassError, InputError) as error:
        raise InputError(f"{network.source}: its shapes make no network: {one_line(error)}") from None


def _count(names: Iterable[str], pattern: str) -> int:
    """How many are numbered in the place of the group; gaps show later, as arrays that are missing."""
    return len({int(match[1]) for name in names if (match := re.match(pattern, name))})


def _pooling(network: _Network) -> str:
    if any(name.startswith(MAP_HEAD) for name in network.arrays):
        return "attention"
    return "class_token" if network.has_class_token else "mean"


def _patch_fields(network: _Network) -> dict[str, Any]:
    axes = ("height", "width", "channels", "outputs")
    *patch, num_channels, _ = network.shape("embedding/kernel", *axes)
    fields: dict[str, Any] = {"num_channels": num_channels}
    if "conv_root/kernel" in network.arrays:
        *_, fields["num_channels"], width = network.shape("conv_root/kernel", *axes)
        num_stages = _count(network.arrays, r"block(\d+)/")
        fields["stem_depths"] = [
            _count(network.arrays, rf"block{stage}/unit(\d+)/") for stage in range(1, num_stages + 1)
        ]
        fields["stem_width_factor"] = max(1, width // STEM_WIDTH)
        stride = 4 * 2 ** max(0, num_stages - 1)  # of root and stages, behind which the patches are cut
        patch = [side * stride for side in patch]
    fields["patch_size"] = patch[0] if patch[0] == patch[1] else patch
    return fields


def _position_fields(
    network: _Network, patch_size: int | list[int], image_size: int | list[int] | None
) -> dict[str, Any]:
    if POSITIONS not in network.arrays:
        network.notes.append("the file has no positions, so they are taken for big_vision's fixed ones (sincos_2d)")
        if image_size is None:
            image_size = SINCOS_IMAGE_SIZE
            network.notes.append(f"fixed positions do not tell the image size: {image_size} was assumed")
        return {"image_size": image_size, "position_embedding_type": "sincos_2d"}
    _, num_rows, _ = network.shape(POSITIONS, "1", "positions", "width")
    # The paper's code counts the class token in; big_vision did so once, and then the patches alone make a square.
    has_row = network.has_class_token and (network.is_released_layout or not _is_square(num_rows))
    patch = patch_size if isinstance(patch_size, list) else [patch_size, patch_size]
    if image_size is None:
        side = math.isqrt(max(0, num_rows - has_row))
        image_size = side * patch[0] if patch[0] == patch[1] else [side * patch[0], side * patch[1]]
    elif isinstance(image_size, list) and len(image_size) != 2:
        raise InputError(f"image_size={image_size} must be one number or [height, width]")
    sides = image_size if isinstance(image_size, list) else [image_size, image_size]
    num_patches = math.prod(pixels // side for pixels, side in zip(sides, patch, strict=True))
    if network.has_class_token and not network.is_released_layout:
        has_row = num_rows == num_patches + 1
    if num_rows != num_patches + has_row:
        raise InputError(
            f"{network.source}: {num_rows} positions{' with the class token' if has_row else ''} fit no grid of "
            f"{num_patches} patches, as image_size={image_size} and patch_size={patch_size} make; pass "
            "image_size=[height, width] of the network"
        )
    return {"image_size": image_size, "class_token_position": has_row or not network.has_class_token}


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _head_fields(network: _Network) -> dict[str, Any]:
    if not network.has_head:
        network.notes.append("the file has no head: the result is the encoder alone")
        return {}
    _, num_labels = network.shape("head/kernel", "width", "classes")
    if not as_tensor(network.arrays["head/kernel"], f"{network.source}: head/kernel").any():
        network.notes.append("the head is all zeros, as in Google's imagenet21k files: its predictions mean nothing")
    if num_labels == IMAGENET_21K_CLASSES:
        network.notes.append(
            f"{num_labels} classes are ImageNet-21k, which the paper and AugReg trained with one sigmoid a class: "
            "problem_type is multi_label_classification"
        )
    return {"num_labels": num_labels, "problem_type": _problem_type(num_labels)}


def _problem_type(num_labels: int | None) -> str:
    """Which training the number of classes tells, for no array does."""
    is_multi_label = num_labels in (1, IMAGENET_21K_CLASSES)
    return "multi_label_classification" if is_multi_label else "single_label_classification"


def _check_arrays(network: _Network, places: dict[str, Slot]) -> None:
    arrays = network.arrays
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
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in problems.items() if names)
        raise InputError(f"{network.source}: not a Vision Transformer as Google's code writes it: {listed}")


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
    _check_fields(config, image_processor, with_head)
    _warn_of_losses(config, image_processor, with_head)
    tensors, places = model.state_dict(), slots(config, with_head=with_head)
    if odd := tensors.keys() ^ {slot.ours for slot in places.values()}:
        raise InputError(f"an npz file holds the plain network: merge or unload what made {some(sorted(odd))}")
    arrays = {name: slot.from_ours(tensors[slot.ours]) for name, slot in places.items()}
    if not _needs_big_vision(config):
        return arrays
    return {f"params/{big_vision_name(name)}": array for name, array in arrays.items()}


def _needs_big_vision(config: PreTrainedConfig) -> bool:
    has_bare_class_token = config.use_class_token and not config.class_token_position
    return config.pooling == "attention" or config.position_embedding_type == "sincos_2d" or has_bare_class_token


def _check_fields(config: PreTrainedConfig, image_processor: ViTScratchImageProcessor, with_head: bool) -> None:
    """Raises unless Google's code computes what this config says and feeds it what this processor does."""
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
        "use_class_token": (config.use_class_token, (config.pooling == "class_token",)),
        "final_norm": (config.final_norm, ("before_pooling",)),
        "image_mean": (image_processor.image_mean, ([0.5] * config.num_channels,)),
        "image_std": (image_processor.image_std, ([0.5] * config.num_channels,)),
    }
    if with_head:  # a file does not say it: this is what its number of classes is taken for
        fitting["problem_type"] = (config.problem_type, (_problem_type(config.num_labels),))
    if _needs_big_vision(config):  # it has no hybrids
        fitting["stem_depths"] = (config.stem_depths, (None,))
    for name, (value, values) in fitting.items():
        if value not in values:
            raise InputError(
                f"{name}={value!r} has no place in an npz file: Google's code has "
                f"{' or '.join(map(repr, values))}; export to another format"
            )


def _warn_of_losses(config: PreTrainedConfig, image_processor: ViTScratchImageProcessor, with_head: bool) -> None:
    names = list((config.id2label or {}).values())
    if with_head and names != [f"LABEL_{index}" for index in range(len(names))]:
        logger.warning("an npz file holds no class names: those of the %d classes are left out", len(names))
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "patch_dropout_rate"):
        if getattr(config, name):
            logger.warning("an npz file holds no settings of training: %s=%s is left out", name, getattr(config, name))
    if config.position_embedding_type == "sincos_2d" and config.image_size != SINCOS_IMAGE_SIZE:
        logger.warning(
            "an npz file without positions does not tell the image size: read it with --image_size %s",
            " ".join(map(str, config.image_height_width)),
        )
    if image_processor.resize_mode != "squash":
        logger.warning(
            "an npz file holds no preprocessing: Google's code squashes images to %s, where this processor has "
            "resize_mode=%r",
            config.image_size,
            image_processor.resize_mode,
        )

"""config.json and preprocessor_config.json of others, refused where a field is of a kind that no code wrote there."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["check_processor_fields", "check_shape_fields", "stored_fields"]

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class _Kind(NamedTuple):
    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_side(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)))


def _is_size(value: Any) -> bool:
    sides = list(value.values()) if isinstance(value, dict) else [value]
    return _is_side(value) or (bool(sides) and all(side is None or _is_count(side) for side in sides))


def _is_statistic(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and bool(value) and all(map(_is_number, value)))


def _is_dtype(value: Any) -> bool:
    names = value.values() if isinstance(value, dict) else [value]
    return all(
        isinstance(name, str)
        and (name == "auto" or isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype))
        for name in names
    )


def _are_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(str(key).isdecimal() for key in value)


_TEXT = _Kind("text", lambda value: isinstance(value, str))
_TEXTS = _Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_LABELS = _Kind("an object of names by index", _are_labels)
_COUNT = _Kind("a whole number above 0", _is_count)
_SIDE = _Kind("a whole number above 0, or a list of two", _is_side)
_SIZE = _Kind("a whole number above 0, or an object of such", _is_size)
_NUMBER = _Kind("a number", _is_number)
_STATISTIC = _Kind("a number or a list of numbers", _is_statistic)
_STATISTICS = _Kind("a list of numbers", lambda value: isinstance(value, list) and _is_statistic(value))
_DTYPE = _Kind("the name of a dtype of torch", _is_dtype)
_SHAPE = _Kind(
    "a list of whole numbers above 0",
    lambda value: isinstance(value, list) and bool(value) and all(map(_is_count, value)),
)

# What says whose a config.json is; null is as good as absent, as transformers writes it.
_IDENTITY = {"model_type": _TEXT, "architectures": _TEXTS}
_OF_TIMM = {
    "architecture": _TEXT,
    "model_args": _OBJECT,
    "label_names": _TEXTS,
    "num_classes": _Kind("a whole number", lambda value: isinstance(value, int)),
}

_SHAPE_FIELDS = {
    **dict.fromkeys(("image_size", "patch_size"), _SIDE),
    **dict.fromkeys(
        ("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), _COUNT
    ),
    **dict.fromkeys(("layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob"), _NUMBER),
    **dict.fromkeys(("mlp_ratio", "layerscale_value", "rope_theta", "drop_path_rate"), _NUMBER),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("vision_config", "label2id", "quantization_config"), _OBJECT),
    "hidden_act": _TEXT,
    "id2label": _LABELS,
}
_TIMM_ARGUMENTS = {
    **dict.fromkeys(("depth", "embed_dim", "num_heads"), _COUNT),
    **dict.fromkeys(("img_size", "patch_size"), _SIDE),
}
_TIMM_PIXELS = {
    **dict.fromkeys(("mean", "std"), _STATISTICS),
    **dict.fromkeys(("crop_mode", "interpolation", "architecture"), _TEXT),
    "crop_pct": _NUMBER,
    "input_size": _SHAPE,
}
_PROCESSOR_FIELDS = {
    **dict.fromkeys(("size", "crop_size"), _SIZE),
    **dict.fromkeys(("image_mean", "image_std"), _STATISTIC),
    "image_processor_type": _TEXT,
}


def stored_fields(file: Path, source: str) -> dict[str, Any]:
    """Returns the object in a JSON file, whose identity is of the right kinds; `source` is for messages.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: no JSON, no object, or a field of another kind.
        EnvironmentFault: it cannot be read.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EnvironmentFault(
            f"{source}: {file.name} cannot be read ({error.strerror}); mend its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: its {file.name} is no JSON ({error}); get it again") from error
    if not isinstance(config, dict):
        raise InputError(f"{source}: its {file.name} holds no fields; get it again")
    _check(config, _IDENTITY, f"{source}: {file.name}")
    return config


def check_shape_fields(config: Mapping[str, Any], kind: str, source: str) -> None:
    """Raises InputError naming the field of a config.json that cannot be what a code of this kind wrote."""
    where = f"{source}: config.json"
    if kind != "timm":
        _check(config, _SHAPE_FIELDS, where)
        _check(config.get("vision_config") or {}, _SHAPE_FIELDS, f"{where}, vision_config")
        return
    if not isinstance(config.get("pretrained_cfg", {}), dict):
        raise InputError(
            f"{where}: pretrained_cfg={config['pretrained_cfg']!r} must be an object; mend it or leave it out"
        )
    _check(config, _OF_TIMM, where)
    _check(config.get("model_args") or {}, _TIMM_ARGUMENTS, f"{where}, model_args")
    _check(config.get("pretrained_cfg", config), _TIMM_PIXELS, f"{where}, pretrained_cfg")


def check_processor_fields(folder: Path, source: str) -> None:
    """Raises InputError naming the field of the image processor's file that cannot be right; no file is right."""
    for name in _PROCESSOR_FILES:
        if not (folder / name).is_file():
            continue
        fields = stored_fields(folder / name, source)
        where = f"{source}: {name}"
        if isinstance(fields.get("image_processor"), dict):
            fields, where = fields["image_processor"], f"{where}, image_processor"
        _check(fields, _PROCESSOR_FIELDS, where)
        factor = fields.get("rescale_factor", 1)
        if fields.get("do_rescale", True) and not (_is_number(factor) and factor > 0):
            raise InputError(f"{where}: rescale_factor={factor!r} must be a number above 0; mend it there")


def _check(fields: Mapping[str, Any], kinds: Mapping[str, _Kind], where: str) -> None:
    for name, kind in kinds.items():
        value = fields.get(name)
        if value is not None and not kind.fits(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
            raise InputError(f"{where}: {name}={shown} must be {kind.words}; mend it there or get the file again")

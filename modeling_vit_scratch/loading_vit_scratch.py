"""Loading that is strict about the encoder, and the input fields that may differ from the stored ones."""

import copy
import logging
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from .errors_vit_scratch import InputError

__all__ = ["INPUT_FIELDS", "check_loaded", "stored_input_fields", "with_fields"]

logger = logging.getLogger(__name__)

INPUT_FIELDS = ("image_size", "patch_size", "num_channels")
# What another of our models may leave out: a classifier, or a head of self-supervised training.
TENSORS_OF_HEADS = (
    "attention_pooling.",
    "classifier.",
    "decoder.",
    "distillation_classifier.",
    "mask_token",
    "pooler.",
    "prediction_head.",
    "vit.attention_pooling.",
    "vit.pooler.",
)
_HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def stored_input_fields(path: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the input fields stored at `path`, defaults where there are none, if it holds one of our configs."""
    hub_kwargs = {name: kwargs[name] for name in _HUB_KWARGS if name in kwargs}
    stored, _ = PreTrainedConfig.get_config_dict(path, **hub_kwargs)
    if stored.get("model_type") != config.model_type:
        return {}
    return {name: stored.get(name, getattr(type(config), name)) for name in INPUT_FIELDS}


def with_fields(config: PreTrainedConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    """Returns a copy of `config` with these fields; the caller validates it."""
    config = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def check_loaded(model: PreTrainedModel, info: dict[str, Any], source: Any) -> None:
    """Raises unless the whole encoder came from the checkpoint and nothing of the checkpoint was without a place."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    encoder = {prefix + name for name in model.base_model.state_dict()}
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    new = set(info["missing_keys"]) | mismatched
    # New as a whole where the encoder is a self-supervised model's; beside a stored classifier they are lost.
    if not hasattr(model, "classifier") or "classifier.weight" in new:
        for head in ("attention_pooling.", "pooler."):
            of_head = {name for name in encoder if name.startswith(prefix + head)}
            if of_head <= set(info["missing_keys"]):
                encoder -= of_head
    missing = sorted(new & encoder)
    left_out = cast(tuple[str, ...], model.left_out)
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.startswith((*TENSORS_OF_HEADS, *left_out)))
    if missing or unexpected:
        raise InputError(
            f"{source or 'the state dict'} is not a checkpoint of this {type(model).__name__}: "
            f"missing or of another shape {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
        )
    if new:
        logger.warning("newly initialised, so train before use: %s", ", ".join(sorted(new)))
    of_heads = sorted(key for key in info["unexpected_keys"] if not key.startswith(left_out))
    if of_heads:
        logger.warning("left out, since this model has no such head: %s", ", ".join(of_heads))
    parts = [part for part in left_out if any(key.startswith(part) for key in info["unexpected_keys"])]
    if parts:
        logger.warning("left out, since no output depends on them: %s", ", ".join(part.rstrip(".") for part in parts))

"""Models and image processors from a folder, file or Hub repo, with errors that name it.

What is no vit_scratch checkpoint is converted in memory, and compared with the original before anything is made of it.
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from modeling_vit_scratch import (
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchImageProcessor,
    ViTScratchModel,
)
from modeling_vit_scratch.convert_proof_vit_scratch import built
from modeling_vit_scratch.convert_vit_scratch import convert, is_vit_scratch, locate, weight_files
from modeling_vit_scratch.errors_vit_scratch import InputError
from training.conversion import CONVERSION_FILE, conversion_record, describe, proven
from training.reading import reading
from training.run_folder import RECIPE_FILE, read_json

__all__ = [
    "Converted",
    "class_names_of",
    "conversion_of",
    "forget_converted",
    "load_classifier",
    "load_config",
    "load_processor",
    "with_new_head",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Converted:
    """A checkpoint of another code, as ours."""

    model: PreTrainedModel
    image_processor: ViTScratchImageProcessor
    record: dict[str, Any]
    """What conversion.json says of it."""


def converted(source: str, revision: str | None = None) -> Converted | None:
    """Returns what a checkpoint of another code becomes, proven to be equal; None for a vit_scratch checkpoint."""
    if _is_ours(source, revision):
        return None
    path = Path(source)
    files = [*weight_files(path), *path.glob("*.json")] if path.exists() else []
    stamp = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _convert(source, revision, stamp)


# The last one only: a verb asks for config, processor and weights of one source in turn.
@functools.lru_cache(maxsize=1)
def _convert(source: str, revision: str | None, stamp: tuple[tuple[str, int, int], ...]) -> Converted:
    path = reading(lambda: locate(source, revision), source)
    conversion = reading(lambda: convert(path, source=source), source)
    for line in describe(conversion):
        logger.info(line)
    differences = proven(conversion, None, say=logger.info)
    record = conversion_record(source, weight_files(path), [(conversion, differences)])
    return Converted(conversion.model, conversion.image_processor, record)


def forget_converted() -> None:
    """Frees the last converted checkpoint, once a verb has all that it makes of it."""
    _convert.cache_clear()


def _is_ours(source: str, revision: str | None) -> bool:
    path = Path(source)
    return reading(lambda: is_vit_scratch(path), source) if path.exists() else _is_ours_on_the_hub(source, revision)


@functools.lru_cache(maxsize=1)  # a request each
def _is_ours_on_the_hub(source: str, revision: str | None) -> bool:
    stored, _ = reading(lambda: PreTrainedConfig.get_config_dict(source, revision=revision), source)
    return stored.get("model_type") == ViTScratchConfig.model_type


def conversion_of(source: str, revision: str | None = None) -> dict[str, Any] | None:
    """Returns the conversion.json of a source that is, or was converted from, a checkpoint of another code.

    None for a training run, whatever that started from: its weights are its own.
    """
    found = converted(source, revision)
    if found is not None:
        return found.record
    stored = Path(source) / CONVERSION_FILE
    is_run = (Path(source) / RECIPE_FILE).is_file()
    return read_json(stored) if stored.is_file() and not is_run else None


def load_config(source: str, revision: str | None = None) -> ViTScratchConfig:
    """Returns the configuration stored in a folder or Hub repo, or that of a converted checkpoint."""
    found = converted(source, revision)
    if found is not None:
        return cast(ViTScratchConfig, copy.deepcopy(found.model.config))
    config = reading(lambda: ViTScratchConfig.from_pretrained(source, revision=revision or "main"), source)
    for name in ("auto_map", "custom_pipelines"):  # a published model's; what is trained from it is not published yet
        vars(config).pop(name, None)
    return config


def load_classifier(
    source: str, revision: str | None = None, *, hidden_dropout_prob: float | None = None
) -> ViTScratchForImageClassification:
    """Returns the classifier stored in a folder or Hub repo, its head included."""
    config = load_config(source, revision)
    if hidden_dropout_prob is not None:
        config.hidden_dropout_prob = hidden_dropout_prob
        config.validate()
    if (found := converted(source, revision)) is not None:
        return _converted_classifier(found, config, source)
    model, info = reading(
        lambda: ViTScratchForImageClassification.from_pretrained(
            source, config=config, revision=revision, output_loading_info=True, dtype="float32"
        ),
        source,
    )
    if info["missing_keys"]:
        raise InputError(f"{source} has no trained classifier: {', '.join(sorted(info['missing_keys']))} are missing")
    return model


def _converted_classifier(found: Converted, config: ViTScratchConfig, source: str) -> ViTScratchForImageClassification:
    if not isinstance(found.model, ViTScratchForImageClassification):
        raise InputError(f"{source} has no trained classifier, it is an encoder; fine-tune it first")
    tensors = {name: tensor.float() for name, tensor in found.model.state_dict().items()}
    return cast(ViTScratchForImageClassification, built(ViTScratchForImageClassification, config, tensors, source))


def load_processor(source: str, revision: str | None = None) -> ViTScratchImageProcessor:
    """Returns the image processor stored beside a model, or that of a converted checkpoint."""
    found = converted(source, revision)
    if found is not None:
        return copy.deepcopy(found.image_processor)
    return reading(lambda: ViTScratchImageProcessor.from_pretrained(source, revision=revision or "main"), source)


def with_new_head(
    source: str, revision: str | None, class_names: list[str], *, hidden_dropout_prob: float | None
) -> ViTScratchForImageClassification:
    """Returns the stored encoder under a zero-initialised linear head, without pre-logits layer (section 3.2)."""
    if (found := converted(source, revision)) is not None:
        encoder = found.model.base_model
    else:
        encoder = reading(lambda: ViTScratchModel.from_pretrained(source, revision=revision, dtype="float32"), source)
    config = load_config(source, revision)
    config.representation_size = None
    config.head_bias_init = 0.0
    config.problem_type = "single_label_classification"
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: index for index, name in enumerate(class_names)}
    if hidden_dropout_prob is not None:
        config.hidden_dropout_prob = hidden_dropout_prob
    config.validate()
    model = ViTScratchForImageClassification(config)
    tensors = {name: value for name, value in encoder.state_dict().items() if not name.startswith("pooler.")}
    model.vit.load_state_dict(tensors, strict=True)
    return model


def class_names_of(config: ViTScratchConfig) -> list[str]:
    """Returns the names of the classes in the order of their indices."""
    names = cast(dict[int, str], config.id2label)
    return [names[index] for index in range(len(names))]

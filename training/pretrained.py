"""Models and image processors from a folder or a Hub repo, with errors that name it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from modeling_vit_scratch import (
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchImageProcessor,
    ViTScratchModel,
)
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["class_names_of", "load_classifier", "load_config", "load_processor", "with_new_head"]

Loaded = TypeVar("Loaded")


def load_config(source: str, revision: str | None = None) -> ViTScratchConfig:
    """Returns the configuration stored in a folder or Hub repo."""
    stored, _ = _load(lambda: PreTrainedConfig.get_config_dict(source, revision=revision), source)
    if not stored:
        raise InputError(f"model_name_or_path={source}: there is no config.json, so no model")
    if stored.get("model_type") != ViTScratchConfig.model_type:
        raise InputError(
            f"{source} holds a model of type {stored.get('model_type')!r}; this command takes vit_scratch checkpoints"
        )
    config = _load(lambda: ViTScratchConfig.from_pretrained(source, revision=revision or "main"), source)
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
    model, info = _load(
        lambda: ViTScratchForImageClassification.from_pretrained(
            source, config=config, revision=revision, output_loading_info=True, dtype="float32"
        ),
        source,
    )
    if info["missing_keys"]:
        raise InputError(f"{source} has no trained classifier: {', '.join(sorted(info['missing_keys']))} are missing")
    return model


def load_processor(source: str, revision: str | None = None) -> ViTScratchImageProcessor:
    """Returns the image processor stored beside a model."""
    return _load(lambda: ViTScratchImageProcessor.from_pretrained(source, revision=revision or "main"), source)


def with_new_head(
    source: str, revision: str | None, class_names: list[str], *, hidden_dropout_prob: float | None
) -> ViTScratchForImageClassification:
    """Returns the stored encoder under a zero-initialised linear head, without pre-logits layer (section 3.2)."""
    encoder = _load(lambda: ViTScratchModel.from_pretrained(source, revision=revision, dtype="float32"), source)
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


def _load(load: Callable[[], Loaded], source: str) -> Loaded:
    try:
        return load()
    except SafetensorError as error:
        raise InputError(f"model_name_or_path={source}: its weights are damaged ({error}); get them again") from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        if not Path(source).is_dir() and ("/" not in source or source.startswith(("/", "."))):
            reason = "no such folder"
        elif _is_unreachable(error):
            raise EnvironmentFault(f"model_name_or_path={source}: {reason} Try again, or name a folder.") from error
        raise InputError(f"model_name_or_path={source}: {reason}") from error


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether the Hub could not be asked, as far as the causes of an error tell."""
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return True
        if isinstance(error, HfHubHTTPError) and error.response.status_code >= 500:
            return True
        error = error.__cause__
    return False

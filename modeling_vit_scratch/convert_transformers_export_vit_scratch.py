"""Our models as transformers' ViT, which needs no code of ours."""

import logging
from collections import Counter
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, ViTConfig, ViTImageProcessor
from transformers.initialization import no_init_weights

from .convert_transformers_processors_vit_scratch import to_vit_processor
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor

__all__ = ["to_transformers_vit"]

logger = logging.getLogger(__name__)

# What transformers' ViT is, in our fields.
ONLY_VALUES = {
    "stem_depths": None,
    "position_embedding_type": "learned_1d",
    "position_embedding_placement": "stem",
    "class_token_position": True,
    "use_distillation_token": False,
    "num_register_tokens": 0,
    "pooling": "class_token",
    "final_norm": "before_pooling",
    "mlp_type": "mlp",
    "qk_norm": False,
    "layer_scale_init": None,
}
SHARED_FIELDS = (
    "image_size",
    "patch_size",
    "num_channels",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "qkv_bias",
)
CLASSES = {"ViTScratchModel": "ViTModel", "ViTScratchForImageClassification": "ViTForImageClassification"}


def to_transformers_vit(
    model: PreTrainedModel, image_processor: ViTScratchImageProcessor
) -> tuple[PreTrainedModel, ViTImageProcessor]:
    """Returns the model as `ViTModel` or `ViTForImageClassification`, and its `ViTImageProcessor`.

    What differs in training only, or at another image size, is logged.

    Raises:
        InputError: names the field, and its value, that transformers' ViT or its processor does not have.
    """
    return _vit_of(model), to_vit_processor(image_processor)


def _vit_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model as `ViTModel` or `ViTForImageClassification`: the same tensors in their dtypes."""
    name, config = type(model).__name__, model.config
    _check(name, config)
    fields: dict[str, Any] = {field: getattr(config, field) for field in SHARED_FIELDS}
    fields |= {"pooler_output_size": config.representation_size, "problem_type": config.problem_type}
    arguments = {}
    if name == "ViTScratchForImageClassification":
        fields |= {"id2label": config.id2label, "label2id": config.label2id}
    else:
        arguments["add_pooling_layer"] = config.representation_size is not None
    tensors = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    with no_init_weights():  # every tensor is overwritten
        vit = getattr(transformers, CLASSES[name])(ViTConfig(**fields), **arguments)
    if vit.state_dict().keys() != tensors.keys():
        surplus = sorted(tensors.keys() ^ vit.state_dict().keys())
        raise InputError(
            f"the model's tensors are not plain ones of a {name}: {', '.join(surplus[:4])}; merge adapters and undo "
            "quantisation first"
        )
    vit.load_state_dict(tensors, strict=True, assign=True)
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    vit.config.dtype = dtypes.most_common(1)[0][0]
    return vit.eval()


def _check(name: str, config: PreTrainedConfig) -> None:
    if name not in CLASSES:
        raise InputError(f"a {name} has no counterpart in transformers' ViT; export one of {', '.join(CLASSES)}")
    for field, only in ONLY_VALUES.items():
        if (value := getattr(config, field)) != only:
            raise InputError(f"{field}={value!r} has no counterpart in transformers' ViT, where it is {only!r}")
    if config.representation_size is not None and name == "ViTScratchForImageClassification":
        raise InputError(
            f"representation_size={config.representation_size} has no counterpart in ViTForImageClassification, which "
            "reads the class token itself; only a ViTScratchModel keeps its pre-logits layer, as ViTModel's pooler"
        )
    if config.position_interpolation != "bicubic":
        logger.warning(
            "position_interpolation=%r: at other image sizes transformers' ViT resamples positions by bicubic",
            config.position_interpolation,
        )
    for field in ("drop_path_rate", "patch_dropout_rate"):
        if getattr(config, field):
            logger.warning("%s=%s is left out: in training transformers' ViT has none", field, getattr(config, field))
    if config.hidden_dropout_prob:
        logger.warning(
            "hidden_dropout_prob=%s: in training transformers' ViT has no dropout after the activation of the MLP",
            config.hidden_dropout_prob,
        )

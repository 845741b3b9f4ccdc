"""Checkpoints of transformers' ViT, DeiT, DINOv2, DINOv3, SigLIP and ViTMAE as ours, and ours as transformers' ViT.

transformers itself loads the source, under its old and its new tensor names, and that model is the reference.
B images, C channels, H x W pixels, N patches.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from torch import Tensor

from .checkpoint_files_vit_scratch import read_tensors
from .configuration_vit_scratch import ViTScratchConfig
from .conversion_vit_scratch import Conversion, built, proof_dtype
from .convert_transformers_names_vit_scratch import (
    backbone_fields,
    decoder_fields,
    decoder_tensors,
    encoder_fields,
    encoder_tensors,
    label_fields,
    without_distillation,
)
from .convert_transformers_processors_vit_scratch import from_transformers_processor, to_vit_processor
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from .pretraining_vit_scratch import ViTScratchForMaskedAutoencoding

__all__ = ["MODEL_TYPES", "from_transformers", "to_transformers_vit"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """How a checkpoint of one architecture is read."""

    loaded_as: str
    """Class of transformers that loads what is taken."""
    encoder: str = ""
    """Attribute of that class that is the encoder; "": itself."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not taken."""
    note: str = ""


_MASKED = {"left_out": ("decoder.",), "note": "the decoder of its pre-training is left out"}

MODEL_TYPES: dict[str, dict[str, Source]] = {
    "vit": {
        "ViTModel": Source("ViTModel"),
        "ViTForImageClassification": Source("ViTForImageClassification", "vit"),
        "ViTForMaskedImageModeling": Source("ViTModel", **_MASKED),
    },
    "deit": {
        "DeiTModel": Source("DeiTModel"),
        "DeiTForImageClassification": Source("DeiTForImageClassification", "deit"),
        "DeiTForImageClassificationWithTeacher": Source("DeiTForImageClassificationWithTeacher", "deit"),
        "DeiTForMaskedImageModeling": Source("DeiTModel", **_MASKED),
    },
    "dinov2": {
        "Dinov2Model": Source("Dinov2Model"),
        "Dinov2ForImageClassification": Source("Dinov2ForImageClassification", "dinov2"),
        "Dinov2Backbone": Source("Dinov2Model"),
    },
    "dinov2_with_registers": {
        "Dinov2WithRegistersModel": Source("Dinov2WithRegistersModel"),
        "Dinov2WithRegistersForImageClassification": Source(
            "Dinov2WithRegistersForImageClassification", "dinov2_with_registers"
        ),
        "Dinov2WithRegistersBackbone": Source("Dinov2WithRegistersModel"),
    },
    "dinov3_vit": {"DINOv3ViTModel": Source("DINOv3ViTModel"), "DINOv3ViTBackbone": Source("DINOv3ViTModel")},
    "siglip": {
        "SiglipModel": Source(
            "SiglipVisionModel", left_out=("text_model.", "logit_"), note="the text tower is left out"
        ),
        "SiglipForImageClassification": Source("SiglipForImageClassification", "vision_model"),
        "SiglipVisionModel": Source("SiglipVisionModel"),
    },
    "siglip_vision_model": {"SiglipVisionModel": Source("SiglipVisionModel")},
    "vit_mae": {
        "ViTMAEModel": Source("ViTMAEModel"),
        "ViTMAEForPreTraining": Source("ViTMAEForPreTraining", "vit"),
    },
}

# Tensors of the encoder that nothing here reads, so that it may lack them.
_OPTIONAL = ("pooler.", "embeddings.mask_token", "vision_model.head.")
_INTERPOLATING_ON_REQUEST = ("vit", "deit", "vit_mae", "siglip", "siglip_vision_model")


def from_transformers(folder: str | Path, *, keep_distillation: bool = True) -> Conversion:
    """Returns the checkpoint in `folder`, of one of `MODEL_TYPES`, as a model and an image processor of ours.

    Args:
        folder: holds config.json, the weights and, best, preprocessor_config.json. Nothing in it is run.
        keep_distillation: False drops a DeiT's distillation token, its position and its head.

    Raises:
        InputError: another kind of model, a field without counterpart, a missing, damaged or surplus tensor.
    """
    folder = Path(folder)
    architecture, source = _source_of(folder, _stored_config(folder))
    theirs, notes = _loaded(folder, source)
    encoder = getattr(theirs, source.encoder) if source.encoder else theirs
    fields, more_notes = encoder_fields(encoder.config, str(folder))
    tensors, tensor_notes = encoder_tensors(encoder.config, encoder.state_dict())
    notes += more_notes + tensor_notes
    if encoder.config.model_type == "deit":
        tensors = _with_distillation(architecture, tensors, fields, notes, keep_distillation)
    model_class: type[PreTrainedModel] = ViTScratchModel
    if architecture.endswith("Backbone"):
        more, more_notes = backbone_fields(encoder.config)
        fields, notes = fields | more, notes + more_notes
    elif source.encoder:
        model_class, tensors, more, more_notes = _with_head(theirs, tensors, str(folder))
        fields, notes = fields | more, notes + more_notes
    if "pooler.dense.weight" in tensors:
        _check_pooler(encoder.config, folder)
        fields["representation_size"] = encoder.config.pooler_output_size
    config = _config(fields, str(folder))
    model = built(model_class, config, tensors, str(folder))
    processor, more_notes = from_transformers_processor(folder, encoder.config.model_type, config)
    conversion = Conversion(str(folder), model, processor, _reference_of(theirs, model), proof_dtype(model), notes + more_notes)
    return conversion

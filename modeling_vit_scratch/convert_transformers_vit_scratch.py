"""Checkpoints of transformers' ViT, DeiT, DINOv2, DINOv3, SigLIP and ViTMAE as ours, and ours as transformers' ViT.

transformers itself loads the source, under its old and its new tensor names, and that model is the reference.
B images, C channels, H x W pixels, N patches.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from .configuration_vit_scratch import ViTScratchConfig
from .convert_config_vit_scratch import check_shape_fields, stored_fields
from .convert_files_vit_scratch import read_tensors
from .convert_messages_vit_scratch import one_line, some
from .convert_proof_vit_scratch import Conversion, built, proof_dtype
from .convert_transformers_export_vit_scratch import to_transformers_vit
from .convert_transformers_names_vit_scratch import (
    backbone_fields,
    decoder_fields,
    decoder_tensors,
    encoder_fields,
    encoder_tensors,
    height_width,
    label_fields,
    without_distillation,
)
from .convert_transformers_processors_vit_scratch import from_transformers_processor
from .errors_vit_scratch import InputError
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from .pretraining_vit_scratch import ViTScratchForMaskedAutoencoding, evaluation_noise

__all__ = ["ARCHITECTURES", "from_transformers", "to_transformers_vit"]


@dataclass(frozen=True)
class Architecture:
    """How a checkpoint of one class of transformers is read."""

    loaded_as: str
    """The class of transformers that loads what is taken."""
    encoder: str = ""
    """Attribute of that class that is the encoder; "": itself."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not taken."""
    note: str = ""


_MASKED = ("decoder.",), "the mask token and the decoder of its pre-training are left out"
_TEXT = ("text_model.", "logit_"), "the text tower is left out"

# By model_type and class name, as in config.json.
ARCHITECTURES: dict[str, dict[str, Architecture]] = {
    "vit": {
        "ViTModel": Architecture("ViTModel"),
        "ViTForImageClassification": Architecture("ViTForImageClassification", "vit"),
        "ViTForMaskedImageModeling": Architecture("ViTModel", "", *_MASKED),
    },
    "deit": {
        "DeiTModel": Architecture("DeiTModel"),
        "DeiTForImageClassification": Architecture("DeiTForImageClassification", "deit"),
        "DeiTForImageClassificationWithTeacher": Architecture("DeiTForImageClassificationWithTeacher", "deit"),
        "DeiTForMaskedImageModeling": Architecture("DeiTModel", "", *_MASKED),
    },
    "dinov2": {
        "Dinov2Model": Architecture("Dinov2Model"),
        "Dinov2Backbone": Architecture("Dinov2Model"),
        "Dinov2ForImageClassification": Architecture("Dinov2ForImageClassification", "dinov2"),
    },
    "dinov2_with_registers": {
        "Dinov2WithRegistersModel": Architecture("Dinov2WithRegistersModel"),
        "Dinov2WithRegistersBackbone": Architecture("Dinov2WithRegistersModel"),
        "Dinov2WithRegistersForImageClassification": Architecture(
            "Dinov2WithRegistersForImageClassification", "dinov2_with_registers"
        ),
    },
    "dinov3_vit": {
        "DINOv3ViTModel": Architecture("DINOv3ViTModel"),
        "DINOv3ViTBackbone": Architecture("DINOv3ViTModel"),
    },
    "siglip": {
        "SiglipModel": Architecture("SiglipVisionModel", "", *_TEXT),
        "SiglipVisionModel": Architecture("SiglipVisionModel"),
        "SiglipForImageClassification": Architecture("SiglipForImageClassification", "vision_model"),
    },
    "siglip_vision_model": {"SiglipVisionModel": Architecture("SiglipVisionModel")},
    "vit_mae": {
        "ViTMAEModel": Architecture("ViTMAEModel"),
        "ViTMAEForPreTraining": Architecture("ViTMAEForPreTraining", "vit"),
    },
}

# Read by nothing here, so that a checkpoint may lack them, or hold them where its class has no place for them.
_MAY_LACK = r"^pooler\.|^vision_model\.head\.|embeddings\.mask_token$"
_MAY_BE_SURPLUS = r"embeddings\.mask_token$|\.position_ids$|pooler\.dense\.(weight|bias)$"

# What transformers' classes raise where a config holds what they do not check.
_STUMBLES = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)

_INTERPOLATING_ON_REQUEST = ("vit", "deit", "vit_mae", "siglip", "siglip_vision_model")


@dataclass
class _Draft:
    """What our model will be made of."""

    source: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)

    def add(self, part: tuple[dict[str, Any], list[str]]) -> None:
        self.fields |= part[0]
        self.notes += part[1]


def from_transformers(folder: str | Path, *, keep_distillation: bool = True) -> Conversion:
    """Returns the checkpoint in `folder`, of one of `ARCHITECTURES`, as a model and an image processor of ours.

    Args:
        folder: holds config.json, the weights and, best, preprocessor_config.json. No code in it is run.
        keep_distillation: False drops a DeiT's distillation token, its position and its head.

    Raises:
        InputError: another kind of model, a field without counterpart, a missing, damaged or surplus tensor.
    """
    folder = Path(folder)
    name, architecture = _architecture_of(folder)
    theirs = _loaded(folder, architecture)
    encoder = getattr(theirs, architecture.encoder) if architecture.encoder else theirs
    draft = _Draft(str(folder), {}, {}, [architecture.note] if architecture.note else [])
    draft.add(encoder_fields(encoder.config, draft.source))
    draft.tensors, notes = encoder_tensors(encoder.config, encoder.state_dict())
    draft.notes += notes
    if encoder.config.model_type == "deit":
        _settle_distillation(draft, name, encoder, keep_distillation)
    if name.endswith("Backbone"):
        draft.add(backbone_fields(encoder.config))
    _settle_pooler(draft, encoder.config)
    model_class = _add_head(draft, name, theirs) if architecture.encoder else ViTScratchModel
    config = _config(draft)
    model = built(model_class, config, draft.tensors, draft.source)
    processor, notes = from_transformers_processor(folder, encoder.config.model_type, config)
    reference = _Reference(theirs, encoder, model)
    return Conversion(
        source=draft.source,
        model=model,
        image_processor=processor,
        reference=reference,
        reference_dtype=reference.dtype,
        notes=draft.notes + notes,
    )


def _architecture_of(folder: Path) -> tuple[str, Architecture]:
    """Returns the class named by config.json, and how it is read."""
    file = folder / "config.json"
    try:
        stored = stored_fields(file, str(folder))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no config.json; name the folder of a transformers checkpoint") from None
    model_type = stored.get("model_type")
    known = ARCHITECTURES.get(model_type or "")
    if known is None:
        raise InputError(
            f"{file}: model_type={model_type!r} is not converted; it must be one of {', '.join(ARCHITECTURES)}"
        )
    names = stored.get("architectures") or []
    if len(names) != 1 or names[0] not in known:
        raise InputError(f"{file}: architectures={names} must name one of {', '.join(known)}")
    if stored.get("quantization_config") is not None:
        raise InputError(f"{file}: quantization_config: a quantised checkpoint is not converted; dequantise it first")
    check_shape_fields(stored, str(model_type), str(folder))
    vision_type = (stored.get("vision_config") or {}).get("model_type", "siglip_vision_model")
    if vision_type != "siglip_vision_model":
        raise InputError(f"{file}: vision_config: model_type={vision_type!r} must be 'siglip_vision_model'")
    return names[0], known[names[0]]


def _loaded(folder: Path, architecture: Architecture) -> Any:
    """Returns transformers' model, every tensor of which came from the folder, in the widest dtype found there."""
    tensors = read_tensors(folder)
    dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = torch.float32 if not dtypes else dtypes[0]
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    taken = {name: tensor for name, tensor in tensors.items() if not name.startswith(architecture.left_out or ("\0",))}
    model_class = getattr(transformers, architecture.loaded_as)
    try:
        with _quiet():
            config = model_class.config_class.from_pretrained(folder, local_files_only=True)
            theirs, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=taken,
                dtype=dtype,
                attn_implementation="sdpa",  # the eager one takes its softmax in float32
                ignore_mismatched_sizes=True,  # and reported below
                output_loading_info=True,
            )
    except (StrictDataclassError, *_STUMBLES) as error:
        raise InputError(f"{folder / 'config.json'}: transformers cannot load it: {one_line(error)}") from error
    _check_tensors(folder, info)
    if any(name.startswith("pooler.") for name in info["missing_keys"]):
        theirs.pooler = None
    return theirs.eval()


def _check_tensors(folder: Path, info: Mapping[str, Any]) -> None:
    problems = {
        "missing": [name for name in info["missing_keys"] if not re.search(_MAY_LACK, name)],
        "without a place": [name for name in info["unexpected_keys"] if not re.search(_MAY_BE_SURPLUS, name)],
        "of another shape": [name for name, *_ in info["mismatched_keys"]],
    }
    listed = "; ".join(f"{kind}: {some(sorted(names))}" for kind, names in problems.items() if names)
    if listed:
        raise InputError(f"{folder}: the tensors are not those of its config.json: {listed}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own report of the tensors: ours is `_check_tensors` and the notes."""
    verbosity, had_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


def _settle_distillation(draft: _Draft, name: str, encoder: PreTrainedModel, keep: bool) -> None:
    """A distillation token with a head stays one; without a head it is a register; or it goes."""
    if not keep:
        draft.tensors = without_distillation(draft.tensors, as_register=False)
        draft.notes.append(
            "the distillation token, its position and its head are dropped as asked: outputs differ from the "
            "source's, and the reference is the source with the token taken out before its first layer"
        )
        encoder.get_submodule("embeddings").register_forward_hook(_take_out_distillation_token)
    elif name == "DeiTForImageClassificationWithTeacher":
        draft.fields["use_distillation_token"] = True
    else:
        draft.tensors = without_distillation(draft.tensors, as_register=True)
        draft.fields["num_register_tokens"] = 1
        draft.notes.append(
            "the distillation token, which no head of this checkpoint reads, is a register here: its position is "
            "added to it, in the dtype of the checkpoint; the original is compared with the same rounding"
        )
        _add_position_to_distillation_token(encoder)


def _take_out_distillation_token(_module: Any, _inputs: Any, tokens: Tensor) -> Tensor:
    return torch.cat((tokens[:, :1], tokens[:, 2:]), dim=1)


@torch.no_grad()
def _add_position_to_distillation_token(encoder: Any) -> None:
    """Rounds the sum once, in the checkpoint's dtype, so that a reference in a wider one adds no other rounding."""
    embeddings = encoder.embeddings
    embeddings.distillation_token += embeddings.position_embeddings[:, 1:2]
    embeddings.position_embeddings[:, 1] = 0


def _settle_pooler(draft: _Draft, config: PreTrainedConfig) -> None:
    if "pooler.dense.weight" not in draft.tensors:
        return
    if config.pooler_act != "tanh":
        raise InputError(f"{draft.source}: pooler_act={config.pooler_act!r} has no counterpart; it must be 'tanh'")
    draft.fields["representation_size"] = config.pooler_output_size


def _add_head(draft: _Draft, name: str, theirs: Any) -> type[PreTrainedModel]:
    """Puts the head's fields and tensors beside those of the encoder, and returns the class of ours that has it."""
    draft.tensors = {f"vit.{key}": tensor for key, tensor in draft.tensors.items()}
    if name == "ViTMAEForPreTraining":
        draft.fields |= decoder_fields(theirs.config)
        draft.tensors |= decoder_tensors(theirs.decoder.state_dict())
        return ViTScratchForMaskedAutoencoding
    draft.add(label_fields(theirs.config, draft.source))
    if name.startswith("Dinov2"):
        draft.fields["pooling"] = "class_token_and_mean"
    if name.startswith("Siglip"):
        draft.fields["pooling"] = "mean"
        unread = [key for key in draft.tensors if key.startswith("vit.attention_pooling.")]
        if unread:
            draft.notes.append("the attention head, which the classifier does not read, is left out")
        for key in unread:
            del draft.tensors[key]
    heads = {key: tensor for key, tensor in theirs.state_dict().items() if "classifier." in key}
    if not draft.fields.get("use_distillation_token"):
        heads = {key: tensor for key, tensor in heads.items() if not key.startswith("distillation_")}
    draft.tensors |= {key.removeprefix("cls_"): tensor for key, tensor in heads.items()}
    return ViTScratchForImageClassification


def _config(draft: _Draft) -> ViTScratchConfig:
    try:
        return ViTScratchConfig(**draft.fields)
    except (StrictDataclassError, ValueError) as error:
        raise InputError(f"{draft.source}: config.json: {one_line(error)}") from error


class _Reference:
    """The original's outputs for pixel values (B, C, H, W) of `dtype`: of its encoder, and the logits of its head."""

    def __init__(self, theirs: Any, encoder: Any, model: PreTrainedModel):
        self.theirs, self.encoder, self.dtype = theirs, encoder, proof_dtype(model)
        self.own_size = height_width(encoder.config.image_size)
        self.config: Any = copy.deepcopy(model.config)  # of now: the model may be resized

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        self.theirs.to(self.dtype)
        if self.encoder.config.model_type == "vit_mae":
            return self._of_mae(pixel_values)
        filled_size = self.config.image_height_width
        if tuple(pixel_values.shape[2:]) == filled_size:  # the original drops what fills no patch
            rows, columns = (own - filled for own, filled in zip(self.own_size, filled_size, strict=True))
            pixel_values = torch.nn.functional.pad(pixel_values, (0, columns, 0, rows))
        kwargs = self._interpolation(pixel_values)
        outputs = self.encoder(pixel_values, **kwargs)
        if self.theirs is self.encoder:
            names = ("last_hidden_state", "pooler_output")
            return {name: outputs[name] for name in names if outputs.get(name) is not None}
        head = self.theirs(pixel_values, **kwargs)
        has_lost_a_head = "cls_logits" in head and not self.config.use_distillation_token
        logits = head.cls_logits if has_lost_a_head else head.logits
        return {"last_hidden_state": outputs.last_hidden_state, "logits": logits}

    def _interpolation(self, pixel_values: Tensor) -> dict[str, Any]:
        """Returns what asks the original to resample its positions, where it must be asked."""
        model_type = self.encoder.config.model_type
        if model_type not in _INTERPOLATING_ON_REQUEST or tuple(pixel_values.shape[2:]) == self.own_size:
            return {}
        rows, columns = self.config.grid_size
        if rows != columns or len(set(self.config.patch_height_width)) > 1:
            raise InputError(
                f"transformers' {model_type} cannot resample the positions of a grid ({rows}x{columns}) or of "
                f"patches that are not square; compare at {self.own_size[0]}x{self.own_size[1]} pixels"
            )
        return {"interpolate_pos_encoding": True}

    def _of_mae(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """The encoder hides nothing and keeps the order; the whole hides the patches that ours hides."""
        kwargs = self._interpolation(pixel_values)
        num_patches = math.prod(
            n // p for n, p in zip(pixel_values.shape[2:], self.config.patch_height_width, strict=True)
        )
        order = torch.arange(num_patches).expand(len(pixel_values), -1)
        mask_ratio, self.encoder.config.mask_ratio = self.encoder.config.mask_ratio, 0.0
        outputs = {"last_hidden_state": self.encoder(pixel_values, noise=order, **kwargs).last_hidden_state}
        self.encoder.config.mask_ratio = mask_ratio
        if self.theirs is not self.encoder:
            noise = evaluation_noise(len(pixel_values), num_patches)
            outputs["logits"] = self.theirs(pixel_values, noise=noise, **kwargs).logits
        return outputs

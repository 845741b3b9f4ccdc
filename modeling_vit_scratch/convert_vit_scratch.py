"""Any checkpoint that the converters know, found out and read; and ours as those of others, read back by them."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .configuration_vit_scratch import ViTScratchConfig
from .convert_config_vit_scratch import check_processor_fields, check_shape_fields, stored_fields
from .convert_files_vit_scratch import checkpoint_kind, read_tensors
from .convert_messages_vit_scratch import some
from .convert_proof_vit_scratch import Conversion, proof_dtype
from .errors_vit_scratch import InputError
from .image_processing_vit_scratch import ViTScratchImageProcessor
from .modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

__all__ = [
    "FOREIGN_FORMATS",
    "ConversionOptions",
    "convert",
    "export",
    "is_vit_scratch",
    "load_vit_scratch",
    "locate",
    "save_vit_scratch",
    "weight_files",
]

FOREIGN_FORMATS = ("vit", "timm", "npz")
_PEERS = {"vit": "transformers", "timm": "timm", "npz": "NumPy"}

UNDERSTOOD = (
    "a folder or Hub repo of vit_scratch, of timm, or of transformers' ViT, DeiT, Dinov2, DINOv3, SigLIP or ViTMAE; "
    "an .npz of Google's code; an .onnx of Dinov2; a .safetensors, .pth, .pt or .bin with the tensor names of timm, "
    "DeiT, DINOv2 or torchvision"
)

# All that is fetched of a Hub repo: nothing that is pickled or run.
_HUB_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)

_NAMES_IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_WEIGHT_FILES = ("model*.safetensors", "pytorch_model.bin")

# What tells whose names the tensors of a bare file have: timm's, torchvision's, and those of transformers and ours.
_TIMM_KERNEL = "patch_embed.proj.weight"
_TORCHVISION_KERNEL = "conv_proj.weight"
_KERNELS_WITH_CONFIG = ("patch_embeddings.projection.weight", "patch_embedding.weight", "patch_embeddings.weight")


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """What a source may leave open. Given where the source leaves nothing open, an option is refused."""

    image_size: int | list[int] | None = None
    """Pixels, or [height, width]: of a bare file whose positions are those of no square; a vit_scratch model is
    resampled to it."""
    num_attention_heads: int | None = None
    """Of a bare file whose tensors do not tell."""
    drop_distillation: bool = False
    """Drops the distillation token and its head from a DeiT of transformers."""


def locate(source: str, revision: str | None = None) -> Path:
    """Returns the file or folder that `source` names; a Hub repo is fetched first.

    Raises:
        InputError: neither there nor the id of a repo. What huggingface_hub raises passes through.
    """
    path = Path(source)
    if path.exists():
        if revision is not None:
            raise InputError(f"--revision {revision} is of a Hub repo, and {source} lies on this disk; leave it out")
        # The weights of a folder whose config.json says more than the tensors.
        has_config = path.name in _NAMES_IN_FOLDER and (path.parent / "config.json").is_file()
        return path.parent if has_config else path
    try:
        validate_repo_id(source)
    except HFValidationError:
        raise InputError(
            f"{source}: no such file or folder, and no id of a Hub repo; what is understood: {UNDERSTOOD}"
        ) from None
    if "/" not in source or source.startswith(("/", ".")) or path.suffix in (".npz", ".onnx", ".safetensors", ".pth"):
        raise InputError(f"{source}: no such file or folder; what is understood: {UNDERSTOOD}")
    _kind_of_folder(Path(hf_hub_download(source, "config.json", revision=revision)).parent, source)
    folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(_HUB_FILES)))
    if not weight_files(folder):
        raise InputError(
            f"{source}: the repo holds no model.safetensors, and nothing pickled is fetched of a Hub repo; name one "
            "that has it, or a file that you trust"
        )
    return folder


def is_vit_scratch(path: Path) -> bool:
    """Whether the folder holds one of our own models."""
    if not path.is_dir():
        return False
    config = _stored_config(path, str(path))
    if config.get("model_type") != ViTScratchConfig.model_type:
        return False
    check_shape_fields(config, "vit_scratch", str(path))
    check_processor_fields(path, str(path))
    return True


def weight_files(path: Path) -> list[Path]:
    """Returns the files that hold the tensors of what `locate` found."""
    if path.is_file():
        return [path]
    found = {file for pattern in _WEIGHT_FILES for file in path.glob(pattern)}
    return sorted(found)


def convert(path: Path, *, source: str | None = None, options: ConversionOptions | None = None) -> Conversion:
    """Returns the checkpoint of another code as a model of ours, not yet compared with the original.

    Args:
        path: what `locate` returned.
        source: how the user named it, if otherwise.
        options: what the source leaves open.

    Raises:
        InputError: not understood, damaged, or of a network that has no place here.
        EnvironmentFault: the package that reads it is not installed.
    """
    source, options = source or str(path), options or ConversionOptions()
    conversion = _convert_folder(path, source, options) if path.is_dir() else _convert_file(path, source, options)
    conversion.source = source
    return conversion


def _convert_folder(path: Path, source: str, options: ConversionOptions) -> Conversion:
    kind = _kind_of_folder(path, source)
    if kind == "vit_scratch":
        raise InputError(
            f"{source} is a vit_scratch model already; --to {' or '.join(FOREIGN_FORMATS)} writes it otherwise"
        )
    if kind == "timm":
        from .convert_timm_vit_scratch import from_timm, read_timm_config

        _refuse_others(options, (), "a timm folder, whose config.json tells everything")
        config = read_timm_config(_stored_config(path, source))
        conversion = from_timm(read_tensors(path), source=source, **config)
        conversion.source_kind = f"timm's {config['architecture']}"
        return conversion
    from .convert_transformers_vit_scratch import from_transformers

    check_processor_fields(path, source)
    is_deit = kind == "deit"
    _refuse_others(options, ("drop_distillation",) if is_deit else (), f"transformers' {kind}")
    conversion = from_transformers(path, **({"keep_distillation": not options.drop_distillation} if is_deit else {}))
    conversion.source_kind = f"transformers' {kind}"
    return conversion


def _kind_of_folder(path: Path, source: str) -> str:
    """Returns "vit_scratch", "timm" or one of transformers' model types."""
    from .convert_transformers_vit_scratch import ARCHITECTURES

    config = _stored_config(path, source)
    model_type = config.get("model_type")
    if model_type == ViTScratchConfig.model_type or model_type in ARCHITECTURES:
        kind = str(model_type)
    elif "architecture" in config or "pretrained_cfg" in config:
        kind = "timm"
    else:
        raise InputError(f"{source} holds a model of type {model_type!r}; what is understood: {UNDERSTOOD}")
    check_shape_fields(config, kind, source)
    return kind


def _stored_config(folder: Path, source: str) -> dict[str, Any]:
    try:
        return stored_fields(folder / "config.json", source)
    except FileNotFoundError:
        raise InputError(f"{source}: there is no config.json, so no model; what is understood: {UNDERSTOOD}") from None


def _convert_file(path: Path, source: str, options: ConversionOptions) -> Conversion:
    kind = checkpoint_kind(path)
    if kind == "npz":
        from .convert_npz_vit_scratch import from_npz

        _refuse_others(options, ("image_size",), "an .npz file")
        conversion = from_npz(path, image_size=options.image_size)
        conversion.source_kind = "an npz file of Google's names"
    elif kind == "onnx":
        from .convert_onnx_vit_scratch import from_onnx

        _refuse_others(options, ("num_attention_heads",), "an .onnx file")
        conversion = from_onnx(path, num_attention_heads=options.num_attention_heads)
        conversion.source_kind = "a Dinov2 in an ONNX file"
    else:
        conversion = _convert_tensors(read_tensors(path), path, source, options)
    return conversion


def _convert_tensors(tensors: Mapping[str, Tensor], path: Path, source: str, options: ConversionOptions) -> Conversion:
    tensors = _without_wrapper(tensors)
    if _TIMM_KERNEL in tensors:
        from .convert_timm_vit_scratch import from_timm

        _refuse_others(options, ("image_size", "num_attention_heads"), "a file with timm's names")
        conversion = from_timm(
            tensors,
            source=source,
            num_attention_heads=options.num_attention_heads,
            image_size=options.image_size,
        )
        conversion.source_kind = "a state dict of timm's names"
        return conversion
    if _TORCHVISION_KERNEL in tensors:
        from .convert_torchvision_vit_scratch import from_torchvision

        _refuse_others(options, ("num_attention_heads",), "a file with torchvision's names")
        conversion = from_torchvision(tensors, source, num_attention_heads=options.num_attention_heads)
        conversion.source_kind = "a state dict of torchvision's names"
        return conversion
    if any(name.endswith(_KERNELS_WITH_CONFIG) for name in tensors):
        raise InputError(
            f"{source} holds tensors of transformers' names, which a config.json must explain: put it beside them as "
            f"{path.parent / 'config.json'} and name the folder"
        )
    raise InputError(
        f"{source} holds no Vision Transformer that is known ({some(tensors, 4)}); what is understood: {UNDERSTOOD}"
    )


def _without_wrapper(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the tensors by the network's own names, where DistributedDataParallel saved them."""
    if all(name.startswith("module.") for name in tensors):
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _refuse_others(options: ConversionOptions, known: tuple[str, ...], kind: str) -> None:
    for option in fields(options):
        if getattr(options, option.name) != option.default and option.name not in known:
            raise InputError(f"--{option.name} says nothing about {kind}; leave it out")


def load_vit_scratch(
    path: Path, source: str, options: ConversionOptions
) -> tuple[PreTrainedModel, ViTScratchImageProcessor]:
    """Returns model and processor of a folder of ours, each tensor in its stored dtype, resampled to `image_size`."""
    _refuse_others(options, ("image_size",), "a vit_scratch model")
    classes = {cls.__name__: cls for cls in (ViTScratchForImageClassification, ViTScratchModel)}
    names = _stored_config(path, source).get("architectures") or [None]
    if names[0] not in classes:
        raise InputError(f"{source} holds a {names[0]}; {' and '.join(classes)} are written in other formats")
    model = classes[names[0]].from_pretrained(path, dtype="auto")
    processor = ViTScratchImageProcessor.from_pretrained(path)
    if options.image_size is not None:
        model.resize_input(image_size=options.image_size)
        processor.size = dict(zip(("height", "width"), model.config.image_height_width, strict=True))
    return model.eval(), processor


def save_vit_scratch(model: PreTrainedModel, image_processor: ViTScratchImageProcessor, folder: Path) -> None:
    """Writes model and processor into a folder, and reads back that every tensor is what it was."""
    model.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    _check_same(model.state_dict(), read_tensors(folder))


def export(model: PreTrainedModel, image_processor: ViTScratchImageProcessor, to: str, folder: Path) -> Conversion:
    """Writes the model for `to` into a folder, and returns what that code makes of the files beside our model.

    Raises:
        InputError: names the field whose value the format has no place for.
    """
    assert to in FOREIGN_FORMATS, to
    folder.mkdir(parents=True, exist_ok=True)
    with _warnings_kept() as notes:
        written = _written_and_read(model, image_processor, to, folder)
    _check_same(model.state_dict(), written.model.state_dict())
    return Conversion(
        source=str(folder),
        model=model,
        image_processor=image_processor,
        reference=written.reference,
        reference_dtype=written.reference_dtype,
        notes=notes,
        source_kind=f"as {to}, and read back by {_PEERS[to]}",
    )


@contextmanager
def _warnings_kept() -> Iterator[list[str]]:
    """Yields a list into which every warning of a converter goes too: what an export has no place for."""

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    kept: list[str] = []
    keeper, package = Keeper(logging.WARNING), logging.getLogger(__name__.rpartition(".")[0])
    package.addHandler(keeper)
    try:
        yield kept
    finally:
        package.removeHandler(keeper)


def _written_and_read(
    model: PreTrainedModel, image_processor: ViTScratchImageProcessor, to: str, folder: Path
) -> Conversion:
    if to == "vit":
        from .convert_transformers_vit_scratch import from_transformers, to_transformers_vit

        for part in to_transformers_vit(model, image_processor):
            part.save_pretrained(folder)
        return from_transformers(folder)
    if to == "timm":
        return _export_to_timm(model, image_processor, folder)
    from .convert_npz_vit_scratch import from_npz, to_npz

    arrays: dict[str, Any] = to_npz(model, image_processor)
    np.savez(folder / "model.npz", **arrays)
    return from_npz(folder / "model.npz", image_size=model.config.image_size)


def _export_to_timm(model: PreTrainedModel, image_processor: ViTScratchImageProcessor, folder: Path) -> Conversion:
    from .convert_timm_vit_scratch import from_timm, read_timm_config, to_timm

    state_dict, config = to_timm(model, image_processor)
    save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    written = from_timm(read_tensors(folder), source=str(folder), **read_timm_config(config))
    written.reference = _TimmFolder(folder, proof_dtype(model))
    return written


class _TimmFolder:
    """Outputs of the folder's network as timm itself builds and loads it."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        import timm

        self.network: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).to(dtype).eval()

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        features = self.network.forward_features(pixel_values)
        outputs = {"last_hidden_state": features}
        if self.network.num_classes:
            outputs["logits"] = self.network.forward_head(features)
        return outputs


def _check_same(ours: Mapping[str, Tensor], read_back: Mapping[str, Tensor]) -> None:
    same = ours.keys() == read_back.keys() and all(
        tensor.dtype == read_back[name].dtype and torch.equal(tensor, read_back[name]) for name, tensor in ours.items()
    )
    assert same, "what was written is read back otherwise"

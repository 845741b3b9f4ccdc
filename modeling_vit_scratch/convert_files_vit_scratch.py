"""Tensors out of checkpoint files of four kinds and of no other; nothing that is pickled is ever run.

The ending of a name says which kind a file should be, its first bytes whether it is. What does not agree is refused
in one line: renamed and truncated files, web pages, git-lfs pointers, pickles.
"""

import json
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .convert_messages_vit_scratch import one_line, some
from .errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["CheckpointKind", "as_array", "as_tensor", "checkpoint_kind", "read_arrays", "read_tensors"]

CheckpointKind = Literal["safetensors", "npz", "torch", "onnx"]
StrPath = str | os.PathLike[str]

_INDEX = ".safetensors.index.json"  # names the files over which transformers spreads a large model
_ENDINGS: dict[str, CheckpointKind] = {
    _INDEX: "safetensors",
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".pth": "torch",
    ".pt": "torch",
    ".bin": "torch",
    ".onnx": "onnx",
}
# What transformers looks for in a folder, in its order.
_IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
# Under which a training script puts the network beside its optimizer.
_WRAPPERS = ("model", "state_dict", "state_dict_ema")
# The pickled number with which torch.save began a file before it wrote zip archives.
_TORCH_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_SAFETENSORS_HEADER = 100_000_000  # the format's own limit, in bytes

_FETCH = "fetch it again"
_TO_SAFETENSORS = "load it where you trust it and save its state_dict() as .safetensors"


class _Content(NamedTuple):
    kind: CheckpointKind | None
    words: str
    remedy: str


def checkpoint_kind(path: StrPath) -> CheckpointKind:
    """Returns the kind of a checkpoint file, or of the one in a folder; its name and its first bytes agree on it.

    Raises:
        InputError: there is no such file, or its name or its content is of no kind that is read.
    """
    return _kind(_file(path))


def read_tensors(path: StrPath) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint file, or of the one in a folder, in the dtypes of the file.

    Of ONNX: the initialisers, external data included. Of torch.save: the state dict, alone or under one of the names
    model, state_dict, state_dict_ema.

    Raises:
        InputError: not a whole file of a kind that is read, or not one network.
    """
    file = _file(path)
    match _kind(file):
        case "safetensors":
            tensors = _read_shards(file) if file.name.endswith(_INDEX) else _read_safetensors(file)
        case "npz":
            tensors = {name: as_tensor(array, f"{file}: {name}") for name, array in _read_npz(file).items()}
        case "torch":
            tensors = _read_torch(file)
        case "onnx":
            tensors = _read_onnx(file)
    if not tensors:
        raise InputError(f"{file}: holds no tensor; {_FETCH}, or name the file that holds the weights")
    _check_storage(tensors, file)
    return tensors


def _check_storage(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raises where a tensor does not hold its values, or holds them in a dtype that torch cannot compute in."""
    for name, tensor in tensors.items():
        is_tiny = tensor.is_floating_point() and tensor.element_size() == 1
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or is_tiny:
            kind = "meta" if tensor.is_meta else f"{str(tensor.layout).removeprefix('torch.')} {tensor.dtype}"
            raise InputError(
                f"{file}: {name} is a {kind} tensor; only plain dense tensors of 16 to 64 bits are read: save it so"
            )


def read_arrays(path: StrPath) -> dict[str, np.ndarray]:
    """Returns every array of an .npz file as it is stored; pickled objects are refused.

    Raises:
        InputError: not a whole .npz file, or not of plain arrays.
    """
    file = _file(path)
    if (kind := _kind(file)) != "npz":
        raise InputError(f"{file}: a {kind} file where an .npz was expected; read it with read_tensors")
    return _read_npz(file)


def as_tensor(array: np.ndarray, name: str) -> Tensor:
    """Returns a copy of an array as a tensor; `name` is for the message where torch has no such dtype."""
    if array.dtype.name == "bfloat16" or array.dtype == np.dtype("V2"):  # how NumPy stores what it does not know
        return torch.from_numpy(array.copy().view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise InputError(f"{name} is an array of {array.dtype}; only numbers that torch knows are read") from None


def as_array(tensor: Tensor) -> np.ndarray:
    """Returns a copy of a tensor as an array; bfloat16 as two-byte void, as big_vision's own files have it."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view("V2")
    return tensor.numpy().copy()


def _file(path: StrPath) -> Path:
    file = Path(path)
    if not file.is_dir():
        return file
    for name in _IN_FOLDER:
        if (file / name).is_file():
            return file / name
    raise InputError(f"{file}: a folder without {' or '.join(_IN_FOLDER)}; name the checkpoint file itself")


def _kind(file: Path) -> CheckpointKind:
    if not file.is_file():
        raise InputError(f"{file}: there is no such file; check the path")
    named = next((kind for ending, kind in _ENDINGS.items() if file.name.lower().endswith(ending)), None)
    if named is None:
        raise InputError(f"{file}: the name must end in one of {', '.join(_ENDINGS)}; convert the file to one of them")
    if file.name.lower().endswith(_INDEX):
        return named  # plain JSON, checked where it is read
    try:
        content = _content(file)
    except OSError as error:
        raise EnvironmentFault(
            f"{file}: cannot be read ({one_line(error)}); check its permissions and the disk"
        ) from None
    if content.kind != named:
        raise InputError(f"{file}: the name says {named}, but it is {content.words}; {content.remedy}")
    return named


def _content(file: Path) -> _Content:
    """What the bytes are, whatever the name."""
    with file.open("rb") as stream:
        head = stream.read(4096)
    if not head:
        return _Content(None, "an empty file", _FETCH)
    if head.startswith(b"version https://git-lfs.github.com"):
        return _Content(None, "a git-lfs pointer instead of the file", "fetch the file with: git lfs pull")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_content(file)
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        return _Content("safetensors", "a safetensors file", "rename it to end in .safetensors")
    if head.startswith(_TORCH_LEGACY):
        return _Content("torch", "a file of torch.save", "rename it to end in .pth")
    if head.startswith(b"\x80"):
        return _Content(None, "a pickle of Python objects, which is never opened", _TO_SAFETENSORS)
    if head.startswith(b"\x93NUMPY"):
        return _Content(None, "a single NumPy array", "name the .npz that holds all arrays of the network")
    if head.startswith(b"\x89HDF"):
        return _Content(None, "an HDF5 file", "convert it with the program that wrote it")
    if head[:1] == b"\x08":  # no magic bytes: a protobuf whose first field is the version of the format
        return _Content("onnx", "an ONNX file", "rename it to end in .onnx")
    unknown = _Content(None, "of a format that is not known here or damaged", _FETCH)
    return _text_content(head) or unknown


def _text_content(head: bytes) -> _Content | None:
    text = head.decode("utf-8", errors="ignore")  # the last character may be cut
    if "\0" in text or len(text.encode()) < len(head) - 3 or not text.strip():
        return None
    if re.search(r"<(!doctype\s+html|html|head)\b", text, flags=re.IGNORECASE):
        return _Content(None, "a web page", "download the file itself, not the page about it")
    return _Content(None, f"text that begins {text.strip()[:30]!r}", _FETCH)


def _zip_content(file: Path) -> _Content:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return _Content(None, "an archive that was cut short or damaged", _FETCH)
    if any(name.endswith("constants.pkl") for name in names):
        return _Content(None, "a TorchScript program", "load it with torch.jit.load and save its state_dict()")
    if any(name.endswith("/data.pkl") for name in names):
        return _Content("torch", "a file of torch.save", "rename it to end in .pth")
    if names and all(name.endswith(".npy") for name in names):
        return _Content("npz", "an .npz of NumPy arrays", "rename it to end in .npz")
    found = f"an archive of {', '.join(names[:3])}" if names else "an empty archive"
    return _Content(None, found, "unpack it and name the checkpoint inside" if names else _FETCH)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except safetensors.SafetensorError as error:
        raise InputError(f"{file}: a damaged safetensors file ({one_line(error)}); {_FETCH}") from None


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that the index names, each once and where the index says."""
    weight_map = _weight_map(index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise InputError(f"{index}: names {name!r}, but only files beside the index are read; move the file there")
        shard = index.parent / name
        if not shard.is_file():
            raise InputError(f"{index}: names {name}, which is not beside it; fetch every file of the checkpoint")
        _kind(shard)
        found = _read_safetensors(shard)
        wanted = {tensor for tensor, place in weight_map.items() if place == name}
        if wanted != found.keys():
            missing, surplus = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
            raise InputError(
                f"{shard}: not the file that {index.name} was written for: "
                f"missing {some(missing, 4)}, not listed {some(surplus, 4)}; {_FETCH}"
            )
        tensors |= found
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(value, str) for value in weight_map.values()):
            return weight_map
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise InputError(f"{index}: not an index of safetensors files (no weight_map of file names in it); {_FETCH}")


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    name = "its table of contents"
    try:
        with np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = archive[name]
                if not isinstance(arrays[name], np.ndarray):  # NumPy hands the bytes of what is no array through
                    raise ValueError("it is no array")
    except (ValueError, EOFError, OSError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            raise InputError(f"{file}: {name} holds pickled Python objects; save it again as plain arrays") from None
        raise InputError(f"{file}: {name} cannot be read ({one_line(error)}); {_FETCH}") from None
    return arrays


def _read_torch(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise whatever the step they stop at raises
        _refuse_torch(file, error)
    if not isinstance(loaded, Mapping):
        raise InputError(f"{file}: holds a {type(loaded).__name__} instead of a state dict; {_TO_SAFETENSORS}")
    wrappers = [name for name in _WRAPPERS if isinstance(loaded.get(name), Mapping)]
    if len(wrappers) > 1:
        raise InputError(
            f"{file}: holds {len(wrappers)} networks, {' and '.join(wrappers)}; save the one you mean by itself"
        )
    if wrappers:
        loaded = loaded[wrappers[0]]
    others = {str(name) for name, value in loaded.items() if not isinstance(value, Tensor)}
    if others:
        raise InputError(
            f"{file}: not a state dict, since {some(sorted(others), 4)} is no tensor; save the network's state_dict() "
            "by itself"
        )
    return {str(name): tensor.detach() for name, tensor in loaded.items()}


def _refuse_torch(file: Path, error: Exception) -> NoReturn:
    if isinstance(error, MemoryError):
        raise error
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and wanted:
        raise InputError(
            f"{file}: needs {wanted[1]} to be unpickled, and only plain tensors are; {_TO_SAFETENSORS}"
        ) from None
    raise InputError(f"{file}: a damaged file of torch.save ({one_line(error)}); {_FETCH}") from None


def _read_onnx(file: Path) -> dict[str, Tensor]:
    try:
        import onnx
    except ImportError:
        raise EnvironmentFault(
            f"{file}: ONNX files are read by the package onnx; install it: pip install onnx"
        ) from None
    from google.protobuf.message import DecodeError

    tensors: dict[str, Tensor] = {}
    try:
        model = onnx.load(file)  # with the external data beside it
        for initializer in model.graph.initializer:
            array = onnx.numpy_helper.to_array(initializer)
            tensors[initializer.name] = as_tensor(array, f"{file}: {initializer.name}")
    except InputError:
        raise
    except (DecodeError, onnx.checker.ValidationError, OSError, ValueError) as error:
        raise InputError(f"{file}: a damaged ONNX file ({one_line(error)}); fetch it and its data again") from None
    return tensors

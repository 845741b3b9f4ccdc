"""Checkpoint files of every kind that is read, and one line of refusal for everything else."""

import argparse
import builtins
import json
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modeling_vit_scratch.convert_files_vit_scratch import (
    as_array,
    as_tensor,
    checkpoint_kind,
    read_arrays,
    read_tensors,
)
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

TENSORS = {"layer.weight": torch.arange(2048.0).view(32, 64), "layer.bias": torch.arange(32, dtype=torch.float64)}
WRITERS = {
    ".safetensors": save_file,
    ".npz": lambda tensors, file: np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()}),
    ".pth": torch.save,
    ".pt": torch.save,
    ".bin": torch.save,
}
KINDS = {".safetensors": "safetensors", ".npz": "npz", ".pth": "torch", ".pt": "torch", ".bin": "torch"}
ENDINGS = [".safetensors", ".npz", ".pth", ".onnx"]


def written(folder, ending, tensors=TENSORS, name="network"):
    file = folder / f"{name}{ending}"
    WRITERS[ending](tensors, file)
    return file


def with_bytes(folder, name, content):
    (folder / name).write_bytes(content)
    return folder / name


def sharded(folder, **changes):
    """An index and its two files; `changes` replace fields of its weight_map."""
    weight_map = {}
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, folder / f"model-{number}.safetensors")
        weight_map[name] = f"model-{number}.safetensors"
    index = {"metadata": {}, "weight_map": weight_map | changes}
    return with_bytes(folder, "model.safetensors.index.json", json.dumps(index).encode())


def onnx_network(folder, *, external=False):
    onnx = pytest.importorskip("onnx")
    initializers = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in TENSORS.items()]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [32, 64])
    node = onnx.helper.make_node("Identity", ["layer.weight"], ["y"])
    graph = onnx.helper.make_graph([node], "network", [], [output], initializers)
    file = folder / "network.onnx"
    options = {"location": "network.data", "size_threshold": 0} if external else {}
    onnx.save(onnx.helper.make_model(graph), file, save_as_external_data=external, **options)
    return file


def assert_read(file):
    found = read_tensors(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def refusal(file, read=read_tensors):
    """The one line that reading it raises; it names the file."""
    with pytest.raises(InputError) as error:
        read(file)
    message = str(error.value)
    assert "\n" not in message and str(file) in message and ";" in message, message
    return message


@pytest.mark.parametrize("ending", WRITERS)
def test_tensors_and_kind_of_every_ending_are_read(tmp_path, ending):
    file = written(tmp_path, ending)
    assert_read(file)
    assert checkpoint_kind(file) == KINDS[ending]


def test_an_upper_case_ending_is_read(tmp_path):
    assert_read(written(tmp_path, ".npz").rename(tmp_path / "NETWORK.NPZ"))


def test_a_file_of_the_old_torch_format_is_read(tmp_path):
    torch.save(TENSORS, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert_read(tmp_path / "old.pth")


def test_the_files_that_an_index_names_are_read_together(tmp_path):
    assert_read(sharded(tmp_path))


@pytest.mark.peer
@pytest.mark.parametrize("external", [False, True])
def test_initialisers_of_onnx_are_read_wherever_their_data_is(tmp_path, external):
    file = onnx_network(tmp_path, external=external)
    assert (tmp_path / "network.data").exists() == external
    assert_read(file)
    assert checkpoint_kind(file) == "onnx"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_stands_for_the_weights_in_it(tmp_path, name):
    stem, _, ending = name.rpartition(".")
    written(tmp_path, f".{ending}", name=stem)
    assert_read(tmp_path)


def test_a_folder_with_an_index_stands_for_all_files_it_names(tmp_path):
    sharded(tmp_path)
    assert_read(tmp_path)


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "state_dict_ema"])
def test_a_state_dict_beside_a_training_state_is_unwrapped(tmp_path, wrapper):
    torch.save({wrapper: TENSORS, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "run.pth")
    assert_read(tmp_path / "run.pth")


def test_parameters_are_read_as_plain_tensors(tmp_path):
    torch.save({name: nn.Parameter(tensor) for name, tensor in TENSORS.items()}, tmp_path / "parameters.pth")
    assert type(read_tensors(tmp_path / "parameters.pth")["layer.bias"]) is torch.Tensor


def test_arrays_are_read_as_they_are_stored(tmp_path):
    stored = {"big-endian": np.arange(3, dtype=">f4"), "half": np.ones((2, 1), np.float16)}
    np.savez(tmp_path / "network.npz", **stored)
    found = read_arrays(tmp_path / "network.npz")
    assert all(found[name].dtype == array.dtype and (found[name] == array).all() for name, array in stored.items())
    assert read_tensors(tmp_path / "network.npz")["big-endian"].tolist() == [0, 1, 2]


def test_bfloat16_comes_back_bit_by_bit():
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16().T
    assert as_array(tensor).dtype == np.dtype("V2")
    assert torch.equal(as_tensor(as_array(tensor), "x"), tensor)


@pytest.mark.parametrize("ending, renamed", [
    (ending, renamed)
    for ending in (".safetensors", ".npz", ".pth")
    for renamed in (".safetensors", ".npz", ".pth", ".bin", ".onnx")
    if KINDS.get(renamed) != KINDS[ending]
])  # fmt: skip
def test_a_renamed_file_is_refused_with_what_it_is(tmp_path, ending, renamed):
    file = written(tmp_path, ending).rename(tmp_path / f"renamed{renamed}")
    what = {".safetensors": "a safetensors file", ".npz": "an .npz of", ".pth": "a file of torch.save"}[ending]
    assert f"but it is {what}" in refusal(file)
    assert f"rename it to end in {ending}" in refusal(file)
    assert refusal(file, checkpoint_kind) == refusal(file)


CONTENTS = {
    "an empty file": b"",
    "a web page": b"\n<!DOCTYPE html>\n<html><body>404</body></html>",
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 346\n",
    "text that begins 'not a checkpoint": b"not a checkpoint\n" * 20,
    "a pickle of Python objects": pickle.dumps({"weight": [1.0]}),
    "a single NumPy array": b"\x93NUMPY\x01\x00v\x00",
    "an HDF5 file": b"\x89HDF\r\n\x1a\n\x00",
    "of a format that is not known": b"\xff\xfe\x00\x01\x02" * 9,
    "an empty archive": b"PK\x05\x06" + b"\x00" * 18,
}


@pytest.mark.parametrize("what", CONTENTS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_no_checkpoint_is_refused_under_every_name(tmp_path, what, ending):
    file = with_bytes(tmp_path, f"network{ending}", CONTENTS[what])
    assert re.search(f"the name says {KINDS.get(ending, 'onnx')}, but it is {what}", refusal(file))


def test_an_archive_of_something_else_is_refused_with_what_is_in_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "network.npz", "w") as archive:
        archive.writestr("README.md", "weights")
    assert "an archive of README.md" in refusal(tmp_path / "network.npz")


def test_a_torchscript_program_is_refused(tmp_path):
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "traced.pt"))
    assert "a TorchScript program" in refusal(tmp_path / "traced.pt")


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pth"])
def test_a_truncated_file_is_refused(tmp_path, ending, share):
    content = written(tmp_path, ending).read_bytes()
    message = refusal(with_bytes(tmp_path, f"cut{ending}", content[: int(share * len(content))]))
    assert re.search("cut short|damaged|cannot be read", message) and "fetch it again" in message


def test_a_truncated_file_of_the_old_torch_format_is_refused(tmp_path):
    torch.save(TENSORS, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    content = (tmp_path / "old.pth").read_bytes()
    assert "damaged" in refusal(with_bytes(tmp_path, "cut.pth", content[: len(content) // 2]))


def test_a_flipped_byte_of_an_npz_is_noticed(tmp_path):
    content = bytearray(written(tmp_path, ".npz").read_bytes())
    content[len(content) // 2] ^= 1
    assert "layer.weight cannot be read" in refusal(with_bytes(tmp_path, "flipped.npz", bytes(content)))


@pytest.mark.peer
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_onnx_file_is_refused(tmp_path, share):
    content = onnx_network(tmp_path).read_bytes()
    assert "damaged" in refusal(with_bytes(tmp_path, "cut.onnx", content[: int(share * len(content))]))


@pytest.mark.peer
def test_an_onnx_file_without_its_data_is_refused(tmp_path):
    file = onnx_network(tmp_path, external=True)
    (tmp_path / "network.data").unlink()
    assert "a damaged ONNX file" in refusal(file)
    (tmp_path / "network.data").write_bytes(b"\x00" * 9)
    assert "a damaged ONNX file" in refusal(file)


def test_without_the_onnx_package_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    def importer(name, *args, **kwargs):
        if name.partition(".")[0] == "onnx":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importer)
    with pytest.raises(EnvironmentFault, match="pip install onnx"):
        read_tensors(with_bytes(tmp_path, "network.onnx", b"\x08\x07"))


class LeavesAFile:
    """Unpickling it writes a file, had anybody run the pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [
    lambda value, file: torch.save({"weight": value}, file),
    lambda value, file: torch.save({"weight": value}, file, _use_new_zipfile_serialization=False),
    lambda value, file: file.write_bytes(pickle.dumps(value)),
], ids=["torch", "old torch", "pickle"])  # fmt: skip
@pytest.mark.parametrize("name", ["network.pth", "network.bin", "network.npz", "pytorch_model.bin"])
def test_nothing_pickled_is_run(tmp_path, write, name):
    marker, file = tmp_path / "pickle was run", tmp_path / name
    write(LeavesAFile(marker), file)
    refusal(file)
    assert not marker.exists()


def test_pickled_objects_in_an_npz_are_not_run(tmp_path):
    marker = tmp_path / "pickle was run"
    np.savez(tmp_path / "network.npz", weight=np.array([LeavesAFile(marker)], dtype=object))
    assert "weight holds pickled Python objects" in refusal(tmp_path / "network.npz")
    assert not marker.exists()


def test_the_malicious_pickle_would_leave_its_file(tmp_path):
    pickle.loads(pickle.dumps(LeavesAFile(tmp_path / "pickle was run"))).close()
    assert (tmp_path / "pickle was run").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_with_python_objects_is_refused_by_their_name(tmp_path, zipped):
    content = {"model": TENSORS, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "run.pth", _use_new_zipfile_serialization=zipped)
    assert "needs argparse.Namespace to be unpickled" in refusal(tmp_path / "run.pth")


ODD_OBJECTS = {
    "holds 2 networks, model and state_dict_ema": {"model": TENSORS, "state_dict_ema": TENSORS},
    "student, teacher is no tensor": {"teacher": TENSORS, "student": TENSORS},
    "epoch is no tensor": {**TENSORS, "epoch": 3},
    "holds a Tensor instead of a state dict": torch.ones(3),
    "holds no tensor": {},
}


@pytest.mark.parametrize("message", ODD_OBJECTS)
def test_what_is_not_one_state_dict_is_refused(tmp_path, message):
    torch.save(ODD_OBJECTS[message], tmp_path / "run.pth")
    assert message in refusal(tmp_path / "run.pth")


def test_an_array_that_is_no_numbers_is_refused_by_name(tmp_path):
    np.savez(tmp_path / "network.npz", label=np.array(["cat"]))
    assert "label is an array of <U3" in refusal(tmp_path / "network.npz")


def test_arrays_are_read_of_npz_alone(tmp_path):
    assert "a torch file where an .npz was expected" in refusal(written(tmp_path, ".pth"), read_arrays)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path):
    index = sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    assert "names model-1.safetensors, which is not beside it" in refusal(index)


@pytest.mark.parametrize("place", ["../model-0.safetensors", "/model-0.safetensors", "sub/model-0.safetensors"])
def test_an_index_cannot_name_files_elsewhere(tmp_path, place):
    assert "only files beside the index" in refusal(sharded(tmp_path, **{"layer.bias": place}))


def test_an_index_and_files_that_differ_are_refused(tmp_path):
    index = sharded(tmp_path, **{"layer.bias": "model-0.safetensors", "more": "model-1.safetensors"})
    with pytest.raises(InputError, match=r"model-0\.safetensors: .* missing layer\.bias, not listed nothing; "):
        read_tensors(index)


def test_an_index_of_truncated_files_is_refused(tmp_path):
    index = sharded(tmp_path)
    shard = tmp_path / "model-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(InputError, match=r"model-0\.safetensors: a damaged safetensors file"):
        read_tensors(index)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"<html>", b'{"weight_map": {"a": 1}}', b"\xff\xfe"])
def test_a_damaged_index_is_refused(tmp_path, content):
    assert "not an index" in refusal(with_bytes(tmp_path, "model.safetensors.index.json", content))


def test_other_endings_are_refused_with_those_that_are_read(tmp_path):
    assert "must end in one of" in refusal(with_bytes(tmp_path, "network.h5", b"\x89HDF\r\n\x1a\n"))


def test_a_missing_file_is_refused(tmp_path):
    assert "there is no such file" in refusal(tmp_path / "network.npz")


def test_a_folder_without_weights_is_refused(tmp_path):
    assert "a folder without model.safetensors" in refusal(tmp_path)


ODD_TENSORS = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "float8_e4m3fn": lambda: torch.ones(3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_a_tensor_without_plain_values_is_refused_by_name_and_kind(tmp_path, kind):
    torch.save({**TENSORS, "odd": ODD_TENSORS[kind]()}, tmp_path / "run.pth")
    message = refusal(tmp_path / "run.pth")
    assert "odd is a " in message and kind in message


def test_eight_bit_floats_beside_others_in_safetensors_are_refused(tmp_path):
    save_file({**TENSORS, "odd": torch.ones(3).to(torch.float8_e5m2)}, tmp_path / "run.safetensors")
    assert "odd is a strided torch.float8_e5m2 tensor" in refusal(tmp_path / "run.safetensors")

"""Sources with one thing wrong, down to a field of a JSON file: each ends in one line that names file and field."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_modeling import tiny_classifier
from fixtures_training import call, refused
from foreign_checkpoints import VIT, randomized
from safetensors.torch import load_file, save_file
from transformers import Dinov2Config, Dinov2Model

from modeling_vit_scratch import ViTScratchImageProcessor

pytest_plugins = ["fixtures_conversion", "fixtures_hub"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    model = tiny_classifier()
    model.save_pretrained(folder)
    ViTScratchImageProcessor.from_config(model.config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory) -> Path:
    timm = pytest.importorskip("timm")
    folder = tmp_path_factory.mktemp("timm")
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    network = timm.create_model("vit_tiny_patch16_224", **arguments, num_classes=3)
    save_file(network.state_dict(), folder / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": arguments}
    config["pretrained_cfg"] = {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_mode": "center", "interpolation": "bicubic"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(folder: Path, copy: Path, file: str, **fields) -> Path:
    """Returns a copy whose JSON file has other fields."""
    shutil.copytree(folder, copy)
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | fields))
    return copy


def refusal(source: Path, folder: Path, *more: object) -> str:
    line = refused("convert", source, "--output_dir", folder / "out", *more)
    assert str(source) in line and len(line) < 800
    assert not (folder / "out").exists()
    return line


OF_TRANSFORMERS = [
    ("architectures", 5),
    ("architectures", [["a"]]),
    ("model_type", []),
    ("image_size", []),
    ("image_size", "32"),
    ("patch_size", 0),
    ("patch_size", [1]),
    ("hidden_size", 0),
    ("num_attention_heads", 0),
    ("num_hidden_layers", True),
    ("layer_norm_eps", "1e-6"),
    ("hidden_act", 3),
    ("id2label", "x"),
    ("id2label", ["a"]),
    ("id2label", 7),
    ("id2label", {"cat": "x"}),
    ("dtype", "x"),
    ("dtype", 3),
    ("quantization_config", 0),
]


@pytest.mark.parametrize("field, value", OF_TRANSFORMERS, ids=str)
def test_a_field_of_another_kind_in_transformers_config_is_named(field, value, vit_folder, tmp_path):
    line = refusal(changed(vit_folder, tmp_path / "vit", "config.json", **{field: value}), tmp_path)
    assert f"config.json: {field}={value!r} must be" in line


@pytest.mark.parametrize("field, value", [
    ("rescale_factor", None),
    ("rescale_factor", 0),
    ("crop_size", 0),
    ("size", {"height": 0, "width": 32}),
    ("image_mean", "x"),
    ("image_std", []),
    ("image_processor_type", 3),
], ids=str)  # fmt: skip
def test_a_field_of_another_kind_in_an_image_processor_is_named(field, value, vit_folder, tmp_path):
    line = refusal(changed(vit_folder, tmp_path / "vit", "preprocessor_config.json", **{field: value}), tmp_path)
    assert f"preprocessor_config.json: {field}={value!r} must be" in line


@pytest.mark.peer
@pytest.mark.parametrize("field, value", [
    ("architecture", 5),
    ("pretrained_cfg", None),
    ("model_args", "x"),
    ("label_names", 3),
    ("num_classes", "3"),
    ("mean", 3.5),
    ("std", "x"),
    ("crop_mode", [1]),
    ("interpolation", [1]),
    ("input_size", 224),
    ("depth", 0),
    ("img_size", "x"),
], ids=str)  # fmt: skip
def test_a_field_of_another_kind_in_timm_s_config_is_named(field, value, timm_folder, tmp_path):
    content = json.loads((timm_folder / "config.json").read_text())
    within = {"depth": "model_args", "img_size": "model_args"} | dict.fromkeys(
        ("mean", "std", "crop_mode", "interpolation", "input_size"), "pretrained_cfg"
    )
    fields = {within[field]: content[within[field]] | {field: value}} if field in within else {field: value}
    line = refusal(changed(timm_folder, tmp_path / "timm", "config.json", **fields), tmp_path)
    assert "config.json" in line and f"{field}={value!r} must be" in line


@pytest.mark.parametrize("field, value", [("architectures", 3), ("dtype", "x"), ("hidden_size", "32")], ids=str)
def test_a_field_of_another_kind_in_our_config_is_named_by_every_verb(field, value, ours, tmp_path):
    source = changed(ours, tmp_path / "ours", "config.json", **{field: value})
    assert f"{field}={value!r} must be" in refusal(source, tmp_path, "--to", "npz")
    outcome = call("evaluate", "--model_name_or_path", source, "--dataset_name", "digits")
    assert outcome.code == 2 and f"{field}={value!r} must be" in outcome.error_line


def test_our_image_processor_that_is_a_list_is_refused(ours, tmp_path):
    source = Path(shutil.copytree(ours, tmp_path / "ours"))
    (source / "preprocessor_config.json").write_text("[1]")
    assert "its preprocessor_config.json holds no fields" in refusal(source, tmp_path, "--to", "npz")


def test_a_kernel_of_the_hub_that_cannot_be_had_is_the_environment_s_fault(ours, tmp_path):
    source = changed(ours, tmp_path / "ours", "config.json", _attn_implementation="org/kernel")
    outcome = call("convert", source, "--output_dir", tmp_path / "out", "--to", "npz")
    assert outcome.code in (2, 3) and str(source) in outcome.error_line


def test_weights_that_are_no_numbers_are_the_source_s_fault_and_named(vit_folder, tmp_path):
    source = Path(shutil.copytree(vit_folder, tmp_path / "vit"))
    tensors = load_file(source / "model.safetensors")
    tensors["vit.layernorm.bias"][3], tensors["classifier.bias"][0] = math.nan, -math.inf
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    line = refusal(source, tmp_path)
    assert "NaN or infinity in" in line and "vit.layernorm.bias" in line and "classifier.bias" in line


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_])
def test_an_npz_of_other_numbers_is_refused_by_name(dtype, npz_file, tmp_path):
    arrays = dict(np.load(npz_file))
    np.savez(tmp_path / "odd.npz", **arrays | {"head/bias": np.ones(3, dtype)})
    assert "classifier.bias (torch." in refusal(tmp_path / "odd.npz", tmp_path)


def test_an_npz_of_empty_patches_is_refused_by_name(npz_file, tmp_path):
    arrays = dict(np.load(npz_file))
    np.savez(tmp_path / "odd.npz", **arrays | {"embedding/kernel": np.ones((0, 0, 3, 32), np.float32)})
    assert "embedding/kernel is (0, 0, 3, 32): it holds nothing" in refusal(tmp_path / "odd.npz", tmp_path)


def test_an_npz_without_classes_is_refused_by_file(npz_file, tmp_path):
    arrays = dict(np.load(npz_file)) | {"head/kernel": np.ones((32, 0), "f4"), "head/bias": np.ones(0, "f4")}
    np.savez(tmp_path / "odd.npz", **arrays)
    assert "head/kernel is (32, 0): it holds nothing" in refusal(tmp_path / "odd.npz", tmp_path)


def test_an_npz_that_makes_no_config_says_why_without_transformers_words(npz_file, tmp_path):
    arrays = dict(np.load(npz_file))
    np.savez(tmp_path / "odd.npz", **{name: array for name, array in arrays.items() if "pos_embedding" not in name})
    line = refusal(tmp_path / "odd.npz", tmp_path, "--image_size", 36)
    assert "odd.npz: its shapes make no network: image_size" in line and "validation error" not in line


# ONNX


@pytest.fixture(scope="module")
def dinov2():
    fields = {name: value for name, value in VIT.items() if name != "intermediate_size"}
    return randomized(Dinov2Model(Dinov2Config(**fields, mlp_ratio=2, attn_implementation="eager")))


@pytest.fixture(scope="module")
def onnx_file(dinov2, tmp_path_factory) -> Path:
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "dinov2.onnx"
    torch.onnx.export(dinov2, (torch.zeros(2, 3, 32, 32),), path, dynamo=False)
    return path


def with_graph(file: Path, folder: Path, change) -> Path:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(file)
    change(model)
    onnx.save(model, folder / "odd.onnx")
    return folder / "odd.onnx"


def unknown_opset(model):
    model.opset_import[0].version = 999


def unknown_operator(model):
    next(node for node in model.graph.node if node.op_type == "Softmax").op_type = "Softestmax"


def no_inputs(model):
    del model.graph.input[:]


def two_axes(model):
    del model.graph.input[0].type.tensor_type.shape.dim[2:]


def half_precision(model):
    model.graph.input[0].type.tensor_type.elem_type = 10


ODD_GRAPHS = {
    unknown_opset: "onnxruntime cannot run it",
    unknown_operator: "onnxruntime cannot run it",
    no_inputs: "has no input for images",
    two_axes: "has 2 axes instead of 4",
    half_precision: "is FLOAT16; export the network in float32",
}


@pytest.mark.peer
@pytest.mark.parametrize("change", ODD_GRAPHS, ids=lambda change: change.__name__)
def test_a_graph_that_cannot_be_run_is_refused_with_the_reason(change, onnx_file, tmp_path):
    assert ODD_GRAPHS[change] in refusal(with_graph(onnx_file, tmp_path, change), tmp_path)


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(8))
def test_flipped_bits_of_a_graph_never_end_in_a_traceback(seed, onnx_file, tmp_path):
    content = bytearray(onnx_file.read_bytes())
    places = np.random.default_rng(seed).integers(0, len(content), 20)
    for place in places:
        content[place] ^= 4
    (tmp_path / "odd.onnx").write_bytes(bytes(content))
    outcome = call("convert", tmp_path / "odd.onnx", "--output_dir", tmp_path / "out")
    assert outcome.code in (0, 2), outcome.err  # a bit of a weight may be flipped unnoticed


@pytest.mark.peer
@pytest.mark.parametrize("heads, reason", [(2, "NOT equal with --num_attention_heads 2"), (5, "num_attention_heads")])
def test_wrong_heads_are_the_fault_of_who_gave_them(heads, reason, onnx_file, tmp_path):
    assert reason in refusal(onnx_file, tmp_path, "--num_attention_heads", heads)


@pytest.mark.peer
def test_a_swiglu_graph_is_refused_with_what_is_missing(tmp_path):
    pytest.importorskip("onnxruntime")
    fields = {name: value for name, value in VIT.items() if name != "intermediate_size"}
    network = randomized(Dinov2Model(Dinov2Config(**fields, use_swiglu_ffn=True, attn_implementation="eager")))
    torch.onnx.export(network, (torch.zeros(2, 3, 32, 32),), tmp_path / "swiglu.onnx", dynamo=False)
    line = refusal(tmp_path / "swiglu.onnx", tmp_path)
    assert "the layers have no mlp.fc1" in line and "( found)" not in line


@pytest.mark.peer
def test_a_class_token_that_the_exporter_folded_is_found(dinov2, tmp_path):
    """torch's newer exporter, for one size of batch."""
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    torch.onnx.export(dinov2, (torch.zeros(2, 3, 32, 32),), tmp_path / "static.onnx", dynamo=True, verbose=False)
    outcome = call("convert", tmp_path / "static.onnx", "--output_dir", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["embeddings.cls_token"], dinov2.embeddings.cls_token)

"""`vit-scratch convert`: what is printed, written, and refused."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_modeling import tiny_classifier
from fixtures_training import call, files_below, refused
from foreign_checkpoints import DIGITS, VIT, convert, images, randomized
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.models import VisionTransformer
from transformers import (
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2Model,
    ViTForImageClassification,
    ViTImageProcessor,
)

from modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchImageProcessor,
    ViTScratchModel,
    convert_vit_scratch,
)

pytest_plugins = ["fixtures_conversion", "fixtures_hub"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """A vit_scratch folder of a shape that every other code has a place for."""
    folder = tmp_path_factory.mktemp("ours")
    model = tiny_classifier(position_interpolation="bicubic")
    model.save_pretrained(folder)
    ViTScratchImageProcessor.from_config(model.config).save_pretrained(folder)
    return folder


def test_a_transformers_folder_becomes_one_of_ours_with_the_same_logits(vit_folder, tmp_path):
    convert(vit_folder, tmp_path / "out")
    theirs = ViTForImageClassification.from_pretrained(vit_folder).eval()
    found = ViTScratchForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(images()).logits, theirs(images()).logits, rtol=0, atol=1e-5)
    assert list(found.config.id2label.values()) == DIGITS


def test_pixels_come_along(vit_folder, tmp_path):
    convert(vit_folder, tmp_path / "out")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    theirs = ViTImageProcessor.from_pretrained(vit_folder)(image, return_tensors="pt")["pixel_values"]
    found = ViTScratchImageProcessor.from_pretrained(tmp_path / "out")(image)["pixel_values"]
    assert torch.equal(found, theirs)


def test_the_source_the_shape_the_notes_and_the_proof_are_printed(npz_file, tmp_path):
    lines = convert(npz_file, tmp_path / "out").out.splitlines()
    assert lines[0] == f"source  {npz_file}: an npz file of Google's names"
    assert "2 layers of width 32, 4 heads, MLP 64" in lines[1] and "3 classes" in lines[1]
    proof = lines.index("proof   two fixed images in float64, tolerance 1e-08 of max(1, largest value)")
    assert all(line.startswith("note    ") for line in lines[2:proof])
    assert all(
        " at 32x32: largest |difference| " in line and line.endswith(": equal") for line in lines[proof + 1 : -1]
    )
    assert any(line.split()[0] == "logits" for line in lines[proof + 1 : -1])
    assert lines[-1] == str(tmp_path / "out")


def test_the_folder_records_source_hash_notes_and_proof(npz_file, tmp_path):
    convert(npz_file, tmp_path / "out")
    assert files_below(tmp_path / "out") == [
        "config.json",
        "conversion.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["schema_version"] == 1 and record["source"] == str(npz_file)
    assert record["sha256"] == {"weights.npz": hashlib.sha256(npz_file.read_bytes()).hexdigest()}
    assert all(row["largest_difference"] <= row["tolerance"] * row["relative_to"] for row in record["proof"])
    assert record["packages"]["torch"] == torch.__version__.partition("+")[0]


def test_what_is_not_equal_is_not_written_and_ends_with_code_1(vit_folder, tmp_path, monkeypatch):
    right = convert_vit_scratch.convert

    def wrong(*arguments, **fields):
        conversion = right(*arguments, **fields)
        conversion.model.config.layer_norm_eps = 1e-5
        for module in conversion.model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-5  # for transformers' 1e-12
        return conversion

    monkeypatch.setattr(convert_vit_scratch, "convert", wrong)
    outcome = call("convert", vit_folder, "--output_dir", tmp_path / "out")
    assert outcome.code == 1
    assert "NOT equal" in outcome.out and "NOT equal" in outcome.error_line
    assert not any(tmp_path.iterdir())


def test_the_tolerance_is_obeyed(npz_file, tmp_path):
    outcome = call("convert", npz_file, "--output_dir", tmp_path / "out", "--tolerance", "1e-300")
    assert outcome.code == 1 and "tolerance 1e-300" in outcome.out
    assert not any(tmp_path.iterdir())


def test_torchvision_s_network_becomes_one_of_ours(tmp_path):
    torch.manual_seed(0)
    network = VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=7).eval()
    torch.nn.init.normal_(network.heads.head.weight)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    convert(tmp_path / "vit.pth", tmp_path / "out", "--num_attention_heads", 4)
    found = ViTScratchForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(images()).logits, network(images()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("drop", [False, True])
def test_a_distillation_token_is_kept_or_dropped_as_asked(tmp_path, drop):
    randomized(DeiTForImageClassificationWithTeacher(DeiTConfig(**VIT, num_labels=7))).save_pretrained(
        tmp_path / "deit"
    )
    convert(tmp_path / "deit", tmp_path / "out", *(["--drop_distillation"] if drop else []))
    found = ViTScratchForImageClassification.from_pretrained(tmp_path / "out").eval()
    theirs = DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "deit").eval()
    assert found.config.use_distillation_token is not drop
    with torch.no_grad():
        difference = (found(images()).logits - theirs(images()).logits).abs().max()
    assert difference > 1e-3 if drop else difference < 1e-5


@pytest.mark.peer
def test_an_onnx_file_becomes_one_of_ours(tmp_path):
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package)
    fields = {name: value for name, value in VIT.items() if name != "intermediate_size"}
    network = randomized(Dinov2Model(Dinov2Config(**fields, mlp_ratio=2, attn_implementation="eager")))
    torch.onnx.export(network, (images(),), tmp_path / "dinov2.onnx", dynamo=False)
    out = convert(tmp_path / "dinov2.onnx", tmp_path / "out").out
    assert "proof   two fixed images in float32, tolerance 3e-05 of max(1, largest value)" in out
    found = ViTScratchModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        ours, theirs = found(images()).last_hidden_state, network(images()).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def timm_network():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=7
    )
    return randomized(network)


@pytest.mark.peer
def test_a_bare_file_with_timm_s_names_becomes_one_of_ours(tmp_path):
    network = timm_network()
    save_file(network.state_dict(), tmp_path / "vit.safetensors")
    convert(tmp_path / "vit.safetensors", tmp_path / "out", "--num_attention_heads", 4)
    found = ViTScratchForImageClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(images()).logits, network(images()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("to", ["vit", "npz", pytest.param("timm", marks=pytest.mark.peer)])
def test_ours_is_written_for_another_code_and_comes_back_bit_by_bit(ours, tmp_path, to):
    if to == "timm":
        pytest.importorskip("timm")
    out = convert(ours, tmp_path / to, "--to", to).out
    assert f"written as {to}, and read back by" in out and ": equal" in out
    source = tmp_path / to / "model.npz" if to == "npz" else tmp_path / to
    convert(source, tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (ours, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_transformers_loads_what_is_written_for_it(ours, tmp_path):
    convert(ours, tmp_path / "vit", "--to", "vit")
    theirs, info = ViTForImageClassification.from_pretrained(tmp_path / "vit", output_loading_info=True)
    assert not any(info.values())
    model = ViTScratchForImageClassification.from_pretrained(ours).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(images()).logits, model(images()).logits, rtol=0, atol=1e-5)


def test_ours_is_resampled_on_the_way_if_asked(ours, tmp_path):
    convert(ours, tmp_path / "vit", "--to", "vit", "--image_size", 48)
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "vit")
    model = ViTScratchForImageClassification.from_pretrained(ours, image_size=48)
    assert theirs.config.image_size == 48 and ViTImageProcessor.from_pretrained(tmp_path / "vit").size.height == 48
    assert torch.equal(theirs.vit.embeddings.position_embeddings, model.vit.embeddings.position_embeddings)


def test_one_foreign_format_becomes_another(vit_folder, tmp_path):
    """With two proofs: of what was read, and of what was written."""
    outcome = convert(vit_folder, tmp_path / "again", "--to", "vit")
    assert outcome.out.count("proof   ") == 2
    before, after = (load_file(folder / "model.safetensors") for folder in (vit_folder, tmp_path / "again"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_architecture_without_a_place_is_refused_with_the_field_and_nothing_is_written(tmp_path):
    model = tiny_classifier(pooling="mean")
    model.save_pretrained(tmp_path / "model")
    ViTScratchImageProcessor.from_config(model.config).save_pretrained(tmp_path / "model")
    outcome = call("convert", tmp_path / "model", "--output_dir", tmp_path / "out", "--to", "vit")
    assert outcome.code == 2 and "pooling='mean'" in outcome.error_line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_earlier_conversion_is_replaced(vit_folder, npz_file, tmp_path):
    convert(vit_folder, tmp_path / "out")
    convert(npz_file, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["source"] == str(npz_file)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_ends_with_code_3_and_keeps_the_earlier_conversion(vit_folder, npz_file, tmp_path, monkeypatch):
    convert(npz_file, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def no_space(*arguments, **fields):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ViTScratchForImageClassification, "save_pretrained", no_space)
    outcome = call("convert", vit_folder, "--output_dir", tmp_path / "out")
    assert outcome.code == 3 and "No space left on device" in outcome.error_line
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("interruption", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
def test_a_folder_that_cannot_be_put_in_place_leaves_the_earlier_conversion(
    vit_folder, npz_file, tmp_path, monkeypatch, interruption
):
    convert(npz_file, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    replace = os.replace

    def failing(source, target):
        if Path(source).name == "new":
            raise interruption
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    outcome = call("convert", vit_folder, "--output_dir", tmp_path / "out")
    assert outcome.code == (3 if isinstance(interruption, OSError) else 130)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_conversion_that_cannot_be_put_back_is_named(vit_folder, npz_file, tmp_path, monkeypatch):
    convert(npz_file, tmp_path / "out")
    replace = os.replace

    def failing(source, target):
        if Path(target) == tmp_path / "out":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    outcome = call("convert", vit_folder, "--output_dir", tmp_path / "out")
    (aside,) = tmp_path.iterdir()
    assert outcome.code == 3 and f"The earlier conversion lies in {aside}/old" in outcome.error_line
    assert (aside / "old" / "model.safetensors").is_file()


def test_the_source_is_not_replaced_by_what_becomes_of_it(npz_file, ours, tmp_path):
    convert(npz_file, tmp_path / "ours")
    convert(ours, tmp_path / "npz", "--to", "npz")
    before = files_below(tmp_path)
    for source, folder in ((tmp_path / "ours", tmp_path / "ours"), (tmp_path / "npz" / "model.npz", tmp_path / "npz")):
        line = refused("convert", source, "--output_dir", folder, "--to", "vit")
        assert f"holds the source {source}, which it would replace" in line
    assert files_below(tmp_path) == before


def test_the_current_folder_is_not_replaced(vit_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "is the current folder" in refused("convert", vit_folder, "--output_dir", ".")


def test_what_an_export_loses_is_said_in_its_record(tmp_path):
    model = tiny_classifier(hidden_dropout_prob=0.1)
    model.save_pretrained(tmp_path / "model")
    ViTScratchImageProcessor.from_config(model.config).save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "npz", "--to", "npz")
    notes = json.loads((tmp_path / "npz" / "conversion.json").read_text())["notes"]
    assert "an npz file holds no settings of training: hidden_dropout_prob=0.1 is left out" in notes


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "recipe.yaml"])
def test_a_folder_of_something_else_is_left_alone(vit_folder, tmp_path, name):
    (tmp_path / name).write_text("mine")
    line = refused("convert", vit_folder, "--output_dir", tmp_path)
    assert f"--output_dir {tmp_path} holds {name}" in line
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_run_that_started_from_a_conversion_is_no_conversion(vit_folder, tmp_path):
    for name in ("config.json", "conversion.json", "recipe.yaml"):
        (tmp_path / name).write_text("{}")
    assert "holds recipe.yaml, which no conversion wrote" in refused("convert", vit_folder, "--output_dir", tmp_path)


def test_an_index_of_shards_stands_for_its_folder(vit_folder, tmp_path):
    theirs = ViTForImageClassification.from_pretrained(vit_folder)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    convert(tmp_path / "shards" / "model.safetensors.index.json", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["classifier.weight"], theirs.classifier.weight)


# Repos of the Hub


def test_a_hub_repo_is_converted_without_what_is_pickled_or_run(repo, tmp_path):
    out = convert(repo, tmp_path / "out").out
    assert out.startswith("source  alice/vit: transformers' vit")
    assert list(json.loads((tmp_path / "out" / "conversion.json").read_text())["sha256"]) == ["model.safetensors"]
    fetched = sorted(path.name for path in convert_vit_scratch.locate(repo).iterdir())
    assert fetched == ["config.json", "model.safetensors", "preprocessor_config.json"]


def test_a_hub_repo_of_another_network_is_refused_before_its_weights_are_fetched(online, tmp_path):
    online.create("alice/bert")
    online.write("alice/bert", {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"large"})
    assert "alice/bert holds a model of type 'bert'" in refused(
        "convert", "alice/bert", "--output_dir", tmp_path / "out"
    )
    assert online.num_requests("GET", r"resolve/.*\.safetensors") == 0


def test_a_hub_repo_without_safetensors_is_refused_by_its_name(online, vit_folder, tmp_path):
    online.create("alice/pickled")
    online.write(
        "alice/pickled",
        {"config.json": (vit_folder / "config.json").read_bytes(), "pytorch_model.bin": b"pickled"},
    )
    line = refused("convert", "alice/pickled", "--output_dir", tmp_path / "out")
    assert "alice/pickled: the repo holds no model.safetensors" in line


def test_a_revision_of_what_lies_on_this_disk_is_refused(vit_folder, tmp_path):
    line = refused("convert", vit_folder, "--output_dir", tmp_path / "out", "--revision", "main")
    assert f"--revision main is of a Hub repo, and {vit_folder} lies on this disk" in line


def test_a_hub_repo_that_does_not_exist_is_named(online, tmp_path):
    assert "alice/nowhere" in refused("convert", "alice/nowhere", "--output_dir", tmp_path / "out")


def test_a_hub_that_cannot_be_reached_is_the_environment_s_fault(tmp_path):
    outcome = call("convert", "alice/vit-never-fetched", "--output_dir", tmp_path / "out")
    assert outcome.code == 3 and "alice/vit-never-fetched" in outcome.error_line


# What is not understood


def broken(kind: str, folder: Path, vit_folder: Path, npz_file: Path) -> Path:
    """Returns a source with one thing wrong."""
    path = folder / "source"
    if kind == "no such file":
        return path
    if kind == "no name of anything":
        return Path("a b/c d")
    if kind in ("another type", "no config", "config is no JSON", "truncated weights"):
        shutil.copytree(vit_folder, path)
        config, weights = path / "config.json", path / "model.safetensors"
        if kind == "another type":
            config.write_text(json.dumps({"model_type": "bert"}))
        elif kind == "no config":
            config.unlink()
        elif kind == "config is no JSON":
            config.write_text("{")
        else:
            weights.write_bytes(weights.read_bytes()[:5000])
        return path
    if kind == "another ending":
        shutil.copy(npz_file, path.with_suffix(".h5"))
        return path.with_suffix(".h5")
    if kind == "renamed":
        shutil.copy(npz_file, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    if kind == "truncated npz":
        path.with_suffix(".npz").write_bytes(npz_file.read_bytes()[:3000])
        return path.with_suffix(".npz")
    if kind == "transformers' names alone":
        return Path(shutil.copy(vit_folder / "model.safetensors", path.with_suffix(".safetensors")))
    if kind == "another network":
        save_file({"conv1.weight": torch.zeros(2, 2)}, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    assert kind == "a pickle"
    torch.save({"weights": object()}, path.with_suffix(".pth"))
    return path.with_suffix(".pth")


BROKEN = {
    "no such file": "no such file or folder",
    "no name of anything": "no id of a Hub repo; what is understood: ",
    "another type": "model of type 'bert'; what is understood:",
    "no config": "there is no config.json",
    "config is no JSON": "config.json is no JSON",
    "truncated weights": "damaged safetensors file",
    "another ending": "the name must end in one of",
    "renamed": "the name says safetensors",
    "truncated npz": "cut short",
    "transformers' names alone": "which a config.json must explain",
    "another network": "holds no Vision Transformer that is known",
    "a pickle": "only plain tensors are",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_not_understood_is_refused_in_one_line(kind, vit_folder, npz_file, tmp_path):
    source = broken(kind, tmp_path, vit_folder, npz_file)
    line = refused("convert", source, "--output_dir", tmp_path / "out")
    assert str(source) in line and BROKEN[kind] in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [["--drop_distillation"], ["--image_size", 32], ["--num_attention_heads", 4]])
def test_an_option_that_says_nothing_about_the_source_is_refused(option, vit_folder, tmp_path):
    line = refused("convert", vit_folder, "--output_dir", tmp_path / "out", *option)
    assert f"{option[0]} says nothing about transformers' vit" in line


def test_ours_as_ours_is_refused(ours, tmp_path):
    line = refused("convert", ours, "--output_dir", tmp_path / "out")
    assert "is a vit_scratch model already; --to vit or timm or npz" in line

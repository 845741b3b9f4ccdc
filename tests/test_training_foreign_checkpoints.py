"""The verbs that take a model take other codes' checkpoints: proven, with their own pixels and classes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_modeling import tiny_encoder
from fixtures_training import Outcome, call, finetune_flags, flags
from foreign_checkpoints import DIGITS, VIT, convert, randomized
from PIL import Image
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor, ViTScratchModel
from modeling_vit_scratch.convert_npz_vit_scratch import to_npz
from training import finetune as finetuning
from training import pretrained

pytestmark = pytest.mark.e2e  # a second or more each

pytest_plugins = ["fixtures_conversion", "fixtures_hub"]

DATA = {"dataset_name": "digits", "dataloader_num_workers": 0, "test_fraction": 0.05}


def evaluate(model: Path, *more: object, **fields) -> Outcome:
    return call("evaluate", *flags(model_name_or_path=model, **DATA, **fields), *more)


def test_evaluate_measures_a_foreign_checkpoint_as_it_does_the_converted_one(vit_folder, tmp_path):
    convert(vit_folder, tmp_path / "out")
    evaluations = []
    for name, model in (("first", vit_folder), ("second", tmp_path / "out")):
        outcome = evaluate(model, output_dir=tmp_path / name)
        assert outcome.code == 0, outcome.err
        evaluations.append((tmp_path / name / "metrics.json").read_text())
    assert evaluations[0] == evaluations[1]


def test_evaluate_proves_a_foreign_checkpoint_and_says_so(vit_folder, tmp_path, caplog):
    convert(vit_folder, tmp_path / "out")
    assert evaluate(Path(shutil.copytree(vit_folder, tmp_path / "unseen"))).code == 0
    assert "proof   two fixed images in float64" in caplog.text
    caplog.clear()
    assert evaluate(tmp_path / "out").code == 0
    assert "proof" not in caplog.text


def test_evaluate_records_what_was_converted(vit_folder, tmp_path):
    assert evaluate(vit_folder, output_dir=tmp_path).code == 0
    assert json.loads((tmp_path / "conversion.json").read_text())["kind"] == "transformers' vit"


def test_evaluate_takes_nameless_classes_for_those_of_the_dataset(npz_file, caplog):
    outcome = evaluate(npz_file, classes=list("012"))
    assert outcome.code == 0, outcome.err
    assert "have no names: they are taken for those of the dataset, in its order" in caplog.text


def test_nameless_classes_of_another_number_are_refused(npz_file):
    outcome = evaluate(npz_file, classes=list("01"))
    assert outcome.code == 2
    assert "has 3 classes without names, and digits has 2 classes" in outcome.error_line


def test_evaluate_takes_a_hub_repo_of_another_code(repo, vit_folder):
    assert evaluate(repo).out == evaluate(vit_folder).out


def test_evaluate_refuses_an_encoder(tmp_path):
    randomized(ViTModel(ViTConfig(**VIT), add_pooling_layer=False)).save_pretrained(tmp_path)
    outcome = evaluate(tmp_path)
    assert outcome.code == 2 and "has no trained classifier" in outcome.error_line


def test_predict_says_what_transformers_says(vit_folder, tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    outcome = call("predict", vit_folder, tmp_path / "image.png", "--top_k", 10)
    assert outcome.code == 0, outcome.err
    found = dict(item.split() for item in outcome.out.strip().split("\t")[1:])
    pixels = ViTImageProcessor.from_pretrained(vit_folder)(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        scores = ViTForImageClassification.from_pretrained(vit_folder).eval()(pixels).logits.softmax(1)[0]
    expected = dict(zip(DIGITS, scores.tolist(), strict=True))
    assert {name: float(score) for name, score in found.items()} == pytest.approx(expected, abs=1e-4)


def finetune(start: Path, folder: Path, **fields: object) -> None:
    """One step of next to nothing on three of the digits, so that the weights are those it starts from."""
    common = {"classes": list("012"), "learning_rate": 1e-12, "max_steps": 1, "test_fraction": 0.02}
    outcome = call(*finetune_flags(start, folder, **{**common, **fields}))
    assert outcome.code == 0, outcome.err


@pytest.fixture(scope="module")
def run(vit_folder, tmp_path_factory) -> Path:
    """A fine-tuning from transformers' ViT by next to nothing."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    finetune(vit_folder, folder)
    return folder


def test_finetune_starts_from_every_tensor_of_a_foreign_encoder(run, vit_folder):
    before, after = load_file(vit_folder / "model.safetensors"), ViTScratchForImageClassification.from_pretrained(run)
    theirs = ViTForImageClassification.from_pretrained(vit_folder).vit.state_dict()
    found = after.vit.state_dict()
    assert found.keys() == theirs.keys() and len(before) == len(theirs) + 2
    for name, tensor in theirs.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)
    assert after.config.num_labels == 3 and after.classifier.weight.abs().max() < 1e-9


def test_finetune_uses_the_source_s_own_pixels(run):
    processor = ViTScratchImageProcessor.from_pretrained(run)
    assert (processor.image_mean, processor.image_std, processor.resample) == ([0.3] * 3, [0.2] * 3, 3)
    assert processor.size == {"height": 32, "width": 32}


def test_the_run_states_what_it_was_converted_from(run, vit_folder):
    record = json.loads((run / "conversion.json").read_text())
    assert record["source"] == str(vit_folder) and record["kind"] == "transformers' vit"
    assert {row["output"] for row in record["proof"]} >= {"logits"}


def test_a_run_from_a_converted_folder_states_what_that_was_converted_from(npz_file, tmp_path):
    convert(npz_file, tmp_path / "out")
    finetune(tmp_path / "out", tmp_path / "run")
    records = [(folder / "conversion.json").read_text() for folder in (tmp_path / "out", tmp_path / "run")]
    assert records[0] == records[1]


def test_a_run_from_a_run_does_not_state_what_the_first_was_converted_from(run, tmp_path):
    assert (run / "conversion.json").exists()
    finetune(run, tmp_path / "second")
    assert not (tmp_path / "second" / "conversion.json").exists()


def test_evaluate_leaves_the_record_of_a_conversion_alone(vit_folder, npz_file, tmp_path):
    convert(npz_file, tmp_path / "out")
    before = (tmp_path / "out" / "conversion.json").read_bytes()
    outcome = evaluate(vit_folder, output_dir=tmp_path / "out")
    assert outcome.code == 2 and "already holds conversion.json: name another folder" in outcome.error_line
    assert (tmp_path / "out" / "conversion.json").read_bytes() == before


def test_the_converted_copy_is_freed_before_training_starts(vit_folder, tmp_path, monkeypatch):
    held = []
    right = finetuning.fit

    def fit(*arguments, **fields):
        held.append(pretrained._convert.cache_info().currsize)
        return right(*arguments, **fields)

    monkeypatch.setattr(finetuning, "fit", fit)
    finetune(vit_folder, tmp_path / "run")
    assert held == [0]


def test_finetune_resamples_a_foreign_encoder(vit_folder, tmp_path):
    finetune(vit_folder, tmp_path / "run", image_size=48)
    assert ViTScratchModel.from_pretrained(tmp_path / "run").embeddings.position_embeddings.shape == (1, 37, 32)
    assert ViTScratchImageProcessor.from_pretrained(tmp_path / "run").size == {"height": 48, "width": 48}


def test_a_kept_foreign_head_goes_on_from_what_it_knows(npz_file, tmp_path):
    finetune(npz_file, tmp_path / "run", new_head="false")
    found = ViTScratchForImageClassification.from_pretrained(tmp_path / "run")
    kernel = torch.from_numpy(np.load(npz_file)["head/kernel"])
    torch.testing.assert_close(found.classifier.weight, kernel.T, rtol=0, atol=1e-9)
    assert list(found.config.id2label.values()) == list("012")


def test_a_checkpoint_that_changes_under_its_name_is_read_again(vit_folder, tmp_path):
    folder, image = shutil.copytree(vit_folder, tmp_path / "vit"), tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    model, likeliest = ViTForImageClassification.from_pretrained(folder), []
    for index in (3, 4):
        with torch.no_grad():
            model.classifier.bias[index] = 100 * index
        model.save_pretrained(folder)
        likeliest.append(call("predict", folder, image, "--top_k", 1).out.split()[1])
    assert likeliest == ["3", "4"]


def test_a_dtype_other_than_float32_is_kept_by_convert_and_widened_by_training(tmp_path):
    randomized(ViTModel(ViTConfig(**VIT), add_pooling_layer=False)).bfloat16().save_pretrained(tmp_path / "vit")
    convert(tmp_path / "vit", tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    finetune(tmp_path / "vit", tmp_path / "run")
    assert {tensor.dtype for tensor in load_file(tmp_path / "run" / "model.safetensors").values()} == {torch.float32}


def test_an_encoder_of_ours_in_npz_starts_a_run(tmp_path):
    model = tiny_encoder()
    np.savez(tmp_path / "encoder.npz", **to_npz(model, ViTScratchImageProcessor.from_config(model.config)))
    finetune(tmp_path / "encoder.npz", tmp_path / "run")
    found = ViTScratchModel.from_pretrained(tmp_path / "run").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)

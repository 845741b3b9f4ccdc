"""The golden replays exactly here, and tells a changed model, processor or NaN from it."""

import pytest
import torch
from safetensors.torch import load_file

from hub_upload.fresh_load import golden_images, replay_golden
from hub_upload.golden import golden_problem, write_golden
from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch.errors_vit_scratch import InputError


def tiny(**fields):
    torch.manual_seed(0)
    shape = {"image_size": [8, 16], "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2}
    config = ViTScratchConfig(
        **{**shape, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3, **fields},
    )
    model = ViTScratchForImageClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight)  # a fresh head is zero and would hide the body
    return model, ViTScratchImageProcessor.from_config(config)


@pytest.fixture
def golden(tmp_path):
    model, processor = tiny()
    write_golden(tmp_path / "golden.safetensors", model, processor)
    return tmp_path / "golden.safetensors", model, processor


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("resize_mode", ["squash", "shorter", "pad", "none"])
def test_the_same_model_replays_exactly(tmp_path, num_channels, resize_mode):
    model, processor = tiny(num_channels=num_channels)
    processor = ViTScratchImageProcessor.from_config(model.config, resize_mode=resize_mode)
    write_golden(tmp_path / "golden.safetensors", model, processor)
    report = replay_golden(tmp_path / "golden.safetensors", model, processor)
    assert (report["max_logit_difference"], report["max_pixel_difference"]) == (0.0, 0.0)


def test_two_goldens_of_one_model_are_the_same_bytes(golden, tmp_path):
    path, model, processor = golden
    write_golden(tmp_path / "again.safetensors", model, processor)
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_the_recorded_logits_are_those_of_a_plain_forward(golden):
    path, model, processor = golden
    with torch.no_grad():
        expected = torch.cat(
            [model(processor([im], return_tensors="pt")["pixel_values"]).logits for im in golden_images(path)]
        )
    torch.testing.assert_close(load_file(path)["logits"], expected, rtol=0, atol=1e-5)  # batched in another way


def test_the_images_differ_in_size_so_that_the_resize_is_replayed(golden):
    assert len({image.size for image in golden_images(golden[0])}) == 3


def test_one_changed_weight_is_found_and_its_class_named(golden):
    path, model, processor = golden
    with torch.no_grad():
        model.classifier.bias[2] += 0.01
    problem = golden_problem(replay_golden(path, model, processor))
    assert "by up to 0.01 " in problem and "class 2" in problem


def test_a_difference_of_rounding_is_accepted(golden):
    path, model, processor = golden
    with torch.no_grad():
        model.classifier.bias[2] += 2e-5
    assert golden_problem(replay_golden(path, model, processor)) is None


def test_a_changed_processor_is_found(golden):
    path, model, _ = golden
    other = ViTScratchImageProcessor.from_config(model.config, image_mean=[0.4] * 3)
    assert golden_problem(replay_golden(path, model, other)).startswith("pixel_values differ")


def test_nan_logits_count_as_a_difference(golden):
    path, model, processor = golden
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    assert "differ" in golden_problem(replay_golden(path, model, processor))


def test_a_model_with_nan_gets_no_golden(tmp_path):
    model, processor = tiny()
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        write_golden(tmp_path / "golden.safetensors", model, processor)
    assert not (tmp_path / "golden.safetensors").exists()

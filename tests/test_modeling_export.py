"""torch.export and ONNX: any batch size, and the same numbers as the model that was exported."""

import logging

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_config, tiny_encoder
from fixtures_variants import VARIANTS, variant_classifier, variant_pixels
from torch import Tensor, nn

from modeling_vit_scratch import ViTScratchBackbone

pytestmark = pytest.mark.e2e  # a second or more each

# Another order of summation in float32; logits are around 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ANY_BATCH = {"pixel_values": {0: torch.export.Dim("batch")}}

# Families whose graphs differ: attention, tokens, positions, heads, the ResNet.
KINDS = ["learned 1-D", "relative", "rotary", "root of a ResNet alone", "registers and attention pooling"]


def exported(model: nn.Module, pixels: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (pixels,), dynamic_shapes=ANY_BATCH)


@pytest.mark.parametrize(
    "variant",
    [*KINDS, *(pytest.param(name, marks=pytest.mark.e2e) for name in VARIANTS if name not in KINDS)],
)
def test_an_exported_program_takes_any_batch(variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant, batch=5)
    program = exported(model, variant_pixels(variant, batch=3)).module()
    torch.testing.assert_close(program(pixels).logits, model(pixels).logits, **CLOSE)


def test_an_exported_program_takes_one_image():
    model = tiny_encoder()
    program, pixels = exported(model, random_pixels(3)).module(), random_pixels(1)
    torch.testing.assert_close(program(pixels).pooler_output, model(pixels).pooler_output, **CLOSE)


def test_an_exported_program_is_the_same_after_a_file(tmp_path):
    program, pixels = exported(tiny_encoder(), random_pixels(3)), random_pixels(2)
    torch.export.save(program, tmp_path / "encoder.pt2")
    loaded = torch.export.load(tmp_path / "encoder.pt2").module()(pixels)
    torch.testing.assert_close(loaded.pooler_output, program.module()(pixels).pooler_output, rtol=0, atol=0)


def test_an_exported_backbone_gives_its_feature_maps():
    backbone, pixels = ViTScratchBackbone(tiny_config(out_features=["stage1", "stage2"])).eval(), random_pixels(5)
    program = exported(backbone, random_pixels(3)).module()
    torch.testing.assert_close(program(pixels).feature_maps, backbone(pixels).feature_maps, **CLOSE)


def test_an_image_of_another_size_is_refused_by_an_exported_program():
    program = exported(tiny_encoder(), random_pixels(3)).module()
    with pytest.raises(AssertionError, match="Guard failed"):
        program(random_pixels(3, height=48))


# ONNX.


def run_onnx(model: nn.Module, example: Tensor, pixels: Tensor, folder) -> list[Tensor]:
    """Returns the outputs of the exported model in onnxruntime, a runtime of its own."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.onnx.export(model, (example,), folder / "model.onnx", dynamo=True, dynamic_shapes=ANY_BATCH, verbose=False)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    return [torch.from_numpy(output) for output in outputs]


@pytest.mark.peer
@pytest.mark.parametrize("variant", VARIANTS)
def test_onnxruntime_gives_the_same_logits_for_any_batch(tmp_path, variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant, batch=5)
    logits = run_onnx(model, variant_pixels(variant, batch=3), pixels, tmp_path)
    torch.testing.assert_close(logits, [model(pixels).logits.detach()], **CLOSE)


@pytest.mark.peer
def test_onnxruntime_gives_the_same_feature_maps(tmp_path):
    backbone, pixels = ViTScratchBackbone(tiny_config(out_features=["stage1", "stage2"])).eval(), random_pixels(5)
    feature_maps = run_onnx(backbone, random_pixels(3), pixels, tmp_path)
    expected = [feature_map.detach() for feature_map in backbone(pixels).feature_maps]
    torch.testing.assert_close(feature_maps, expected, **CLOSE)

"""What only an accelerator can show; skips cleanly without one."""

import copy

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier
from fixtures_variants import COMBINATIONS, VARIANTS, variant_classifier, variant_encoder, variant_pixels
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available

from modeling_vit_scratch import ViTScratchBackbone
from training.arguments import OptimizationArguments
from training.optimization import build_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LABELS = torch.tensor([0, 3, 1, 2])
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
}  # heads of 16 channels, the fewest that flex attention takes on CUDA
KERNELS = ["eager", "sdpa", "flex_attention", "flash_attention_2"]
WITHOUT_RELATIVE = [name for name, fields in VARIANTS.items() if fields.get("position_embedding_type") != "relative"]


@pytest.fixture(autouse=True)
def _float32_as_on_a_cpu(monkeypatch):
    # By default convolutions round their float32 inputs to 10 bits of mantissa (TF32) on CUDA.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.cpu().float() - expected).norm() / expected.norm()).item()


def gradients_of(model: nn.Module, pixels: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(pixels, labels=LABELS.to(pixels.device)).loss.backward()
    gradients = {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


# Every variant.


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_variant_on_the_device_equal_those_on_the_cpu(variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant)
    with torch.no_grad():
        expected = model(pixels).logits
        logits = model.cuda()(pixels.cuda()).logits.cpu()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_kernel_under_autocast_are_close_to_those_in_float32(variant, kernel):
    if kernel == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("the package flash-attn is not installed")
    if kernel in ("flex_attention", "flash_attention_2") and variant not in WITHOUT_RELATIVE:
        pytest.skip("refused: see test_modeling_kernels.py")
    model, pixels = variant_classifier(variant, **WIDE), variant_pixels(variant)
    with torch.no_grad():
        expected = model(pixels).logits
        model.cuda().set_attn_implementation(kernel)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(pixels.cuda()).logits
    assert relative_error(logits, expected) < 0.04  # bfloat16 has 8 bits of mantissa


@pytest.mark.parametrize("variant", ["learned 1-D", "rotary", "QK-norm", "registers and attention pooling"])
def test_gradients_through_flex_attention_equal_those_through_sdpa(variant):
    model, pixels = variant_classifier(variant, **WIDE).cuda(), variant_pixels(variant, batch=4).cuda()
    expected = gradients_of(model, pixels)
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(gradients_of(model, pixels), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_training_step_of_a_variant_under_autocast_gives_every_parameter_a_finite_gradient(variant):
    model, pixels = variant_classifier(variant).cuda().train(), variant_pixels(variant, batch=4).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        gradients = gradients_of(model, pixels)
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()] == []


@pytest.mark.parametrize("variant", ["relative", "rotary", "hybrid", *COMBINATIONS])
def test_a_variant_compiled_for_the_device_gives_the_same_gradients(variant):
    fields = {
        "drop_path_rate": 0.0,
        "patch_dropout_rate": 0.0,
        "hidden_dropout_prob": 0.0,
    }  # else other random numbers
    model = variant_classifier(variant, **fields).cuda().train()
    pixels = variant_pixels(variant, batch=4).cuda()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    torch.testing.assert_close(gradients_of(compiled, pixels), gradients_of(model, pixels), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", ["stochastic depth", "patch dropout", *COMBINATIONS])
def test_gradient_checkpointing_on_the_device_skips_the_same_images_and_patches_again(variant):
    model, pixels = variant_classifier(variant).cuda().train(), variant_pixels(variant, batch=4).cuda()
    expected = gradients_of(model, pixels)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Some backward kernels add up in an order that changes from run to run; other images would change the first digit.
    torch.testing.assert_close(gradients_of(model, pixels), expected, rtol=1e-4, atol=1e-4)


def test_stochastic_depth_on_the_device_computes_only_the_images_it_keeps():
    model, seen = variant_encoder("stochastic depth", num_hidden_layers=3).cuda().train(), []
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    model(random_pixels(batch=10).cuda())
    assert seen == [10, 8, 6]  # at rates 0, 0.2 and 0.4


@pytest.mark.parametrize("variant", ["rotary", "relative", "as DINOv2"])
def test_feature_maps_on_the_device_equal_those_on_the_cpu(variant):
    config = variant_encoder(variant).config
    backbone, pixels = ViTScratchBackbone(config).eval(), variant_pixels(variant)
    with torch.no_grad():
        expected = backbone(pixels).feature_maps[0]
        feature_map = backbone.cuda()(pixels.cuda()).feature_maps[0].cpu()
    torch.testing.assert_close(feature_map, expected, atol=1e-4, rtol=1e-4)


# The plain network.


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_logits_on_the_device_equal_those_on_the_cpu(attention):
    model = tiny_classifier()
    if attention is not None:
        model.set_attn_implementation(attention)
    pixel_values = random_pixels()
    with torch.no_grad():
        expected = model(pixel_values).logits
        logits = model.cuda()(pixel_values.cuda()).logits.cpu()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_class_token_layer_equals_the_full_layer_in_bfloat16():
    model = tiny_classifier().cuda()
    pixel_values = random_pixels().cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        short, full = model(pixel_values).logits, model(pixel_values, output_hidden_states=True).logits
    torch.testing.assert_close(short, full, atol=3e-2, rtol=3e-2)  # bfloat16 has 8 bits of mantissa


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_gated_update_leaves_weights_as_they_were(optimizer):
    model = tiny_classifier().cuda()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fused = build_optimizer(model, OptimizationArguments(optimizer=optimizer, max_steps=1, weight_decay=0.1))
    model(random_pixels().cuda(), labels=torch.tensor([0, 1]).cuda()).loss.mul(float("nan")).backward()
    fused.found_inf = torch.tensor(1.0, device="cuda")
    fused.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())

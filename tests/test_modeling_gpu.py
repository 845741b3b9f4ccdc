"""What only an accelerator can show; skips cleanly without one."""

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier

from training.arguments import OptimizationArguments
from training.optimization import build_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


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

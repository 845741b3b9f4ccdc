"""torch.compile: every network is one graph, in evaluation and in training, and gives what it gives uncompiled."""

import copy

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config
from fixtures_variants import COMBINATIONS, VARIANTS, variant_classifier, variant_pixels
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from modeling_vit_scratch import ViTScratchBackbone
from modeling_vit_scratch.residual_vit_scratch import forward_with_stochastic_depth

pytestmark = pytest.mark.e2e  # a second or more each

EXACT = {"rtol": 0, "atol": 0}
LABELS = torch.tensor([0, 3, 1, 2])

# What these have in their graph, no other one has. The rest takes longer than the fast tier may.
KINDS = [
    "learned 1-D",
    "relative",
    "rotary",
    "root of a ResNet alone",
    "registers and attention pooling",
    "SwiGLU and QK-norm",
    "distillation token",
]
RANDOM = ["stochastic depth", "patch dropout", "dropout"]


def fast(names: list[str], others: list[str]) -> list:
    """Parameters of a test: `names` in the fast tier, `others` beyond it."""
    return [*names, *(pytest.param(name, marks=pytest.mark.e2e) for name in others if name not in names)]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_one_graph(model: torch.nn.Module, backend: str = "eager"):
    """Compiles a copy of the model; a graph break raises. The backend "eager" runs the captured graph as it is."""
    return torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)


@pytest.mark.parametrize("variant", fast(KINDS, list(VARIANTS)))
def test_the_forward_is_one_graph_with_the_same_logits(variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant)
    torch.testing.assert_close(as_one_graph(model)(pixels).logits, model(pixels).logits, **EXACT)


@pytest.mark.parametrize("variant", fast(RANDOM, list(COMBINATIONS)))
def test_a_training_step_is_one_graph_with_a_gradient_for_every_parameter(variant):
    compiled = as_one_graph(variant_classifier(variant).train())
    compiled(variant_pixels(variant, batch=4), labels=LABELS).loss.backward()
    gradients = {name: parameter.grad for name, parameter in compiled.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()] == []


@pytest.mark.parametrize("variant", ["patch dropout", "dropout"])
def test_what_is_dropped_when_compiled_is_what_the_seed_says(variant):
    model, pixels = variant_classifier(variant).train(), variant_pixels(variant)
    losses = []
    for network in (model, as_one_graph(model)):
        torch.manual_seed(0)
        losses.append(network(pixels, labels=LABELS[:2]).loss)
    torch.testing.assert_close(*losses, **EXACT)


def test_compiled_stochastic_depth_drops_whole_images_and_scales_the_rest():
    # A graph has a fixed number of images, so that the update of all is computed and masked.
    torch.manual_seed(0)
    layer = copy.deepcopy(tiny_classifier().vit.layers[0]).train()
    layer.drop_path_rate = 0.4
    torch.nn.init.zeros_(layer.mlp.fc2.weight)  # so that only the attention branch adds anything
    torch.nn.init.zeros_(layer.mlp.fc2.bias)
    tokens = torch.randn(1000, 3, 32)
    update, _ = layer.attention_branch(tokens, None, False, False)
    compiled = torch.compile(forward_with_stochastic_depth, fullgraph=True, backend="eager")
    added = compiled(layer, tokens, None, False, False)[0] - tokens
    is_kept = added.flatten(1).any(dim=1)
    torch.testing.assert_close(added[is_kept], update[is_kept] / 0.6, rtol=1e-4, atol=1e-5)
    assert abs(is_kept.double().mean().item() - 0.6) < 0.05  # 3.2 standard deviations of the mean of 1,000 draws


@pytest.mark.parametrize("out_features", [["stem", "stage1"], ["stage2"]], ids="-".join)
def test_a_backbone_is_one_graph_with_the_same_feature_maps(out_features):
    backbone, pixels = ViTScratchBackbone(tiny_config(out_features=out_features)).eval(), random_pixels()
    compiled = as_one_graph(backbone)(pixels).feature_maps
    torch.testing.assert_close(compiled, backbone(pixels).feature_maps, **EXACT)


@pytest.mark.e2e
def test_a_third_batch_size_compiles_nothing_anew():
    counter = CompileCounter()
    model = torch.compile(tiny_classifier(), fullgraph=True, backend=counter)
    for batch in (2, 3, 4, 5):
        model(random_pixels(batch))
    assert counter.frame_count <= 2  # one for the first batch size, one for any other


def gradients_of(model: torch.nn.Module, pixels: Tensor) -> dict[str, Tensor]:
    model(pixels, labels=LABELS).loss.backward()
    return {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.e2e
@pytest.mark.parametrize("variant", ["rotary", "relative"])
def test_the_backward_traced_ahead_of_time_gives_the_same_gradients(variant):
    model, pixels = variant_classifier(variant).train(), variant_pixels(variant, batch=4)
    compiled = as_one_graph(model, backend="aot_eager")
    torch.testing.assert_close(gradients_of(compiled, pixels), gradients_of(model, pixels), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["as DINOv2", "as DINOv3", "relative", "hybrid"])
def test_compiled_machine_code_gives_the_same_logits(variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant)
    logits = as_one_graph(model, backend="inductor")(pixels).logits
    torch.testing.assert_close(logits, model(pixels).logits, rtol=1e-4, atol=1e-5)

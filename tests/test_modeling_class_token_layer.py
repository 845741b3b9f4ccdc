"""The classifier's last layer for the class token alone: the same numbers, and only where they are the same."""

from typing import Any

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from modeling_vit_scratch import ViTScratchForImageClassification
from modeling_vit_scratch import modeling_vit_scratch as modeling

CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def class_token_calls(monkeypatch) -> list[nn.Module]:
    """The attention modules that were computed for the class token alone, in order."""
    calls: list[nn.Module] = []
    original = modeling.attend_from_class_token

    def recorded(attention, hidden_states):
        calls.append(attention)
        return original(attention, hidden_states)

    monkeypatch.setattr(modeling, "attend_from_class_token", recorded)
    return calls


def full_logits(model: ViTScratchForImageClassification, pixels: torch.Tensor) -> torch.Tensor:
    """Logits over an encoder whose last layer computes every token."""
    return model.classifier(model.vit(pixels).pooler_output)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no qkv bias": {"qkv_bias": False},
    "pre-logits": {"representation_size": 16},
    "one layer": {"num_hidden_layers": 1},
    "one head": {"num_attention_heads": 1},
    "not square": {"image_size": [32, 16], "patch_size": [4, 8]},
    "sdpa": {"attn_implementation": "sdpa"},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_full_layer(name, class_token_calls):
    model, pixels = tiny_classifier(dtype=torch.float64, **MODELS[name]), random_pixels(dtype=torch.float64)
    logits = model(pixels).logits
    assert class_token_calls == [model.vit.layers[-1].attention]
    torch.testing.assert_close(logits, full_logits(model, pixels), **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_that_of_the_full_layer(name, class_token_calls):
    model, labels = tiny_classifier(dtype=torch.float64, **MODELS[name]), torch.tensor([0, 3])
    pixels = random_pixels(dtype=torch.float64).requires_grad_()
    tensors = {**dict(model.named_parameters()), "pixel_values": pixels}
    absorbed = torch.autograd.grad(model(pixels, labels=labels).loss, list(tensors.values()))
    assert len(class_token_calls) == 1
    full = torch.autograd.grad(F.cross_entropy(full_logits(model, pixels), labels), list(tensors.values()))
    actual, expected = dict(zip(tensors, absorbed, strict=True)), dict(zip(tensors, full, strict=True))
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_the_gradient_of_the_key_bias_exists_and_is_zero(class_token_calls):
    model = tiny_classifier(dtype=torch.float64)
    model(random_pixels(dtype=torch.float64), labels=torch.tensor([0, 3])).loss.backward()
    gradient = model.vit.layers[-1].attention.k_proj.bias.grad
    assert len(class_token_calls) == 1
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), **CLOSE)


def test_it_sees_another_grid_as_the_full_layer_does(class_token_calls):
    model, pixels = tiny_classifier(dtype=torch.float64), random_pixels(height=48, width=24, dtype=torch.float64)
    torch.testing.assert_close(model(pixels).logits, full_logits(model, pixels), **CLOSE)
    assert len(class_token_calls) == 1


def test_attention_dropout_acts_on_it_as_on_the_full_layer(class_token_calls, monkeypatch):
    def drop_every_third_key(weights, p=0.5, training=True, inplace=False):
        kept = torch.arange(weights.shape[-1]) % 3 != 0
        return weights * kept / (1 - p) if p and training else weights

    monkeypatch.setattr(F, "dropout", drop_every_third_key)
    fields = {"attention_probs_dropout_prob": 0.25, "attn_implementation": "eager"}
    model, pixels = tiny_classifier(dtype=torch.float64, **fields).train(), random_pixels(dtype=torch.float64)
    torch.testing.assert_close(model(pixels).logits, full_logits(model, pixels), **CLOSE)
    assert len(class_token_calls) == 1


def test_gradient_checkpointing_keeps_it(class_token_calls):
    model = tiny_classifier().train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model(random_pixels())
    assert len(class_token_calls) == 1


# Where the full layer is needed.


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
def test_outputs_asked_for_need_the_full_layer(asked, class_token_calls):
    tiny_classifier()(random_pixels(), **{asked: True})
    assert class_token_calls == []


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
def test_outputs_asked_for_by_the_config_need_the_full_layer(asked, class_token_calls):
    tiny_classifier(**{asked: True})(random_pixels())
    assert class_token_calls == []


def test_mean_pooling_needs_the_full_layer(class_token_calls):
    tiny_classifier(pooling="mean")(random_pixels())
    assert class_token_calls == []


def test_the_encoder_by_itself_returns_all_tokens(class_token_calls):
    assert tiny_classifier().vit(random_pixels()).last_hidden_state.shape[1] == 17
    assert class_token_calls == []


WATCHED = [
    "vit.layers.1.attention.k_proj",
    "vit.layers.1.attention.o_proj",
    "vit.layers.1.attention",
    "vit.layers.1.mlp.fc1",
    "vit.layers.1.layernorm_before",
    "vit.layers.1",
    "vit.layernorm",
    "vit",
]


@pytest.mark.parametrize("name", WATCHED)
def test_a_hook_sees_every_token(name):
    model, shapes = tiny_classifier(), []
    module = model.get_submodule(name)

    def record(module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        shapes.append(tuple((output if isinstance(output, torch.Tensor) else output.last_hidden_state).shape[:2]))

    module.register_forward_hook(record)
    model(random_pixels())
    assert shapes == [(2, 17)]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_of_any_kind_is_called(register):
    model, calls = tiny_classifier(), []
    getattr(model.vit.layers[-1].attention.v_proj, register)(lambda *args: calls.append(args) or None)
    model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
    assert len(calls) == 1


def test_a_removed_hook_is_forgotten(class_token_calls):
    model = tiny_classifier()
    model.vit.layers[-1].register_forward_hook(lambda *args: None).remove()
    model(random_pixels())
    assert len(class_token_calls) == 1


def test_a_hook_that_edits_the_keys_changes_the_logits():
    model, pixels = tiny_classifier(), random_pixels()
    before = model(pixels).logits
    model.vit.layers[-1].attention.k_proj.register_forward_hook(lambda module, args, output: output.roll(1, dims=-1))
    assert (model(pixels).logits - before).abs().max() > 1e-3


class DoublingLinear(nn.Linear):
    """Reads its weight as `nn.Linear` does, and returns something else."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_replaced_projection_is_called(name):
    model, pixels = tiny_classifier(dtype=torch.float64), random_pixels(dtype=torch.float64)
    attention = model.vit.layers[-1].attention
    before, plain = model(pixels).logits, attention.get_submodule(name)
    replacement = DoublingLinear(32, 32, dtype=torch.float64)
    replacement.load_state_dict(plain.state_dict())
    setattr(attention, name, replacement)
    replaced = model(pixels).logits
    with torch.no_grad():
        plain.weight.mul_(2)
        plain.bias.mul_(2)
    setattr(attention, name, plain)
    torch.testing.assert_close(replaced, model(pixels).logits, **CLOSE)
    assert (replaced - before).abs().max() > 1e-3


def test_a_replaced_forward_is_called(monkeypatch):
    model, calls = tiny_classifier(), []
    k_proj = model.vit.layers[-1].attention.k_proj
    original = k_proj.forward
    monkeypatch.setattr(k_proj, "forward", lambda hidden: calls.append(hidden.shape[1]) or original(hidden))
    model(random_pixels())
    assert calls == [17]


def test_an_attention_of_another_class_is_called():
    class Silent(modeling.ViTScratchAttention):
        def forward(self, hidden_states, token_positions=None, output_attentions=False):
            return torch.zeros_like(hidden_states), None

    model, pixels = tiny_classifier(), random_pixels()
    model.vit.layers[-1].attention = Silent(model.config)
    torch.testing.assert_close(model(pixels).logits, full_logits(model, pixels))


def test_a_parametrized_weight_is_computed():
    model, pixels = tiny_classifier(dtype=torch.float64), random_pixels(dtype=torch.float64)
    before = model(pixels).logits
    parametrizations.spectral_norm(model.vit.layers[-1].attention.k_proj)
    model.eval()
    after = model(pixels).logits
    torch.testing.assert_close(after, full_logits(model, pixels), **CLOSE)
    assert (after - before).abs().max() > 1e-4


class OtherTensor(torch.Tensor):
    """As quantisation and tensor parallelism replace weights: a kind of tensor that may not be what it looks like."""


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_weight_of_another_kind_is_left_to_its_layer(name, class_token_calls):
    model = tiny_classifier()
    projection = model.vit.layers[-1].attention.get_submodule(name)
    projection.weight = nn.Parameter(projection.weight.data.as_subclass(OtherTensor))
    model(random_pixels())
    assert class_token_calls == []


# Adapters.

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def with_lora(model: ViTScratchForImageClassification, *, last_layer_only: bool = False, **fields: Any):
    """Returns the model with an adapter on its attention, whose B is not zero."""
    where: dict[str, Any] = {"target_modules": PROJECTIONS}
    if last_layer_only:
        where = {"target_modules": rf".*layers\.{len(model.vit.layers) - 1}\.attention\.({'|'.join(PROJECTIONS)})"}
    adapted = get_peft_model(model, LoraConfig(r=2, **where, **fields))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return adapted


def test_an_adapter_in_the_last_layer_changes_the_logits():
    model, pixels = tiny_classifier(), random_pixels()
    before = model(pixels).logits
    adapted = with_lora(model, last_layer_only=True)
    assert sum("lora_B" in name for name, _ in adapted.named_parameters()) == 4
    assert (adapted(pixels).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    "fields", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["lora", "dora", "lora with bias"]
)
def test_an_adapter_equals_its_merged_model(fields, class_token_calls):
    pixels = random_pixels(dtype=torch.float64)
    adapted = with_lora(tiny_classifier(dtype=torch.float64), **fields).double()
    before = adapted(pixels).logits
    assert class_token_calls == []
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(pixels).logits, before, rtol=0, atol=1e-10)
    assert len(class_token_calls) == 1  # plain layers again


@pytest.mark.parametrize("target", PROJECTIONS)
def test_an_adapter_on_one_projection_equals_its_merged_model(target):
    pixels = random_pixels(dtype=torch.float64)
    adapted = get_peft_model(
        tiny_classifier(dtype=torch.float64), LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    ).double()
    before = adapted(pixels).logits
    torch.testing.assert_close(adapted.merge_and_unload()(pixels).logits, before, rtol=0, atol=1e-10)


def test_an_adapter_gets_gradients_in_every_layer():
    adapted = with_lora(tiny_classifier(dtype=torch.float64))
    adapted(random_pixels(dtype=torch.float64), labels=torch.tensor([0, 3])).loss.backward()
    adapters = {name: parameter for name, parameter in adapted.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 4 * 2  # layers x projections x (A, B)
    assert [name for name, parameter in adapters.items() if not parameter.grad.abs().sum() > 0] == []


def test_the_patch_projection_takes_an_adapter_too():
    pixels = random_pixels(dtype=torch.float64)
    fields = {"target_modules": ["projection"], "init_lora_weights": False}
    adapted = get_peft_model(tiny_classifier(dtype=torch.float64), LoraConfig(r=2, **fields)).double()
    before = adapted(pixels).logits
    torch.testing.assert_close(adapted.merge_and_unload()(pixels).logits, before, rtol=0, atol=1e-10)


def test_a_disabled_adapter_gives_the_logits_of_the_base_model():
    model, pixels = tiny_classifier(dtype=torch.float64), random_pixels(dtype=torch.float64)
    before = model(pixels).logits
    adapted = with_lora(model)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(pixels).logits, before, **CLOSE)

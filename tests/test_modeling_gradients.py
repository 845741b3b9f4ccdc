"""Training: gradients of every parameter, gradient checkpointing, compilation."""

import copy

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_encoder
from transformers import Trainer, TrainingArguments

from modeling_vit_scratch import modeling_vit_scratch as modeling

EXACT = {"rtol": 0, "atol": 0}

HEADS = {
    "class token": {},
    "mean": {"pooling": "mean"},
    "pre-logits": {"representation_size": 16},
    "mean with pre-logits": {"pooling": "mean", "representation_size": 16},
    "no qkv bias": {"qkv_bias": False},
    "one layer": {"num_hidden_layers": 1},
    "sigmoid": {"problem_type": "multi_label_classification"},
    "explicit sdpa": {"attn_implementation": "sdpa"},
}


@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_of_a_classifier_gets_a_gradient(head):
    model = tiny_classifier(**HEADS[head]).train()
    model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("head", ["class token", "mean", "pre-logits"])
def test_every_parameter_of_an_encoder_gets_a_gradient_from_the_pooled_token(head):
    model = tiny_encoder(**HEADS[head]).train()
    model(random_pixels()).pooler_output.sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("head", HEADS)
def test_a_step_moves_every_parameter_that_matters(head):
    model = tiny_classifier(**HEADS[head]).train()
    before = copy.deepcopy(model.state_dict())
    model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    still = {name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])}
    # A key bias adds the same to all scores of a query, so its gradient is rounding, or zero.
    assert {name for name in still if not name.endswith("k_proj.bias")} == set()


def enable_checkpointing(model, kwargs=None) -> None:
    # The second name is that of the lowest transformers we support; newer ones warn that it goes.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(kwargs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_gradient_checkpointing_gives_the_same_gradients(pooling, use_reentrant):
    def gradients(checkpointing: bool):
        model = tiny_classifier(pooling=pooling, hidden_dropout_prob=0.25).train()
        if checkpointing:
            enable_checkpointing(model, {"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(0)
        model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.testing.assert_close(gradients(True), gradients(False), **EXACT)


def test_gradient_checkpointing_computes_every_layer_twice(monkeypatch):
    calls = []
    original = modeling.ViTScratchMLP.forward
    monkeypatch.setattr(
        modeling.ViTScratchMLP, "forward", lambda self, hidden: calls.append(self) or original(self, hidden)
    )
    model = tiny_classifier().train()
    enable_checkpointing(model)
    model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
    assert len(calls) == 2 * 2


def test_gradient_checkpointing_keeps_the_outputs_asked_for():
    model = tiny_classifier().train()
    enable_checkpointing(model)
    output = model(random_pixels(), output_attentions=True, output_hidden_states=True)
    assert (len(output.attentions), len(output.hidden_states)) == (2, 3)


def weights_after_one_step(folder, batch_size: int, accumulation_steps: int) -> dict[str, torch.Tensor]:
    model = tiny_classifier()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation_steps,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    samples = [{"pixel_values": pixels, "labels": label} for label, pixels in enumerate(random_pixels(batch=4))]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    Trainer(model, arguments, train_dataset=samples, optimizers=(sgd, None)).train()
    return model.state_dict()


def test_accumulated_micro_batches_train_as_one_batch(tmp_path):
    accumulated = weights_after_one_step(tmp_path, batch_size=2, accumulation_steps=2)
    at_once = weights_after_one_step(tmp_path, batch_size=4, accumulation_steps=1)
    # In one step of rate 1 a gradient twice as large would show in the first digit.
    torch.testing.assert_close(accumulated, at_once, rtol=1e-4, atol=1e-5)


# Compilation.


@pytest.mark.parametrize("fields", [{}, {"pooling": "mean"}], ids=["class token", "mean"])
def test_the_whole_forward_and_backward_is_one_graph(fields):
    model, pixels, labels = tiny_classifier(**fields), random_pixels(), torch.tensor([0, 3])
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    expected, actual = model(pixels, labels=labels), compiled(pixels, labels=labels)
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.slow
def test_compiled_machine_code_gives_the_same_logits_and_gradients():
    model, pixels, labels = tiny_classifier(), random_pixels(), torch.tensor([0, 3])
    twin = copy.deepcopy(model)
    model(pixels, labels=labels).loss.backward()
    torch.compile(twin, fullgraph=True)(pixels, labels=labels).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    actual = {name: parameter.grad for name, parameter in twin.named_parameters()}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

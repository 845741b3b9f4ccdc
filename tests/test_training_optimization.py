"""Decay groups, the two schedules and the two optimizers, against the paper's formulas written out here."""

import math

import pytest
import torch
from fixtures_modeling import tiny_classifier
from torch import nn

from training.arguments import OptimizationArguments
from training.optimization import build_optimizer, build_scheduler, decay_groups

MATRICES = {
    "vit.embeddings.patch_embeddings.projection.weight",
    *(
        f"vit.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (
            *(f"attention.{projection}_proj" for projection in "qkvo"),
            "mlp.fc1",
            "mlp.fc2",
        )
    ),
    "vit.pooler.dense.weight",
    "classifier.weight",
}


def optimization(**fields):
    return OptimizationArguments(**{"max_steps": 10, **fields})


def names_of(model, parameters):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def test_exactly_the_matrices_decay():
    model = tiny_classifier(representation_size=24)
    decayed, others = decay_groups(model, 0.3)
    assert set(names_of(model, decayed["params"])) == MATRICES
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_class_token_positions_norms_and_biases_do_not_decay():
    model = tiny_classifier()
    _, others = decay_groups(model, 0.3)
    kinds = {name.rpartition(".")[2] if name.endswith("bias") else name for name in names_of(model, others["params"])}
    assert kinds == {
        "bias",
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.layernorm.weight",
        *(f"vit.layers.{layer}.layernorm_{place}.weight" for layer in (0, 1) for place in ("before", "after")),
    }


def test_every_trainable_parameter_is_in_one_group():
    model = tiny_classifier()
    names = [name for group in decay_groups(model, 0.1) for name in names_of(model, group["params"])]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_frozen_parameters_are_in_no_group():
    model = tiny_classifier()
    model.vit.requires_grad_(False)
    names = [name for group in decay_groups(model, 0.1) for name in names_of(model, group["params"])]
    assert sorted(names) == ["classifier.bias", "classifier.weight"]


def test_both_groups_are_told(caplog):
    caplog.set_level("INFO")
    decay_groups(tiny_classifier(), 0.1)
    decayed, others = [record.getMessage() for record in caplog.records]
    assert decayed.startswith("weight decay 0.1 on 14 tensors: vit.embeddings.patch_embeddings.projection.weight")
    assert others.startswith(
        "weight decay 0 on 26 tensors: vit.embeddings.position_embeddings, vit.embeddings.cls_token"
    )


def papers_rate(step, *, base, warmup, total, kind):
    """Section 3.1: base * decay(p) * min(1, step / warmup), with linear decay to 1e-5, cosine to 0."""
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    rate = (
        1e-5 + (base - 1e-5) * (1 - progress) if kind == "linear" else base * 0.5 * (1 + math.cos(math.pi * progress))
    )
    return rate * min(1.0, step / warmup) if warmup else rate


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 20), (10, 57), (1, 2), (100, 1000)])
def test_the_schedule_is_the_papers_at_every_step(kind, warmup, total):
    arguments = optimization(learning_rate=3e-3, lr_scheduler_type=kind, warmup_steps=warmup, max_steps=total)
    optimizer = build_optimizer(one_layer(), arguments)
    schedule = build_scheduler(optimizer, arguments, total)
    for step in range(total + 1):
        expected = papers_rate(step, base=3e-3, warmup=warmup, total=total, kind=kind)
        assert schedule.get_last_lr() == pytest.approx([expected] * 2, rel=1e-12, abs=1e-18)
        optimizer.step()
        schedule.step()


SHAPES = {"layer.weight": (3, 4), "layer.bias": (3,)}


def one_layer():
    return nn.ModuleDict({"layer": nn.Linear(4, 3)})


def gradients():
    """Six steps' worth of gradients, with norms above 1."""
    draw = torch.Generator().manual_seed(0)
    return [{name: 3 * torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(6)]


def train(arguments, all_gradients, clip=None):
    """The parameters after each step of the real optimizer and schedule, on given gradients."""
    model = one_layer()
    model.load_state_dict(start())
    optimizer = build_optimizer(model, arguments)
    schedule = build_scheduler(optimizer, arguments, arguments.max_steps)
    seen = []
    for gradient in all_gradients:
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name].clone()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return seen


def start():
    return {
        "layer.weight": torch.full((3, 4), 0.5, dtype=torch.float64),
        "layer.bias": torch.full((3,), -0.25, dtype=torch.float64),
    }


def clipped(gradient, norm):
    total = math.sqrt(sum(float(part.double().square().sum()) for part in gradient.values()))
    return {name: part.double() * min(1.0, norm / total) for name, part in gradient.items()}


def assert_close(seen, expected):
    for name in SHAPES:
        torch.testing.assert_close(seen[name].double(), expected[name], rtol=1e-5, atol=1e-6)  # float32 over 6 steps


def test_sgd_is_heavy_ball_with_clipping_before_momentum():
    arguments = optimization(optimizer="sgd", learning_rate=0.03, warmup_steps=2, max_steps=6)
    seen = train(arguments, gradients(), clip=1.0)
    values, velocity = start(), dict.fromkeys(SHAPES, 0.0)
    for step, gradient in enumerate(gradients()):
        rate = papers_rate(step, base=0.03, warmup=2, total=6, kind="cosine")
        for name, part in clipped(gradient, 1.0).items():
            velocity[name] = 0.9 * velocity[name] + part
            values[name] = values[name] - rate * velocity[name]
        assert_close(seen[step], values)


def test_adamw_decays_matrices_apart_from_the_gradient():
    arguments = optimization(learning_rate=0.03, weight_decay=0.4, adam_beta1=0.8, adam_beta2=0.9, max_steps=6)
    seen = train(arguments, gradients())
    values = start()
    first, second = (dict.fromkeys(SHAPES, 0.0) for _ in range(2))
    for step, gradient in enumerate(gradients()):
        rate = papers_rate(step, base=0.03, warmup=0, total=6, kind="cosine")
        for name, part in gradient.items():
            part = part.double()
            first[name] = 0.8 * first[name] + 0.2 * part
            second[name] = 0.9 * second[name] + 0.1 * part**2
            ratio = (first[name] / (1 - 0.8 ** (step + 1))) / ((second[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
            decay = 0.4 if name == "layer.weight" else 0.0
            values[name] = values[name] * (1 - rate * decay) - rate * ratio
        assert_close(seen[step], values)

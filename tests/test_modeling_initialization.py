"""A fresh model is initialised as the official code does it, whichever way it came into being."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_config, tiny_encoder
from torch import Tensor
from transformers import AutoModelForImageClassification, set_seed

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification

# Large enough for the statistics below: the smallest random tensor has 4096 entries.
HIDDEN_SIZE, INTERMEDIATE_SIZE, PATCH, REPRESENTATION_SIZE = 64, 192, 8, 128


def config(**fields: Any) -> ViTScratchConfig:
    shape = {
        "image_size": 72,
        "patch_size": PATCH,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "representation_size": REPRESENTATION_SIZE,
        "head_bias_init": -3.0,
    }
    return tiny_config(**{**shape, **fields})


def by_constructor(config: ViTScratchConfig) -> ViTScratchForImageClassification:
    return ViTScratchForImageClassification(config)


def by_auto_from_config(config: ViTScratchConfig) -> ViTScratchForImageClassification:
    return AutoModelForImageClassification.from_config(config)


def by_an_empty_state_dict(config: ViTScratchConfig) -> ViTScratchForImageClassification:
    return ViTScratchForImageClassification.from_pretrained(None, config=config, state_dict={})


WAYS = {"constructor": by_constructor, "from_config": by_auto_from_config, "empty state dict": by_an_empty_state_dict}


@pytest.fixture(params=WAYS)
def make(request) -> Callable[[ViTScratchConfig], ViTScratchForImageClassification]:
    set_seed(0)
    return WAYS[request.param]


@pytest.fixture
def fresh(make) -> ViTScratchForImageClassification:
    return make(config())


def tensors(model: ViTScratchForImageClassification, *suffixes: str) -> list[Tensor]:
    found = [tensor for name, tensor in model.state_dict().items() if name.endswith(suffixes)]
    assert found
    return found


ATTENTION = tuple(f"attention.{name}_proj.weight" for name in "qkvo")
ATTENTION_BIASES = tuple(f"attention.{name}_proj.bias" for name in "qkvo")


def assert_uniform(weight: Tensor, limit: float) -> None:
    """Within the limit and close to it: the largest of n uniform draws is about limit * (1 - 1/n)."""
    assert limit * 0.99 < weight.abs().max() <= limit
    assert weight.std() == pytest.approx(limit / math.sqrt(3), rel=0.03)


def assert_lecun_normal(weight: Tensor, fan_in: int) -> None:
    """Variance 1 / fan_in after the cut at two sigma of the wider normal that was cut."""
    std = math.sqrt(1 / fan_in)
    assert weight.std() == pytest.approx(std, rel=0.03)
    assert 0.97 * 2 * std / 0.87963 < weight.abs().max() <= 2 * std / 0.87962


def test_query_key_value_and_output_are_xavier_uniform_each_as_a_square_matrix(fresh):
    for weight in tensors(fresh, *ATTENTION):  # a fused (3D, D) xavier would have the limit sqrt(6 / 4D)
        assert_uniform(weight, math.sqrt(3 / HIDDEN_SIZE))


def test_mlp_weights_are_xavier_uniform(fresh):
    for weight in tensors(fresh, "mlp.fc1.weight", "mlp.fc2.weight"):
        assert_uniform(weight, math.sqrt(6 / (HIDDEN_SIZE + INTERMEDIATE_SIZE)))


def test_mlp_biases_are_normal_of_a_millionth(fresh):
    biases = torch.cat(tensors(fresh, "mlp.fc1.bias", "mlp.fc2.bias"))
    assert biases.std() == pytest.approx(1e-6, rel=0.1)
    assert biases.abs().max() > 2.2e-6  # untruncated


def test_the_patch_kernel_is_lecun_normal_with_the_variance_of_the_cut_corrected(fresh):
    (kernel,) = tensors(fresh, "projection.weight")
    assert_lecun_normal(kernel, fan_in=PATCH * PATCH * 3)


def test_the_pre_logits_layer_is_lecun_normal(fresh):
    (weight,) = tensors(fresh, "pooler.dense.weight")
    assert_lecun_normal(weight, fan_in=HIDDEN_SIZE)


def test_positions_are_an_untruncated_normal_of_a_fiftieth(fresh):
    (positions,) = tensors(fresh, "position_embeddings")
    assert positions.std() == pytest.approx(0.02, rel=0.03)
    assert positions.abs().max() > 3 * 0.02


@pytest.mark.parametrize(
    "suffixes",
    [("cls_token",), ("projection.bias",), ATTENTION_BIASES, ("pooler.dense.bias",), ("classifier.weight",)],
    ids=lambda suffixes: suffixes[0],
)
def test_class_token_biases_and_head_are_zero(fresh, suffixes):
    assert all(not tensor.any() for tensor in tensors(fresh, *suffixes))


def test_the_head_bias_is_the_configured_one(fresh):
    assert fresh.classifier.bias.tolist() == [-3.0] * 7


def test_layer_norms_are_the_identity(fresh):
    scales = tensors(fresh, "layernorm_before.weight", "layernorm_after.weight", "vit.layernorm.weight")
    shifts = tensors(fresh, "layernorm_before.bias", "layernorm_after.bias", "vit.layernorm.bias")
    assert all((tensor == 1).all() for tensor in scales)
    assert not any(tensor.any() for tensor in shifts)


# What only some models have.


def assert_normal(tensor: Tensor, std: float) -> None:
    """Five standard errors of a deviation estimated from n numbers are 5 / sqrt(2 n) of it."""
    assert tensor.std() == pytest.approx(std, rel=5 / math.sqrt(2 * tensor.numel()))
    assert tensor.abs().max() > 2.2 * std  # untruncated


@pytest.mark.parametrize(
    ("fields", "suffixes"),
    [
        ({"num_register_tokens": 64}, ["embeddings.register_tokens"]),
        ({"position_embedding_type": "learned_2d"}, ["position_embeddings_x", "position_embeddings_y"]),
        ({"position_embedding_type": "relative"}, ["attention.positions.table"]),
        (
            {"position_embedding_placement": "every_layer"},
            ["tables.0.position_embeddings", "tables.1.position_embeddings"],
        ),
        ({"position_embedding_placement": "every_layer_shared"}, ["tables.0.position_embeddings"]),
    ],
    ids=str,
)
def test_registers_and_positions_are_an_untruncated_normal_of_a_fiftieth(make, fields, suffixes):
    model = make(config(**fields))
    for suffix in suffixes:
        for tensor in tensors(model, suffix):
            assert_normal(tensor, 0.02)


def test_layers_do_not_share_the_draws_of_their_positions(make):
    one, other = tensors(make(config(position_embedding_placement="every_layer")), ".position_embeddings")
    assert (one != other).all()


def test_the_attention_head_is_initialised_as_a_layer_and_its_probe_as_a_matrix_of_one_row(make):
    model = make(config(pooling="attention"))
    (probe,) = tensors(model, "attention_pooling.probe")
    limit = math.sqrt(6 / (1 + HIDDEN_SIZE))
    assert 0.8 * limit < probe.abs().max() <= limit  # of 64 draws
    for weight in tensors(model, *(f"attention_pooling.{name}" for name in ATTENTION)):
        assert_uniform(weight, math.sqrt(3 / HIDDEN_SIZE))
    for weight in tensors(model, "attention_pooling.mlp.fc1.weight", "attention_pooling.mlp.fc2.weight"):
        assert_uniform(weight, math.sqrt(6 / (HIDDEN_SIZE + INTERMEDIATE_SIZE)))
    assert not any(bias.any() for bias in tensors(model, *(f"attention_pooling.{name}" for name in ATTENTION_BIASES)))


def test_swiglu_is_initialised_as_the_mlp(make):
    model = make(config(mlp_type="swiglu", hidden_act="silu"))
    for weight in tensors(model, "gate_proj.weight", "up_proj.weight", "down_proj.weight"):
        assert_uniform(weight, math.sqrt(6 / (HIDDEN_SIZE + INTERMEDIATE_SIZE)))
    assert_normal(torch.cat(tensors(model, "gate_proj.bias", "up_proj.bias", "down_proj.bias")), 1e-6)


def test_a_distillation_token_is_a_normal_of_a_fiftieth_and_its_head_begins_as_the_class_tokens(make):
    # Equal to the class token it would stay so wherever positions do not tell the two apart.
    model = make(config(use_distillation_token=True, representation_size=None))
    assert model.vit.embeddings.distillation_token.detach().std() == pytest.approx(0.02, rel=0.3)
    assert not model.distillation_classifier.weight.any()
    assert model.distillation_classifier.bias.tolist() == [-3.0] * 7


def test_layer_scales_begin_at_the_configured_value(make):
    scales = tensors(make(config(layer_scale_init=0.25)), "lambda1")
    assert len(scales) == 4
    assert torch.cat(scales).unique().tolist() == [0.25]


def test_norms_of_queries_and_keys_are_the_identity(make):
    model = make(config(qk_norm=True))
    assert torch.cat(tensors(model, "q_norm.weight", "k_norm.weight")).unique().tolist() == [1.0]
    assert torch.cat(tensors(model, "q_norm.bias", "k_norm.bias")).unique().tolist() == [0.0]


HYBRID = {"stem_depths": [2], "image_size": 32, "patch_size": 8}


def test_the_resnet_of_a_hybrid_begins_with_lecun_normal_kernels(make):
    model = make(config(**HYBRID))
    for kernel in tensors(model, "root.conv.weight", "conv1.weight", "conv2.weight", "conv3.weight"):
        assert_lecun_normal(kernel, fan_in=kernel[0].numel())
    (kernel,) = tensors(model, "projection.weight")
    assert_lecun_normal(kernel, fan_in=2 * 2 * 256)


def test_the_last_norm_of_a_residual_unit_begins_at_zero_and_the_others_as_the_identity(make):
    model = make(config(**HYBRID))
    assert torch.cat(tensors(model, "norm3.weight", "norm3.bias")).unique().tolist() == [0.0]
    scales = tensors(model, "norm1.weight", "norm2.weight", "root.norm.weight", "downsample_norm.weight")
    assert torch.cat(scales).unique().tolist() == [1.0]
    shifts = tensors(model, "norm1.bias", "norm2.bias", "root.norm.bias", "downsample_norm.bias")
    assert torch.cat(shifts).unique().tolist() == [0.0]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_distillation_token": True, "representation_size": None, "num_register_tokens": 2},
    {"pooling": "attention", "qk_norm": True, "layer_scale_init": 0.25, "position_embedding_type": "relative"},
    {"mlp_type": "swiglu", "hidden_act": "silu", "position_embedding_type": "learned_2d"},
    {"pooling": "mean", "position_embedding_placement": "every_layer"},
    {"pooling": "class_token_and_mean", **HYBRID},
]


def test_the_tests_above_leave_out_no_parameter():
    layers = ("fc1", "fc2", "gate_proj", "up_proj", "down_proj")
    seen = (
        *ATTENTION,
        *ATTENTION_BIASES,
        *(f"mlp.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")),
        *(f"{layer}.{kind}" for layer in ("projection", "pooler.dense", "classifier") for kind in ("weight", "bias")),
        *(f"layernorm{place}.{kind}" for place in ("_before", "_after", "") for kind in ("weight", "bias")),
        *(f"{letter}_norm.{kind}" for letter in "qk" for kind in ("weight", "bias")),
        *(f".{norm}.{kind}" for norm in ("norm", "norm1", "norm2", "norm3") for kind in ("weight", "bias")),
        *(f"downsample_{part}" for part in ("conv.weight", "norm.weight", "norm.bias")),
        *(f".{conv}.weight" for conv in ("conv", "conv1", "conv2", "conv3")),
        *("position_embeddings", "position_embeddings_x", "position_embeddings_y", "positions.table"),
        *("cls_token", "distillation_token", "register_tokens", "probe", "lambda1"),
    )
    names = [name for fields in OPTIONS for name in by_constructor(config(**fields)).state_dict()]
    assert [name for name in names if not name.endswith(seen)] == []


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_a_fresh_classifier_of_any_kind_outputs_exactly_its_bias(fields):
    model = by_constructor(config(**fields))
    height, width = model.config.image_height_width
    assert model(random_pixels(height=height, width=width)).logits.unique().tolist() == [-3.0]


def test_one_seed_gives_one_model():
    set_seed(0)
    one = by_constructor(config()).state_dict()
    set_seed(0)
    torch.testing.assert_close(by_constructor(config()).state_dict(), one, rtol=0, atol=0)


def test_layers_do_not_share_their_draws(fresh):
    first, second = (layer.attention for layer in fresh.vit.layers)
    weights = [attention.get_parameter(f"{name}_proj.weight") for attention in (first, second) for name in "qkvo"]
    assert len({weight.flatten()[0].item() for weight in weights}) == 8


def test_half_precision_is_initialised_alike():
    set_seed(0)
    model = AutoModelForImageClassification.from_config(config(), dtype=torch.bfloat16)
    for weight in tensors(model, *ATTENTION):
        assert weight.dtype == torch.bfloat16
        assert weight.float().std() == pytest.approx(math.sqrt(1 / HIDDEN_SIZE), rel=0.03)


def test_a_new_head_on_a_loaded_encoder_is_zero_with_the_configured_bias(tmp_path):
    tiny_encoder().save_pretrained(tmp_path)
    model = ViTScratchForImageClassification.from_pretrained(tmp_path, num_labels=5, head_bias_init=-3.0)
    assert not model.classifier.weight.any()
    assert model.classifier.bias.tolist() == [-3.0] * 5


def test_initialising_a_new_head_leaves_the_loaded_encoder_alone(tmp_path):
    encoder = tiny_encoder()
    encoder.save_pretrained(tmp_path)
    model = ViTScratchForImageClassification.from_pretrained(tmp_path, num_labels=5)
    torch.testing.assert_close(model.vit.state_dict(), encoder.state_dict(), rtol=0, atol=0)


# What the initialisation is for: the loss of the first step is known.


def first_loss(num_labels: int, problem_type: str, head_bias_init: float) -> float:
    model = ViTScratchForImageClassification(
        tiny_config(num_labels=num_labels, problem_type=problem_type, head_bias_init=head_bias_init)
    )
    return model(random_pixels(), labels=torch.tensor([0, num_labels - 1])).loss.item()


def test_a_fresh_classifier_outputs_exactly_its_bias(fresh):
    logits = fresh(random_pixels(height=72, width=72)).logits
    assert logits.unique().tolist() == [-3.0]


@pytest.mark.parametrize(("num_labels", "bias"), [(10, 0.0), (1000, 0.0), (21843, -10.0)])
def test_the_first_softmax_loss_is_the_logarithm_of_the_number_of_classes(num_labels, bias):
    loss = first_loss(num_labels, "single_label_classification", bias)
    assert loss == pytest.approx(math.log(num_labels), abs=2e-6)


@pytest.mark.parametrize(
    ("num_labels", "bias", "expected"),
    [(21843, -10.0, 10.991648), (1000, -6.9, 7.907277), (21843, 0.0, 15140.41)],
)
def test_the_first_sigmoid_loss_is_that_of_the_official_code(num_labels, bias, expected):
    assert first_loss(num_labels, "multi_label_classification", bias) == pytest.approx(expected, rel=1e-6)

"""Tokens beside the patches: class token, distillation token (DeiT), registers (Dinov2)."""

from typing import Any

import pytest
import torch
import transformers
from fixtures_dinov2 import TINY_DINOV2, dinov2_to_ours
from fixtures_modeling import TINY, random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from torch import nn

from modeling_vit_scratch import ViTScratchForImageClassification

EXACT = {"rtol": 0, "atol": 0}
# Both sides are in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}

# What stands in front of the patches, and the tensors it is made of, in order.
PREFIXES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "class token": ({}, ["cls_token"]),
    "nothing": ({"pooling": "mean"}, []),
    "class token beside the mean": ({"pooling": "mean", "use_class_token": True}, ["cls_token"]),
    "class and distillation token": ({"use_distillation_token": True}, ["cls_token", "distillation_token"]),
    "registers": ({"pooling": "mean", "num_register_tokens": 3}, ["register_tokens"]),
    "all of them": (
        {"use_distillation_token": True, "num_register_tokens": 3},
        ["cls_token", "distillation_token", "register_tokens"],
    ),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_the_tokens_before_the_patches_stand_in_this_order(name):
    fields, names = PREFIXES[name]
    model, pixels = tiny_encoder(position_embedding_type="none", **fields), random_pixels()
    prefix = [getattr(model.embeddings, token)[0] for token in names]
    patches = model.embeddings.patch_embeddings(pixels)
    expected = torch.stack([torch.cat((*prefix, image)) for image in patches])
    torch.testing.assert_close(model.embeddings(pixels)[0], expected, **EXACT)
    assert model.config.num_prefix_tokens == expected.shape[1] - 16


@pytest.mark.parametrize("name", PREFIXES)
def test_no_tensor_is_kept_for_a_token_that_is_not_there(name):
    fields, names = PREFIXES[name]
    state = tiny_encoder(**fields).embeddings.state_dict()
    assert [token for token in state if "token" in token] == names


@pytest.mark.parametrize("pooling", ["class_token", "class_token_and_mean"])
def test_there_is_a_class_token_where_the_pooling_reads_it(pooling):
    assert tiny_config(pooling=pooling).use_class_token is True


@pytest.mark.parametrize("pooling", ["mean", "attention"])
@pytest.mark.parametrize(("use_class_token", "has_class_token"), [(None, False), (False, False), (True, True)])
def test_there_is_a_class_token_elsewhere_only_on_request(pooling, use_class_token, has_class_token):
    config = tiny_config(pooling=pooling, use_class_token=use_class_token)
    assert config.use_class_token is has_class_token


# Registers: Dinov2's.


# On another grid Dinov2 takes its positions in float32, whatever the model's type; logits are about 10.
@pytest.mark.parametrize(("height", "width", "atol"), [(32, 32, 1e-12), (48, 24, 2e-6), (16, 64, 2e-6)])
def test_registers_are_those_of_dinov2(height, width, atol):
    theirs = transformers.Dinov2WithRegistersForImageClassification(
        transformers.Dinov2WithRegistersConfig(**TINY_DINOV2, num_register_tokens=3, num_labels=7)
    )
    ours = ViTScratchForImageClassification(
        tiny_config(
            num_register_tokens=3,
            pooling="class_token_and_mean",
            position_interpolation="bicubic_antialias",
            layer_scale_init=1.0,
            hidden_act="gelu",
        )
    )
    randomize(theirs)
    ours.load_state_dict(dinov2_to_ours(theirs.state_dict()), strict=True)
    pixels = random_pixels(height=height, width=width, dtype=torch.float64)
    expected, actual = theirs.double().eval()(pixels).logits, ours.double().eval()(pixels).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("pooling", ["class_token", "mean", "class_token_and_mean"])
def test_a_register_is_attended_to(pooling):
    model, pixels = tiny_classifier(pooling=pooling, num_register_tokens=2), random_pixels()
    before = model(pixels).logits
    nn.init.constant_(model.vit.embeddings.register_tokens, 3.0)
    assert (model(pixels).logits - before).abs().max() > 1e-3


# Distillation.


def deit_and_ours(**fields: Any) -> tuple[nn.Module, ViTScratchForImageClassification]:
    """Returns transformers' distilled DeiT and our classifier with the same weights, in float64."""
    shape = {**TINY, **fields, "num_labels": 7, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    theirs = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**shape))
    ours = ViTScratchForImageClassification(
        tiny_config(**shape, use_distillation_token=True, position_interpolation="bicubic")
    )
    randomize(theirs)
    names = {"deit.": "vit.", "cls_classifier.": "classifier."}
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name] = tensor
    ours.load_state_dict(state, strict=True)
    return theirs.double().eval(), ours.double().eval()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 24)])
def test_the_logits_of_a_distilled_model_equal_those_of_deit(height, width):
    theirs, ours = deit_and_ours()
    pixels = random_pixels(height=height, width=width, dtype=torch.float64)
    expected = theirs(pixels, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(ours(pixels).logits, expected, **CLOSE)


def test_the_logits_of_a_distilled_model_are_the_mean_of_its_heads():
    model, pixels = (
        tiny_classifier(dtype=torch.float64, use_distillation_token=True),
        random_pixels(dtype=torch.float64),
    )
    tokens = model.vit(pixels).last_hidden_state
    of_classes, of_teacher = model.classifier(tokens[:, 0]), model.distillation_classifier(tokens[:, 1])
    torch.testing.assert_close(model(pixels).logits, (of_classes + of_teacher) / 2, **CLOSE)
    assert (of_classes - of_teacher).abs().max() > 0.1


def test_each_head_of_a_distilled_model_gets_half_the_gradient_of_the_logits():
    model = tiny_classifier(use_distillation_token=True).train()
    output = model(random_pixels(), labels=torch.tensor([0, 3]))
    output.logits.retain_grad()
    output.loss.backward()
    expected = output.logits.grad.sum(dim=0) / 2
    for head in (model.classifier, model.distillation_classifier):
        torch.testing.assert_close(head.bias.grad, expected)
        assert head.weight.grad.any()


def test_a_fresh_distilled_classifier_outputs_exactly_its_bias():
    model = ViTScratchForImageClassification(tiny_config(use_distillation_token=True, head_bias_init=-10.0))
    assert model(random_pixels()).logits.unique().tolist() == [-10.0]

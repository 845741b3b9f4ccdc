"""What a forward computes, returns and refuses."""

import copy

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder
from torch.nn import functional as F

from modeling_vit_scratch import ViTScratchForImageClassification
from modeling_vit_scratch.errors_vit_scratch import InputError

ATTENTION_IMPLEMENTATIONS = [None, "eager", "sdpa"]
EXACT = {"rtol": 0, "atol": 0}

# Outputs that were asked for.


@pytest.mark.parametrize("attn_implementation", ATTENTION_IMPLEMENTATIONS)
@pytest.mark.parametrize("make", [tiny_classifier, tiny_encoder])
def test_attentions_asked_for_are_returned_for_every_layer_and_head(make, attn_implementation):
    model = make(num_hidden_layers=3, attn_implementation=attn_implementation)
    attentions = model(random_pixels(), output_attentions=True).attentions
    assert [tuple(attention.shape) for attention in attentions] == [(2, 4, 17, 17)] * 3


@pytest.mark.parametrize("attn_implementation", ATTENTION_IMPLEMENTATIONS)
def test_attentions_asked_for_by_the_config_are_returned(attn_implementation):
    model = tiny_classifier(attn_implementation=attn_implementation, output_attentions=True)
    assert len(model(random_pixels()).attentions) == 2


@pytest.mark.parametrize("attn_implementation", ATTENTION_IMPLEMENTATIONS)
def test_attentions_asked_for_by_the_loaded_config_are_returned(tmp_path, attn_implementation):
    tiny_classifier().save_pretrained(tmp_path)
    model = ViTScratchForImageClassification.from_pretrained(
        tmp_path, output_attentions=True, attn_implementation=attn_implementation
    )
    assert len(model(random_pixels()).attentions) == 2


def test_hidden_states_asked_for_by_the_config_are_returned():
    assert len(tiny_classifier(output_hidden_states=True)(random_pixels()).hidden_states) == 3


def test_the_argument_beats_the_config():
    model = tiny_classifier(output_attentions=True, output_hidden_states=True)
    output = model(random_pixels(), output_attentions=False, output_hidden_states=False)
    assert (output.attentions, output.hidden_states) == (None, None)


def test_attentions_of_a_token_sum_to_one():
    attentions = tiny_classifier(dtype=torch.float64)(random_pixels(dtype=torch.float64), output_attentions=True)
    for attention in attentions.attentions:
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 17, dtype=torch.float64))


@pytest.mark.parametrize("attn_implementation", ATTENTION_IMPLEMENTATIONS)
def test_asking_for_attentions_does_not_change_the_logits(attn_implementation):
    model = tiny_classifier(dtype=torch.float64, attn_implementation=attn_implementation)
    pixels = random_pixels(dtype=torch.float64)
    torch.testing.assert_close(model(pixels, output_attentions=True).logits, model(pixels).logits, rtol=0, atol=1e-12)


def test_the_first_hidden_state_is_the_embedding_and_the_last_goes_into_the_final_norm():
    model = tiny_encoder()
    output = model(random_pixels(), output_hidden_states=True)
    torch.testing.assert_close(output.hidden_states[0], model.embeddings(random_pixels())[0], **EXACT)
    torch.testing.assert_close(model.layernorm(output.hidden_states[-1]), output.last_hidden_state, **EXACT)


@pytest.mark.parametrize("return_dict", [None, False])
def test_a_tuple_holds_loss_logits_hidden_states_and_attentions_in_this_order(return_dict):
    model = tiny_classifier(return_dict=bool(return_dict))  # False by config, or by argument
    asked = {"output_hidden_states": True, "output_attentions": True, "labels": torch.tensor([0, 1])}
    loss, logits, hidden_states, attentions = model(random_pixels(), **asked, return_dict=return_dict)
    assert (loss.ndim, tuple(logits.shape), len(hidden_states), len(attentions)) == (0, (2, 7), 3, 2)


def test_a_tuple_of_the_encoder_holds_tokens_and_pooled_token():
    tokens, pooled = tiny_encoder()(random_pixels(), return_dict=False)
    assert (tuple(tokens.shape), tuple(pooled.shape)) == ((2, 17, 32), (2, 32))


@pytest.mark.parametrize(("pooling", "num_tokens"), [("class_token", 17), ("mean", 16)])
def test_the_pooled_token_is_the_class_token_or_the_mean_of_the_patches(pooling, num_tokens):
    output = tiny_encoder(pooling=pooling)(random_pixels())
    assert output.last_hidden_state.shape[1] == num_tokens
    expected = output.last_hidden_state[:, 0] if pooling == "class_token" else output.last_hidden_state.mean(1)
    torch.testing.assert_close(output.pooler_output, expected, **EXACT)


def test_an_image_does_not_depend_on_its_batch():
    model, pixels = tiny_classifier(dtype=torch.float64), random_pixels(batch=3, dtype=torch.float64)
    one_by_one = torch.cat([model(pixel[None]).logits for pixel in pixels])
    torch.testing.assert_close(model(pixels).logits, one_by_one, rtol=0, atol=1e-12)


def test_without_positions_the_mean_does_not_depend_on_the_order_of_the_patches():
    model, pixels = tiny_classifier(dtype=torch.float64, pooling="mean"), random_pixels(dtype=torch.float64)
    torch.nn.init.zeros_(model.vit.embeddings.position_embeddings)
    swapped = torch.cat((pixels[..., 8:], pixels[..., :8]), dim=-1)
    torch.testing.assert_close(model(swapped).logits, model(pixels).logits, rtol=0, atol=1e-12)


# Grids at run time.


@pytest.mark.parametrize("position_interpolation", ["bilinear_corners", "bicubic"])
@pytest.mark.parametrize("pooling", ["class_token", "mean"])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 64), (16, 32), (8, 8), (40, 24)])
def test_another_grid_at_run_time_equals_the_resized_model(height, width, pooling, position_interpolation):
    fields = {"pooling": pooling, "position_interpolation": position_interpolation}
    model, pixels = tiny_classifier(**fields), random_pixels(height=height, width=width)
    resized = copy.deepcopy(model)
    resized.resize_input(image_size=[height, width])
    torch.testing.assert_close(model(pixels).logits, resized(pixels).logits, **EXACT)


def test_a_non_square_model_runs_at_another_non_square_grid():
    model = tiny_classifier(image_size=[32, 64], patch_size=[4, 8])
    resized, pixels = copy.deepcopy(model), random_pixels(height=48, width=96)
    resized.resize_input(image_size=[48, 96])
    torch.testing.assert_close(model(pixels).logits, resized(pixels).logits, **EXACT)


def test_a_transposed_grid_of_as_many_patches_is_resampled_too():
    model, pixels = tiny_classifier(image_size=[16, 64]), random_pixels(height=64, width=16)
    resized = copy.deepcopy(model)
    resized.resize_input(image_size=[64, 16])
    torch.testing.assert_close(model(pixels).logits, resized(pixels).logits, **EXACT)


def test_another_grid_at_run_time_edits_neither_weights_nor_config():
    model = tiny_classifier()
    weights, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    model(random_pixels(height=48, width=64))
    torch.testing.assert_close(model.state_dict(), weights, **EXACT)
    assert model.config.to_dict() == config


def test_another_grid_at_run_time_trains_the_positions():
    model = tiny_classifier()
    model(random_pixels(height=48, width=64)).logits.square().sum().backward()
    assert model.vit.embeddings.position_embeddings.grad.abs().sum(-1).all()


def test_positions_of_a_float64_model_are_resampled_in_float64():
    model = tiny_encoder(dtype=torch.float64)
    positions = model.embeddings.table_for((6, 6), like=torch.zeros(0))
    assert (positions.float().double() != positions).any()


# What is refused.


@pytest.mark.parametrize(("height", "width", "nearest"), [(30, 30, "24x24"), (33, 47, "32x40"), (32, 36, "32x32")])
def test_an_image_that_is_no_multiple_of_the_patch_is_refused_and_the_choices_are_named(height, width, nearest):
    with pytest.raises(InputError, match=rf"{height}x{width}.*resize_mode squash, shorter or pad.*{nearest}"):
        tiny_classifier()(random_pixels(height=height, width=width))


@pytest.mark.parametrize(("height", "width"), [(4, 4), (4, 32), (0, 8)])
def test_an_image_smaller_than_a_patch_is_refused(height, width):
    with pytest.raises(InputError, match=f"{height}x{width} pixels cannot be cut into patches of 8x8"):
        tiny_classifier()(random_pixels(height=height, width=width))


@pytest.mark.parametrize("channels", [1, 4])
def test_another_number_of_channels_is_refused_and_the_remedy_is_named(channels):
    with pytest.raises(InputError, match=r"3 channels.*resize_input\(num_channels=\.\.\.\)"):
        tiny_classifier()(random_pixels(channels=channels))


def test_an_image_without_a_batch_axis_is_refused():
    with pytest.raises(InputError, match=r"\(batch, 3 channels, height, width\); got \(3, 32, 32\)"):
        tiny_classifier()(random_pixels()[0])


# Losses.


def test_the_softmax_loss_is_the_mean_cross_entropy():
    output = tiny_classifier()(random_pixels(), labels=torch.tensor([2, 5]))
    expected = -output.logits.log_softmax(-1)[[0, 1], [2, 5]].mean()
    torch.testing.assert_close(output.loss, expected)


def test_soft_labels_are_cross_entropy():
    targets = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    output = tiny_classifier()(random_pixels(), labels=targets)
    torch.testing.assert_close(output.loss, -(targets * output.logits.log_softmax(-1)).sum(-1).mean())


def test_one_hot_labels_equal_class_indices():
    model, labels = tiny_classifier(), torch.tensor([2, 5])
    one_hot = F.one_hot(labels, 7)
    torch.testing.assert_close(model(random_pixels(), labels=one_hot).loss, model(random_pixels(), labels=labels).loss)


@pytest.mark.parametrize(
    "labels", [torch.tensor([2, 5]), F.one_hot(torch.tensor([2, 5]), 7)], ids=["index", "one hot"]
)
def test_the_sigmoid_loss_is_summed_over_classes_and_averaged_over_images(labels):
    output = tiny_classifier(problem_type="multi_label_classification")(random_pixels(), labels=labels)
    targets = F.one_hot(torch.tensor([2, 5]), 7).double()
    probabilities = output.logits.double().sigmoid()
    expected = -(targets * probabilities.log() + (1 - targets) * (1 - probabilities).log()).sum(-1).mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_several_labels_an_image_are_taken_by_the_sigmoid_loss():
    targets = torch.tensor([[1.0, 1, 0, 0, 0, 0, 0], [0, 0, 0.3, 0, 0, 0, 1]])
    output = tiny_classifier(problem_type="multi_label_classification")(random_pixels(), labels=targets)
    expected = F.binary_cross_entropy_with_logits(output.logits.double(), targets.double(), reduction="none")
    torch.testing.assert_close(output.loss.double(), expected.sum(1).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification"])
def test_the_sigmoid_and_softmax_losses_survive_extreme_logits(problem_type):
    model = tiny_classifier(problem_type=problem_type)
    torch.nn.init.constant_(model.classifier.bias, 500.0)
    loss = model(random_pixels(), labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_soft_labels_then_class_indices_leave_the_objective_and_the_config_as_they_were():
    model = tiny_classifier()
    config = model.config.to_dict()
    before = model(random_pixels(), labels=torch.tensor([2, 5])).loss
    model(random_pixels(), labels=torch.full((2, 7), 1 / 7))
    torch.testing.assert_close(model(random_pixels(), labels=torch.tensor([2, 5])).loss, before, **EXACT)
    assert model.config.to_dict() == config


def test_the_loss_of_a_bfloat16_model_is_taken_in_float32():
    model = tiny_classifier(dtype=torch.bfloat16)
    output = model(random_pixels(), labels=torch.tensor([2, 5]))
    assert (output.logits.dtype, output.loss.dtype) == (torch.bfloat16, torch.float32)


def test_a_config_shared_with_a_model_is_not_edited_by_it():
    config = tiny_config()
    before = config.to_dict()
    ViTScratchForImageClassification(config)(random_pixels(), labels=torch.tensor([0, 1]))
    assert config.to_dict() == before

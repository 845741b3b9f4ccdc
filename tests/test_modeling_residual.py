"""What lies between an update and the residual stream, and which tokens enter it: LayerScale, stochastic depth, patch
dropout."""

import copy
from typing import Any

import pytest
import torch
import transformers
from fixtures_dinov2 import TINY_DINOV2, dinov2_to_ours
from fixtures_modeling import random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from torch import Tensor, nn

from modeling_vit_scratch import ViTScratchForMaskedPatchPrediction, ViTScratchModel

EXACT = {"rtol": 0, "atol": 0}
# Both sides are in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}

# LayerScale.


def test_layer_scales_are_those_of_dinov2():
    theirs = transformers.Dinov2Model(transformers.Dinov2Config(**TINY_DINOV2))
    ours = ViTScratchModel(tiny_config(layer_scale_init=0.5, hidden_act="gelu"))
    randomize(theirs)
    ours.load_state_dict(dinov2_to_ours(theirs.state_dict()), strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected, actual = theirs.double().eval()(pixels), ours.double().eval()(pixels)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **CLOSE)


def test_a_layer_scale_is_a_factor_on_the_rows_of_the_last_projection():
    scaled, plain = tiny_classifier(dtype=torch.float64, layer_scale_init=0.5), tiny_classifier(dtype=torch.float64)
    plain.load_state_dict({name: t for name, t in scaled.state_dict().items() if "layer_scale" not in name})
    with torch.no_grad():
        for with_scale, without in zip(scaled.vit.layers, plain.vit.layers, strict=True):
            for scale, projection in (
                (with_scale.layer_scale1.lambda1, without.attention.o_proj),
                (with_scale.layer_scale2.lambda1, without.mlp.fc2),
            ):
                projection.weight.mul_(scale[:, None])
                projection.bias.mul_(scale)
    pixels = random_pixels(dtype=torch.float64)
    torch.testing.assert_close(scaled(pixels).logits, plain(pixels).logits, **CLOSE)


def test_layers_have_no_scale_unless_asked_for():
    assert [name for name in tiny_encoder().state_dict() if "scale" in name] == []


def test_a_whole_number_is_a_layer_scale_too():
    scale = ViTScratchModel(tiny_config(layer_scale_init=1)).layers[0].layer_scale1.lambda1
    assert (scale.dtype, scale.unique().tolist()) == (torch.float32, [1.0])


# Stochastic depth: how often, and for whom.


def images_seen(model: ViTScratchModel, part: str) -> list[int]:
    """The list that will hold the number of images each layer's `part` runs for, in order."""
    seen: list[int] = []
    for layer in model.layers:
        layer.get_submodule(part).register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    return seen


@pytest.mark.parametrize("part", ["layernorm_before", "attention", "layernorm_after", "mlp.fc1"])
def test_the_share_of_skipped_images_rises_linearly_and_their_work_is_not_done(part):
    model = tiny_encoder(num_hidden_layers=5, drop_path_rate=0.5).train()
    seen = images_seen(model, part)
    model(random_pixels(batch=8))
    assert seen == [8, 7, 6, 5, 4]  # rates 0, 1/8, 1/4, 3/8, 1/2


def test_the_number_of_images_seen_has_the_mean_of_the_rate():
    model = tiny_encoder(drop_path_rate=0.3, num_hidden_layers=2).train()
    seen, tokens = images_seen(model, "attention"), torch.randn(3, 2, 32)
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(500):
            model.layers[-1](tokens)
    assert set(seen) == {2, 3}  # 2.1 to the next whole number below or above
    # Three images with probability 0.1: five standard errors of the mean are 5 * sqrt(0.1 * 0.9 / 500) = 0.067.
    assert sum(seen) / 500 == pytest.approx(2.1, abs=0.067)


def silence(*projections: nn.Linear) -> None:
    """Makes the branches that end in these projections add nothing."""
    for projection in projections:
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)


def layer_with_one_branch(branch: str, rate: float) -> nn.Module:
    """Returns a layer in training whose other branch adds nothing, so that its output is linear in what it keeps."""
    layer = tiny_encoder(dtype=torch.float64, drop_path_rate=rate).layers[-1].train()
    silence(layer.mlp.fc2 if branch == "attention" else layer.attention.o_proj)
    return layer


def factors(layer: nn.Module, tokens: Tensor, *args: Any, num_draws: int = 1) -> Tensor:
    """What each image's update was multiplied with, (draws, B); it must be that of evaluation but for this factor."""
    with torch.no_grad():
        update = copy.deepcopy(layer).eval()(tokens, *args)[0] - tokens
        changed = torch.stack([layer(tokens, *args)[0] - tokens for _ in range(num_draws)])
    factor = (changed * update).sum(dim=(2, 3)) / (update * update).sum(dim=(1, 2))
    torch.testing.assert_close(changed, factor[:, :, None, None] * update, **CLOSE)
    return factor


def some_tokens(num_images: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_images, 5, 32, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("output_attentions", [False, True])
@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_an_update_is_dropped_or_divided_by_the_probability_to_be_kept(branch, output_attentions):
    layer, tokens = layer_with_one_branch(branch, rate=0.4), some_tokens(10)
    torch.manual_seed(0)
    drawn = factors(layer, tokens, None, output_attentions, num_draws=5)
    is_kept = drawn > 0.5
    torch.testing.assert_close(drawn, is_kept.double() / 0.6, **CLOSE)
    assert 0 < is_kept.sum() < 50


@pytest.mark.parametrize("output_attentions", [False, True])
@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_the_mean_over_many_draws_is_the_forward_without_drops(branch, output_attentions):
    layer, tokens = layer_with_one_branch(branch, rate=0.3), some_tokens(3)
    torch.manual_seed(0)
    drawn = factors(layer, tokens, None, output_attentions, num_draws=300)
    # A factor has variance 0.3 / 0.7: five standard errors of its mean are 5 * sqrt(0.3 / 0.7 / 300).
    torch.testing.assert_close(drawn.mean(dim=0), torch.ones(3, dtype=torch.float64), rtol=0, atol=0.189)


def test_the_two_branches_are_dropped_independently():
    layer, tokens = layer_with_one_branch("attention", rate=0.5), some_tokens(2)
    silence(layer.attention.o_proj)
    seen: list[int] = []  # the image that the attention took, then the one that the MLP took, and so on

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.extend(image for image in (0, 1) if torch.equal(args[0], tokens[image : image + 1]))

    layer.layernorm_before.register_forward_pre_hook(record)
    layer.layernorm_after.register_forward_pre_hook(record)
    torch.manual_seed(0)
    for _ in range(40):
        layer(tokens)
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert {pair: pairs.count(pair) > 2 for pair in pairs} == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], True)


@pytest.mark.parametrize("kind", ["rope_2d", "relative"])
def test_kept_images_keep_their_own_positions(kind):
    model = tiny_encoder(dtype=torch.float64, position_embedding_type=kind, drop_path_rate=0.5)
    pixels, visible = random_pixels(4, dtype=torch.float64), torch.stack([torch.randperm(16)[:6] for _ in range(4)])
    layer, calls = model.layers[-1], []
    layer.register_forward_pre_hook(lambda module, args: calls.append(args))
    model(pixels, visible_patches=visible)
    layer._forward_pre_hooks.clear()
    tokens, where, *_ = calls[0]
    silence(layer.mlp.fc2)
    drawn = factors(layer.train(), tokens.detach(), where)[0]
    torch.testing.assert_close(drawn.sort().values, torch.tensor([0, 0, 2, 2]).double(), **CLOSE)


def test_an_image_alone_in_its_batch_is_dropped_as_a_whole():
    layer, tokens = layer_with_one_branch("attention", rate=0.25), some_tokens(1)
    torch.manual_seed(0)
    drawn = factors(layer, tokens, num_draws=200)
    # Kept with probability 0.75: five standard errors are 5 * sqrt(0.75 * 0.25 / 200).
    assert (drawn > 0).double().mean().item() == pytest.approx(0.75, abs=0.153)


def forward_that_drops(model: ViTScratchModel, pixels: Tensor) -> Tensor:
    """The output of a forward in which the last layer adds nothing."""
    for seed in range(100):
        torch.manual_seed(seed)
        output = model(pixels, output_hidden_states=True)
        if torch.equal(output.hidden_states[-1], output.hidden_states[-2]):
            return output.last_hidden_state
    raise AssertionError("no seed drops both branches")


def test_every_parameter_has_a_gradient_even_when_nothing_is_kept():
    model = tiny_encoder(drop_path_rate=0.9, layer_scale_init=0.5, qk_norm=True).train()
    forward_that_drops(model, random_pixels(batch=1)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert not any(parameter.grad.any() for parameter in model.layers[-1].parameters())
    assert any(parameter.grad.any() for parameter in model.layers[0].parameters())


# Stochastic depth: where it must not show.


def test_evaluation_is_that_of_a_model_without_drops():
    with_rate, without = tiny_classifier(drop_path_rate=0.5), tiny_classifier()
    pixels = random_pixels(batch=4)
    torch.testing.assert_close(with_rate(pixels).logits, without(pixels).logits, **EXACT)


def test_one_seed_drops_the_same_images():
    model, pixels, logits = tiny_classifier(drop_path_rate=0.5).train(), random_pixels(batch=6), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        logits.append(model(pixels).logits)
    torch.testing.assert_close(logits[0], logits[1], **EXACT)
    assert (logits[0] != logits[2]).any()


def test_attentions_asked_for_in_training_are_those_of_all_images():
    model = tiny_encoder(drop_path_rate=0.5).train()
    attentions = model(random_pixels(batch=6), output_attentions=True).attentions
    assert [tuple(attention.shape) for attention in attentions] == [(6, 4, 17, 17)] * 2


def test_the_last_layer_for_the_class_token_alone_drops_as_the_full_layer_does():
    model, pixels = (
        tiny_classifier(dtype=torch.float64, drop_path_rate=0.5).train(),
        random_pixels(6, dtype=torch.float64),
    )
    torch.manual_seed(0)
    short = model(pixels).logits
    torch.manual_seed(0)
    full = model.classifier(model.vit(pixels).pooler_output)
    torch.testing.assert_close(short, full, **CLOSE)


@pytest.mark.parametrize("fields", [{"drop_path_rate": 0.5}, {"patch_dropout_rate": 0.5}], ids=str)
def test_gradient_checkpointing_drops_the_same_again(fields):
    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model = tiny_classifier(**fields).train()
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(0)
        model(random_pixels(batch=6), labels=torch.arange(6)).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.testing.assert_close(gradients(True), gradients(False), **EXACT)


def test_autocast_keeps_the_residual_stream_in_float32():
    model = tiny_encoder(drop_path_rate=0.5).train()
    with torch.autocast("cpu", torch.bfloat16):
        states = model(random_pixels(batch=4), output_hidden_states=True).hidden_states
    assert states[-1].dtype == torch.float32


@pytest.mark.peer
def test_the_rates_of_the_layers_are_those_of_timm():
    timm = pytest.importorskip("timm.layers", reason="needs timm")
    rates = [layer.drop_path_rate for layer in tiny_encoder(num_hidden_layers=7, drop_path_rate=0.3).layers]
    assert rates == pytest.approx(timm.calculate_drop_path_rates(0.3, 7), rel=1e-6)  # in float32 there


# Patch dropout.


def tokens_seen(model: ViTScratchModel) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape[:2])))
    return shapes


@pytest.mark.parametrize(("rate", "num_kept"), [(0.25, 12), (0.5, 8), (0.9, 2), (0.999, 1)])
@pytest.mark.parametrize(
    ("fields", "num_prefix"), [({}, 1), ({"num_register_tokens": 2}, 3), ({"pooling": "mean"}, 0)]
)
def test_layers_see_only_the_patches_that_are_kept(fields, num_prefix, rate, num_kept):
    model = tiny_encoder(patch_dropout_rate=rate, **fields).train()
    shapes = tokens_seen(model)
    output = model(random_pixels())
    assert shapes == [(2, num_prefix + num_kept)] * 2
    assert output.last_hidden_state.shape == (2, num_prefix + num_kept, 32)


def kept_patches(model: ViTScratchModel, pixels: Tensor) -> list[list[int]]:
    """For each image, which of its tokens the first layer sees, in order."""
    every, some = model.eval().embeddings(pixels)[0], model.train().embeddings(pixels)[0]
    return [
        [index for token in kept for index, other in enumerate(tokens) if torch.equal(token, other)]
        for kept, tokens in zip(some, every, strict=True)
    ]


def test_each_image_keeps_a_set_of_patches_of_its_own_in_order_with_their_positions():
    model = tiny_encoder(patch_dropout_rate=0.5)
    torch.manual_seed(0)
    kept = kept_patches(model, random_pixels(batch=4))
    assert all(indices[0] == 0 and len(indices) == 9 and indices == sorted(set(indices)) for indices in kept)
    assert len({tuple(indices) for indices in kept}) == 4


def test_every_patch_is_kept_as_often_as_any_other():
    model = tiny_encoder(patch_dropout_rate=0.75).train()
    torch.manual_seed(0)
    _, places = model.embeddings(random_pixels(batch=1).expand(800, -1, -1, -1))
    share = torch.bincount(places.kept.flatten(), minlength=16) / 800
    # Five standard errors of a share of 1/4 among 800 images.
    torch.testing.assert_close(share, torch.full((16,), 0.25), rtol=0, atol=5 * (0.25 * 0.75 / 800) ** 0.5)


def test_one_seed_keeps_the_same_patches():
    model, pixels = tiny_encoder(patch_dropout_rate=0.5), random_pixels()
    kept = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        kept.append(kept_patches(model, pixels))
    assert kept[0] == kept[1] != kept[2]


def test_evaluation_sees_every_patch():
    with_rate, without = tiny_classifier(patch_dropout_rate=0.5), tiny_classifier()
    torch.testing.assert_close(with_rate(random_pixels()).logits, without(random_pixels()).logits, **EXACT)


def test_patches_that_were_chosen_are_not_dropped():
    model = tiny_encoder(patch_dropout_rate=0.5).train()
    visible = torch.arange(16).expand(2, -1)
    assert model(random_pixels(), visible_patches=visible).last_hidden_state.shape[1] == 17


def test_patches_that_are_to_be_predicted_are_not_dropped():
    model = ViTScratchForMaskedPatchPrediction(tiny_config(patch_dropout_rate=0.5)).train()
    assert model(random_pixels()).logits.shape[:2] == (2, 16)


@pytest.mark.parametrize("placement", ["stem", "every_layer"])
def test_a_model_that_drops_patches_trains_all_its_parameters(placement):
    model = tiny_classifier(patch_dropout_rate=0.5, position_embedding_placement=placement).train()
    model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

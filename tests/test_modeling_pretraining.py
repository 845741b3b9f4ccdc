"""Self-supervised heads: masked patch prediction (paper B.1.2) and masked autoencoding, and what they hand on."""

import math
from typing import Any

import pytest
import torch
from fixtures_modeling import random_pixels, randomize, tiny_config
from torch import Tensor
from transformers import (
    AutoModelForMaskedImageModeling,
    AutoModelForPreTraining,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)

from modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedAutoencoding,
    ViTScratchForMaskedPatchPrediction,
    ViTScratchModel,
)
from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.pretraining_vit_scratch import color_classes, corrupted, patchify

EXACT = {"rtol": 0, "atol": 0}
DECODER: dict[str, Any] = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
}
HEADS = {
    "masked patch prediction": ViTScratchForMaskedPatchPrediction,
    "masked autoencoding": ViTScratchForMaskedAutoencoding,
}


def predictor(**fields: Any) -> ViTScratchForMaskedPatchPrediction:
    model = ViTScratchForMaskedPatchPrediction(tiny_config(**fields)).eval()
    randomize(model)
    return model


def autoencoder(dtype: torch.dtype = torch.float32, **fields: Any) -> ViTScratchForMaskedAutoencoding:
    model = ViTScratchForMaskedAutoencoding(tiny_config(**{**DECODER, **fields})).to(dtype).eval()
    randomize(model)
    return model


@pytest.fixture(params=HEADS)
def head(request) -> Any:
    torch.manual_seed(0)
    return HEADS[request.param](tiny_config(**DECODER))


# Masked patch prediction.


def test_the_first_loss_is_that_of_chance_among_512_colours():
    model = ViTScratchForMaskedPatchPrediction(tiny_config())
    assert model(random_pixels()).loss.item() == pytest.approx(math.log(512), abs=1e-6)


@pytest.mark.parametrize(
    ("target", "shape"), [("mean_color", (2, 16, 512)), ("downsized", (2, 16, 16, 512)), ("pixels", (2, 16, 192))]
)
def test_each_target_has_predictions_of_its_shape(target, shape):
    assert predictor(prediction_target=target)(random_pixels()).logits.shape == shape


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        ([0.0, 0.0, 0.0], 0),
        ([1.0, 1.0, 1.0], 511),  # the last bin is closed
        ([0.5, 0.25, 0.125], 4 * 64 + 2 * 8 + 1),
        ([0.1249, 0.0, 0.9], 7),
        ([-0.1, 1.2, 0.0], 7 * 8),  # outside of [0, 1], as resampling can leave it
    ],
)
def test_a_colour_has_three_bits_a_channel(color, expected):
    assert color_classes(torch.tensor(color)).item() == expected


def test_the_target_of_a_patch_is_its_mean_colour_before_normalisation():
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
    model = predictor(image_mean=mean, image_std=std)
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    image[:, :, 8:16, 16:24] = torch.tensor([0.9, 0.3, 0.6]).view(3, 1, 1)  # row 1, column 2: patch 6
    pixels = (image - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    targets = model._targets(patchify(pixels, (8, 8)))
    assert targets[0, 6] == 7 * 64 + 2 * 8 + 4
    brute = (8 * image.unfold(2, 8, 8).unfold(3, 8, 8).mean((4, 5))).floor()[0].flatten(1).long()
    assert (targets[0] == 64 * brute[0] + 8 * brute[1] + brute[2]).float().mean() > 0.9  # but for ties in rounding


def test_the_downsized_target_averages_blocks_of_the_patch():
    model = predictor(prediction_target="downsized")
    image = torch.zeros(1, 3, 32, 32)
    image[0, 0, 2:4, 6:8] = 1.0  # block (1, 3) of the 4 x 4 in patch 0
    targets = model._targets(patchify(image * 2 - 1, (8, 8)))
    assert targets[0, 0].nonzero().flatten().tolist() == [4 * 1 + 3]
    assert targets[0, 0, 7] == 7 * 64


def test_the_loss_counts_the_corrupted_patches_alone():
    model, pixels = predictor(), random_pixels()
    output = model(pixels)
    targets = model._targets(patchify(pixels, (8, 8)))
    expected = torch.nn.functional.cross_entropy(output.logits[output.mask], targets[output.mask])
    torch.testing.assert_close(output.loss, expected)


def test_the_regression_loss_is_the_mean_square_over_the_corrupted_patches():
    model, pixels = predictor(prediction_target="pixels"), random_pixels()
    output = model(pixels)
    patches = pixels.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(2, 16, 192)
    torch.testing.assert_close(output.loss, (output.logits - patches)[output.mask].square().mean())


@pytest.mark.parametrize(("ratio", "count"), [(0.5, 8), (0.15, 2), (1.0, 16), (0.001, 1)])
def test_every_image_has_the_same_number_of_corrupted_patches(ratio, count):
    assert predictor(corruption_ratio=ratio)(random_pixels()).mask.sum(dim=1).tolist() == [count, count]


def test_the_patches_to_corrupt_can_be_given():
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 3] = mask[1, 5] = True
    assert (predictor()(random_pixels(), bool_masked_pos=mask).mask == mask).all()


def test_of_the_corrupted_patches_80_percent_are_masked_and_10_replaced_by_another_of_the_image():
    generator = torch.Generator().manual_seed(0)
    num_images, num_patches = 50, 200
    embeddings = torch.arange(1.0, num_images * num_patches + 1).view(num_images, num_patches, 1)
    mask = torch.rand(num_images, num_patches, generator=generator) < 0.5
    fate, other = torch.rand(2, num_images, num_patches, generator=generator)
    result = corrupted(embeddings, mask, fate, other, torch.zeros(1, 1, 1))
    assert (result[~mask] == embeddings[~mask]).all()
    masked, kept = (result == 0)[mask], (result == embeddings)[mask]
    replaced = ~masked.squeeze() & ~kept.squeeze()
    # About 5,000 corrupted patches: three standard deviations are 0.017 for 80 % and 0.013 for 10 %.
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.017)
    assert replaced.float().mean().item() == pytest.approx(0.1, abs=0.013)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.013)
    images = torch.arange(num_images).view(-1, 1, 1).expand_as(embeddings)[mask].squeeze()
    assert ((result[mask].squeeze()[replaced] - 1).long() // num_patches == images[replaced]).all()


def test_corruption_comes_before_the_positions():
    model = predictor(corruption_ratio=1.0)
    seen: list[Tensor] = []
    model.vit.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(random_pixels())
    tokens = seen[0][:, 1:] - model.vit.embeddings.position_embeddings[:, 1:]
    is_mask_token = (tokens - model.mask_token).abs().amax(dim=2) < 1e-5
    assert 0.6 < is_mask_token.float().mean() < 1


@pytest.mark.parametrize("target", ["mean_color", "downsized"])
def test_classes_of_colours_are_refused_for_many_channels(target):
    with pytest.raises(InputError, match="num_channels=5 must be at most 4"):
        ViTScratchForMaskedPatchPrediction(tiny_config(num_channels=5, prediction_target=target))


def test_grey_images_have_eight_classes():
    assert predictor(num_channels=1)(random_pixels(channels=1)).logits.shape == (2, 16, 8)


# Masked autoencoding.


def theirs_and_ours(**fields: Any) -> tuple[ViTMAEForPreTraining, ViTScratchForMaskedAutoencoding]:
    """The same weights in transformers' ViTMAE and in ours, in float64."""
    ours = autoencoder(torch.float64, hidden_act="gelu", **fields)
    config = ours.config
    theirs = ViTMAEForPreTraining(
        ViTMAEConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            layer_norm_eps=1e-6,
            mask_ratio=config.mask_ratio,
            norm_pix_loss=config.norm_pix_loss,
            **DECODER,
        )
    )
    names = {
        "decoder.embed.": "decoder.decoder_embed.",
        "decoder.position_embeddings": "decoder.decoder_pos_embed",
        "decoder.layers.": "decoder.decoder_layers.",
        "decoder.layernorm.": "decoder.decoder_norm.",
        "decoder.prediction.": "decoder.decoder_pred.",
    }
    state = ours.state_dict()
    for name, other in names.items():
        state = {key.replace(name, other): value for key, value in state.items()}
    theirs = theirs.double().eval()
    theirs.load_state_dict(state, strict=True)
    return theirs, ours


@pytest.mark.parametrize("fields", [{}, {"norm_pix_loss": False}, {"mask_ratio": 0.5}], ids=str)
def test_masked_autoencoding_is_that_of_transformers(fields):
    theirs, ours = theirs_and_ours(**fields)
    pixels, noise = random_pixels(dtype=torch.float64), torch.rand(2, 16, dtype=torch.float64)
    expected, output = theirs(pixels, noise=noise), ours(pixels, noise=noise)
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-12)
    assert torch.equal(output.mask, expected.mask.bool())
    torch.testing.assert_close(output.loss, expected.loss, rtol=0, atol=1e-12)


def test_the_encoder_sees_the_visible_patches_alone():
    model, seen = autoencoder(), []
    model.vit.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(random_pixels())
    assert seen == [(2, 1 + 4, 32)]


def test_a_hidden_patch_does_not_reach_the_encoder():
    model, pixels = autoencoder(), random_pixels()
    noise = torch.arange(16.0).expand(2, -1)  # patches 0 to 3, the first row, are seen
    other = pixels.clone()
    other[:, :, 8:] = 0
    torch.testing.assert_close(model(pixels, noise=noise).logits, model(other, noise=noise).logits, **EXACT)


@pytest.mark.parametrize(("ratio", "visible"), [(0.75, 4), (0.5, 8), (0.99, 1), (0.001, 15)])
def test_something_is_hidden_and_something_is_seen_at_any_ratio(ratio, visible):
    output = autoencoder(mask_ratio=ratio)(random_pixels())
    assert (~output.mask).sum(dim=1).tolist() == [visible, visible]
    assert output.loss.isfinite()


def test_the_decoder_positions_are_fixed_sines_and_cosines():
    model = ViTScratchForMaskedAutoencoding(tiny_config(**DECODER))
    positions = model.decoder.position_embeddings
    assert not positions.requires_grad
    assert not positions[0, 0].any()
    frequencies = [10000 ** (-k / 3) for k in range(4)]
    row, column = 2, 3
    expected = [f(axis * w) for axis in (column, row) for f in (math.sin, math.cos) for w in frequencies]
    assert positions[0, 1 + row * 4 + column].tolist() == pytest.approx(expected, abs=1e-6)


def test_masked_autoencoding_runs_at_another_size():
    output = autoencoder()(random_pixels(height=48, width=64))
    assert output.logits.shape == (2, 48, 192)


def test_masked_autoencoding_survives_another_image_size_at_load(tmp_path):
    autoencoder().save_pretrained(tmp_path)
    model = ViTScratchForMaskedAutoencoding.from_pretrained(tmp_path, image_size=48)
    assert model.decoder.position_embeddings.shape == (1, 37, 16)
    assert model(random_pixels(height=48, width=48)).loss.isfinite()


def test_masked_autoencoding_at_another_patch_size_is_refused(tmp_path):
    autoencoder().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"patch_size=8 .*cannot become 16.*load the encoder alone"):
        ViTScratchForMaskedAutoencoding.from_pretrained(tmp_path, patch_size=16)


def test_a_resnet_stem_is_refused_where_it_would_see_what_is_hidden():
    with pytest.raises(InputError, match="stem_depths"):
        ViTScratchForMaskedAutoencoding(tiny_config(stem_depths=[1], **DECODER))


def test_an_image_of_one_patch_is_refused():
    with pytest.raises(InputError, match="image_size=8 is one patch"):
        ViTScratchForMaskedAutoencoding(tiny_config(image_size=8, **DECODER))


def test_registers_and_distillation_token_stay_in_the_encoder():
    model = autoencoder(num_register_tokens=3, use_distillation_token=True)
    output = model(random_pixels())
    output.loss.backward()
    assert model.decoder.num_prefix_tokens == 1
    assert model.vit.embeddings.register_tokens.grad.abs().sum() > 0


# Both.


def test_two_evaluations_agree_and_two_training_steps_do_not(head):
    pixels = random_pixels()
    head.eval()
    first, second = head(pixels), head(pixels)
    assert torch.equal(first.mask, second.mask)
    assert torch.equal(first.loss, second.loss)
    head.train()
    assert not torch.equal(head(pixels).mask, head(pixels).mask)


def test_the_mask_of_an_image_in_evaluation_does_not_depend_on_the_batch_size(head):
    head.eval()
    assert torch.equal(head(random_pixels(batch=4)).mask[:2], head(random_pixels(batch=2)).mask)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pooling": "attention", "use_class_token": True},
        {"pooling": "mean"},
        {"pooling": "mean", "final_norm": "after_pooling"},
        {"representation_size": 16},
        {"num_register_tokens": 2, "use_distillation_token": True},
        {"position_embedding_type": "relative"},
        {"position_embedding_type": "rope_2d"},
        {"position_embedding_type": "learned_2d", "position_embedding_placement": "every_layer"},
    ],
    ids=str,
)
def test_every_trainable_parameter_gets_a_gradient(head, fields):
    model = type(head)(tiny_config(**DECODER, **fields))
    randomize(model)
    model(random_pixels()).loss.backward()
    assert [name for name, tensor in model.named_parameters() if tensor.requires_grad and tensor.grad is None] == []


@pytest.mark.parametrize(
    "fields", [{}, {"pooling": "mean"}, {"pooling": "attention"}, {"representation_size": 16}], ids=str
)
@pytest.mark.parametrize("model_class", [ViTScratchForImageClassification, ViTScratchModel])
def test_every_tensor_of_the_encoder_arrives_in_what_is_trained_next(head, fields, model_class, tmp_path):
    model = type(head)(tiny_config(**DECODER, **fields))
    randomize(model)
    model.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    arrived, sent = loaded.base_model.state_dict(), model.vit.state_dict()
    for name, tensor in sent.items():
        torch.testing.assert_close(arrived[name], tensor, **EXACT)
    heads = {name.rsplit(".", 2)[0].split(".")[0] for name in arrived.keys() - sent.keys()}
    assert heads <= {"attention_pooling", "pooler"}
    assert {name.split(".")[-2] for name in info["missing_keys"]} <= {
        *("classifier", "dense", "attention_pooling", "layernorm", "fc1", "fc2"),
        *(f"{name}_proj" for name in "qkvo"),
    }


def test_a_damaged_attention_head_is_not_taken_for_a_new_one(tmp_path):
    model = ViTScratchForImageClassification(tiny_config(pooling="attention"))
    state = model.state_dict()
    del state["vit.attention_pooling.probe"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(InputError, match=r"vit\.attention_pooling\.probe"):
        ViTScratchForImageClassification.from_pretrained(tmp_path)


def test_the_heads_go_on_where_they_were(head, tmp_path):
    head.eval().save_pretrained(tmp_path)
    again = type(head).from_pretrained(tmp_path)
    torch.testing.assert_close(again(random_pixels()).loss, head(random_pixels()).loss, **EXACT)


def test_the_auto_classes_know_the_heads():
    assert type(AutoModelForMaskedImageModeling.from_config(tiny_config())) is ViTScratchForMaskedPatchPrediction
    assert type(AutoModelForPreTraining.from_config(tiny_config(**DECODER))) is ViTScratchForMaskedAutoencoding


def test_the_loss_falls_within_a_few_steps(head):
    pixels = random_pixels(batch=4)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = head(pixels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", ["image_mean", "image_std"])
def test_pixel_statistics_of_another_number_of_channels_are_refused(name):
    fields = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, name: [0.5]}
    with pytest.raises(InputError, match=rf"{name}=\[0.5\] must have num_channels=3 numbers"):
        ViTScratchForMaskedPatchPrediction(tiny_config(**fields))


def test_pixel_statistics_of_pretraining_do_not_bind_the_classifier(tmp_path):
    predictor(image_mean=[0.4, 0.5, 0.6], image_std=[0.2] * 3).save_pretrained(tmp_path)
    model = ViTScratchForImageClassification.from_pretrained(tmp_path, num_channels=1)
    assert model(random_pixels(channels=1)).logits.shape == (2, 7)


def test_what_is_trainable_stays_so_after_loading(head, tmp_path):
    head.save_pretrained(tmp_path)
    again = type(head).from_pretrained(tmp_path)
    assert {name: tensor.requires_grad for name, tensor in again.named_parameters()} == {
        name: tensor.requires_grad for name, tensor in head.named_parameters()
    }
    again.train()
    again(random_pixels()).loss.backward()
    assert all(tensor.grad is not None for tensor in again.parameters())


def test_an_encoder_that_is_trained_on_starts_with_the_decoders_fixed_positions(tmp_path):
    ViTScratchForImageClassification(tiny_config(**DECODER)).save_pretrained(tmp_path)
    model = ViTScratchForMaskedAutoencoding.from_pretrained(tmp_path)
    fresh = ViTScratchForMaskedAutoencoding(tiny_config(**DECODER))
    torch.testing.assert_close(model.decoder.position_embeddings, fresh.decoder.position_embeddings, **EXACT)


def test_an_image_that_cannot_be_cut_into_patches_is_refused_by_name(head):
    with pytest.raises(InputError, match="33x47 pixels cannot be cut into patches of 8x8"):
        head(random_pixels(height=33, width=47))


def test_a_refused_patch_size_leaves_the_model_as_it_was():
    model = autoencoder()
    before = model(random_pixels()).loss
    with pytest.raises(InputError, match="patch_size=8"):
        model.resize_input(patch_size=16)
    torch.testing.assert_close(model(random_pixels()).loss, before, **EXACT)


@pytest.mark.parametrize("training", [True, False])
def test_the_heads_compile_without_a_graph_break(head, training):
    head.train(training)
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    assert compiled(random_pixels()).loss.isfinite()
    if not training:
        torch.testing.assert_close(compiled(random_pixels()).loss, head(random_pixels()).loss)


@pytest.mark.e2e
def test_the_heads_export_with_any_batch(head):
    head.eval()
    batch = torch.export.Dim("batch", min=2, max=16)
    program = torch.export.export(head, (random_pixels(batch=3),), dynamic_shapes=({0: batch},))
    pixels = random_pixels(batch=5)
    torch.testing.assert_close(program.module()(pixels).logits, head(pixels).logits)


def test_a_classifier_that_lost_its_attention_head_is_refused(tmp_path):
    model = ViTScratchForImageClassification(tiny_config(pooling="attention"))
    state = {name: tensor for name, tensor in model.state_dict().items() if "attention_pooling" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(InputError, match=r"vit\.attention_pooling\.probe"):
        ViTScratchForImageClassification.from_pretrained(tmp_path)


def test_a_replacement_is_never_the_patch_itself():
    embeddings = torch.arange(6.0).view(1, 6, 1)
    fate = torch.full((1, 6), 0.85)  # between what is masked and what stays
    for other in (0.0, 0.5, 0.999):
        mask = torch.ones(1, 6, dtype=torch.bool)
        result = corrupted(embeddings, mask, fate, torch.full((1, 6), other), torch.full((1, 1, 1), -1.0))
        assert (result != embeddings).all()
        assert (result >= 0).all()


def test_the_decoder_has_plain_layers_whatever_the_encoder_has():
    fields = {"layer_scale_init": 0.1, "qk_norm": True, "mlp_type": "swiglu", "hidden_act": "silu"}
    names = {name for name, _ in autoencoder(**fields).decoder.layers[0].named_parameters()}
    plain = {name for name, _ in autoencoder().decoder.layers[0].named_parameters()}
    assert names == plain


def test_the_distillation_token_parts_from_the_class_token(tmp_path):
    model = ViTScratchForImageClassification(
        tiny_config(use_distillation_token=True, position_embedding_type="rope_2d")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
        optimizer.step()
    assert not torch.allclose(model.classifier.weight, model.distillation_classifier.weight)

"""torchvision's networks become ViTScratch networks that compute the same; torchvision itself is the reference."""

import re

import numpy as np
import PIL.Image
import pytest
import torch
from fixtures_modeling import random_pixels, randomize
from torchvision.models import ViT_B_16_Weights, ViT_L_16_Weights, vision_transformer

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch.convert_proof_vit_scratch import prove
from modeling_vit_scratch.convert_torchvision_vit_scratch import HEADS, from_torchvision
from modeling_vit_scratch.errors_vit_scratch import InputError

# In float64 rounding is about 1e-15; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}

SHAPE = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}


def network_of(**arguments):
    """Returns torchvision's network in float64, every tensor drawn anew."""
    network = vision_transformer.VisionTransformer(**{**SHAPE, "num_classes": 7, **arguments})
    randomize(network)
    return network.double().eval()


def converted(network, **arguments):
    return from_torchvision(network.state_dict(), "weights", **{"num_attention_heads": 4, **arguments})


@pytest.mark.parametrize("arguments", [{}, {"representation_size": 24}, {"image_size": 48, "patch_size": 16}])
def test_logits_equal_those_of_torchvision(arguments):
    network = network_of(**arguments)
    size = network.image_size
    pixels = random_pixels(height=size, width=size, dtype=torch.float64)
    model = converted(network).model
    assert isinstance(model, ViTScratchForImageClassification)
    torch.testing.assert_close(model(pixels).logits, network(pixels), **CLOSE)


def test_features_equal_those_of_torchvisions_encoder():
    network = network_of()
    features = []
    network.encoder.register_forward_hook(lambda module, args, output: features.append(output))
    pixels = random_pixels(dtype=torch.float64)
    network(pixels)
    actual = converted(network).model.vit(pixels).last_hidden_state
    torch.testing.assert_close(actual, features[0], **CLOSE)


def test_a_network_without_heads_becomes_an_encoder():
    network = network_of()
    network.heads = torch.nn.Identity()
    pixels = random_pixels(dtype=torch.float64)
    model = converted(network).model
    assert isinstance(model, ViTScratchModel)
    torch.testing.assert_close(model(pixels).pooler_output, network(pixels), **CLOSE)


def test_the_proof_compares_with_what_torchvision_computes():
    network = network_of()
    conversion = converted(network)
    pixels = random_pixels(dtype=torch.float64)
    torch.testing.assert_close(conversion.reference(pixels)["logits"], network(pixels), **CLOSE)
    assert [difference.output for difference in prove(conversion)] == ["last_hidden_state", "logits"]
    assert all(difference.is_equal for difference in prove(conversion))


def test_the_proof_fails_where_one_weight_differs():
    conversion = converted(network_of())
    with torch.no_grad():
        conversion.model.vit.layers[1].mlp.fc1.bias[3] += 1e-3
    assert not any(difference.is_equal for difference in prove(conversion))


def test_the_names_before_torchvision_0_13_give_the_same_network():
    state = network_of().state_dict()
    old = {
        name.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): state[name] for name in state
    }
    assert any("linear_1" in name for name in old)
    actual = from_torchvision(old, "weights", num_attention_heads=4).model.state_dict()
    expected = from_torchvision(state, "weights", num_attention_heads=4).model.state_dict()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_every_tensor_arrives_bit_by_bit_in_its_dtype():
    network = network_of().to(torch.bfloat16)
    ours = converted(network).model.state_dict()
    theirs = sorted(tensor.flatten().tolist() for tensor in split(network.state_dict()))
    assert sorted(tensor.flatten().tolist() for tensor in ours.values()) == theirs
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}


def split(state):
    """Returns the tensors of a state dict, with q, k and v apart."""
    return [part for name, tensor in state.items() for part in (tensor.chunk(3) if "in_proj" in name else [tensor])]


@pytest.mark.parametrize(("name", "width"), [("vit_b_16", 768), ("vit_l_16", 1024), ("vit_h_14", 1280)])
def test_the_heads_of_torchvisions_networks_are_known(name, width, monkeypatch):
    found = {}
    monkeypatch.setattr(vision_transformer, "VisionTransformer", lambda **arguments: found.update(arguments))
    getattr(vision_transformer, name)()
    assert HEADS[width] == found["num_heads"]
    assert width == found["hidden_dim"]


def test_one_class_is_a_sigmoid():
    assert converted(network_of(num_classes=1)).model.config.problem_type == "multi_label_classification"


# Preprocessing


def photo():
    values = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    return PIL.Image.fromarray(values).resize((640, 427), PIL.Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [
        ({"image_size": 224, "patch_size": 16}, ViT_B_16_Weights.IMAGENET1K_V1),
        ({"image_size": 224, "patch_size": 16, "hidden_dim": 1024}, ViT_L_16_Weights.IMAGENET1K_V1),
        ({"image_size": 384, "patch_size": 16}, ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1),
    ],
    ids=["224 px", "224 px, L/16", "384 px"],
)
def test_pixel_values_equal_those_of_torchvisions_preset(arguments, weights):
    network = network_of(**arguments, num_layers=1)
    processor = converted(network).image_processor
    actual, expected = processor(photo()).pixel_values[0], weights.transforms()(photo())
    # Pillow's and torch's resizing of 8-bit images, in two passes, differ by rounding: 2 steps of 1/255, over std.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2.01 / 255 / 0.224)


def test_where_several_presets_have_the_same_shapes_a_note_names_the_other():
    [note] = [note for note in converted(network_of(image_size=224, patch_size=32)).notes if "preprocessing" in note]
    assert "IMAGENET1K_V1" in note
    assert "IMAGENET1K_SWAG_LINEAR_V1" in note


def test_what_a_state_dict_does_not_tell_is_noted_as_assumed():
    network = network_of(hidden_dim=768, num_heads=12, num_layers=1)
    notes = from_torchvision(network.state_dict(), "weights").notes
    assert "a state dict does not tell the eps of LayerNorms: torchvision's own is assumed, 1e-6" in notes
    assert "12 heads, as torchvision's networks of width 768; else give num_attention_heads=..." in notes
    given = from_torchvision(network.state_dict(), "weights", num_attention_heads=12).notes
    assert not any("heads" in note for note in given)


def test_a_note_says_that_torchvision_resamples_positions_otherwise():
    network = network_of(representation_size=None)
    larger = vision_transformer.interpolate_embeddings(48, 8, network.float().state_dict())
    model = converted(network).model
    model.resize_input(image_size=48)
    positions = model.vit.embeddings.position_embeddings
    assert (positions - larger["encoder.pos_embedding"]).abs().max() > 0.01  # of values around 1
    assert any("torchvision's interpolate_embeddings puts the corners" in note for note in converted(network).notes)


# What does not fit


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def with_tensor(name, *shape):
    return lambda state: {**state, name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("conv_proj.weight"), "conv_proj.weight is missing"),
        (without("encoder.pos_embedding"), "encoder.pos_embedding is missing"),
        (without("encoder.ln.weight"), "does not hold the tensors.*encoder.ln.weight"),
        (with_tensor("extra", 1), "does not hold the tensors.*extra"),
        (with_tensor("conv_proj.conv_bn_relu_0.0.weight", 8, 3, 3, 3), "conv_stem_configs"),
        (with_tensor("encoder.pos_embedding", 1, 13, 32), "12 patches of 8x8 pixels are no square"),
        (with_tensor("encoder.pos_embedding", 1, 0, 32), "-1 patches of 8x8 pixels are no square"),
        (with_tensor("conv_proj.weight", 32, 4, 8, 8), "size mismatch for conv_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    with pytest.raises(InputError, match=re.escape(message).replace(r"\.\*", ".*")) as caught:
        from_torchvision(change(network_of().state_dict()), "weights", num_attention_heads=4)
    assert str(caught.value).startswith("weights")
    assert "\n" not in str(caught.value)


def test_the_heads_of_an_unknown_width_are_asked_for():
    with pytest.raises(InputError, match=r"width of 32; give num_attention_heads=\.\.\."):
        from_torchvision(network_of().state_dict(), "weights")


@pytest.mark.parametrize("num_attention_heads", [0, 3])
def test_heads_that_do_not_divide_the_width_are_refused(num_attention_heads):
    with pytest.raises(InputError, match=f"num_attention_heads={num_attention_heads} does not divide the width of 32"):
        from_torchvision(network_of().state_dict(), "weights", num_attention_heads=num_attention_heads)

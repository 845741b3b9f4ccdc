"""The proof of a conversion: what it calls equal, what it does not, and what a checkpoint must hold to be built."""

import copy
import math

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor, ViTScratchModel
from modeling_vit_scratch.convert_proof_vit_scratch import Conversion, built, fixed_images, prove
from modeling_vit_scratch.errors_vit_scratch import InputError


def outputs_of(model: ViTScratchForImageClassification):
    """Returns a reference that a model of ours gives."""

    @torch.no_grad()
    def reference(pixel_values):
        encoder = model.vit(pixel_values)
        return {
            "logits": model(pixel_values).logits,
            "last_hidden_state": encoder.last_hidden_state,
            "pooler_output": encoder.pooler_output,
        }

    return reference


def conversion_of(model, original, dtype=torch.float64, **fields) -> Conversion:
    processor = ViTScratchImageProcessor.from_config(model.config)
    return Conversion("source", model, processor, outputs_of(original), dtype, **fields)


def with_fields(model: ViTScratchForImageClassification, **fields) -> ViTScratchForImageClassification:
    """Returns the same tensors under another config."""
    config = copy.deepcopy(model.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return built(ViTScratchForImageClassification, config, model.state_dict(), "source")


def test_a_model_is_equal_to_itself_to_the_last_bit():
    model = tiny_classifier()
    differences = prove(conversion_of(model, copy.deepcopy(model).double()))
    assert [found.output for found in differences] == ["logits", "last_hidden_state", "pooler_output"]
    assert all(found.largest == 0 and found.is_equal for found in differences)


def test_the_largest_difference_is_that_of_the_farthest_value():
    model, moved = tiny_classifier(), tiny_classifier().double()
    with torch.no_grad():
        moved.classifier.bias[3] += 0.25
    logits, *others = prove(conversion_of(model, moved))
    assert logits.largest == pytest.approx(0.25, abs=1e-12)  # rounding of logits around 1
    assert not logits.is_equal and all(found.largest == 0 for found in others)


WRONG = [
    {"hidden_act": "gelu"},  # for the tanh form
    {"layer_norm_eps": 1e-12},  # for 1e-6: transformers' default for the official
    {"num_attention_heads": 2},  # for 4: no tensor tells
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: next(iter(fields)))
def test_a_wrong_field_is_not_equal_in_float64(fields):
    original = tiny_classifier()
    differences = prove(conversion_of(with_fields(original, **fields), copy.deepcopy(original).double()))
    assert not any(found.is_equal for found in differences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_order_of_sums_is_equal(dtype):
    """Attention written out and torch's own kernel differ by rounding alone."""
    model, original = tiny_classifier(), tiny_classifier()
    model.set_attn_implementation("sdpa")
    original.set_attn_implementation("eager")
    differences = prove(conversion_of(model, original.to(dtype), dtype))
    assert all(found.is_equal for found in differences)


def test_not_a_number_is_not_equal():
    model, broken = tiny_classifier(), tiny_classifier().double()
    with torch.no_grad():
        broken.classifier.bias[0] = math.nan
    assert not prove(conversion_of(model, broken))[0].is_equal


def test_the_tolerance_can_be_given():
    model, moved = tiny_classifier(), tiny_classifier().double()
    with torch.no_grad():
        moved.classifier.bias += 1e-3
    conversion = conversion_of(model, moved)
    scale = prove(conversion)[0].scale
    assert prove(conversion, tolerance=1.1e-3 / scale)[0].is_equal
    assert not prove(conversion, tolerance=0.9e-3 / scale)[0].is_equal


def test_a_wrong_interpolation_shows_at_a_size_that_is_asked_for():
    original = tiny_classifier()
    wrong = with_fields(original, position_interpolation="bicubic")
    sizes = [(32, 32), (48, 40)]
    differences = prove(conversion_of(wrong, copy.deepcopy(original).double(), image_sizes=sizes))
    by_size = {size: [found.is_equal for found in differences if found.image_size == size] for size in sizes}
    assert by_size == {(32, 32): [True] * 3, (48, 40): [False] * 3}


def test_the_proof_leaves_the_model_in_its_dtype():
    model = tiny_classifier(dtype=torch.bfloat16)
    prove(conversion_of(model, copy.deepcopy(model).double()))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


def test_a_model_already_in_the_dtype_of_the_proof_is_not_copied(monkeypatch):
    model = tiny_classifier(dtype=torch.float64)
    conversion = conversion_of(model, copy.deepcopy(model))
    monkeypatch.setattr(copy, "deepcopy", lambda value: pytest.fail("copied"))
    assert all(found.largest == 0 for found in prove(conversion))


def test_fixed_images_are_the_formula():
    image, channel, row, column = 1, 2, 5, 7
    phase = 0.31 * row + 0.17 * column + 0.001 * row * column + 1.3 * channel + 0.7 * image
    value = fixed_images(3, (8, 16))[image, channel, row, column].item()
    assert value == pytest.approx(2 * math.sin(phase), abs=1e-15)


def test_no_two_patches_of_the_fixed_images_are_alike():
    patches = fixed_images(3, (224, 224)).unfold(2, 16, 16).unfold(3, 16, 16).reshape(-1, 256)
    distances = torch.cdist(patches, patches, compute_mode="donot_use_mm_for_euclid_dist")
    assert distances.fill_diagonal_(math.inf).min() > 0.1  # of patches whose norm is about 22


def test_tensors_keep_their_bits_and_dtype():
    tensors = tiny_encoder(dtype=torch.float16).state_dict()
    found = built(ViTScratchModel, tiny_config(), tensors, "source").state_dict()
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == torch.float16 and torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_built_model_shares_no_memory_with_its_source():
    tensors = tiny_encoder().state_dict()
    model = built(ViTScratchModel, tiny_config(), tensors, "source")
    before = tensors["layernorm.weight"].clone()
    with torch.no_grad():
        model.layernorm.weight.zero_()
    assert torch.equal(tensors["layernorm.weight"], before)


def test_the_built_model_is_in_evaluation_mode_and_can_be_trained():
    tensors = tiny_classifier(hidden_dropout_prob=0.5).state_dict()
    config = tiny_config(hidden_dropout_prob=0.5)
    model = built(ViTScratchForImageClassification, config, tensors, "source")
    assert not model.training
    model(random_pixels(), labels=torch.tensor([0, 1])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_state_dict_that_does_not_fit_is_refused_with_all_that_is_wrong():
    tensors = tiny_encoder().state_dict()
    del tensors["layernorm.bias"]
    tensors["layernorm.gain"] = torch.zeros(32)
    tensors["embeddings.cls_token"] = torch.zeros(1, 1, 31)
    with pytest.raises(InputError) as refusal:
        built(ViTScratchModel, tiny_config(), tensors, "a.pth")
    message = str(refusal.value)
    assert message.startswith("a.pth ") and "\n" not in message
    assert "missing: layernorm.bias" in message and "without a place: layernorm.gain" in message
    assert "embeddings.cls_token (1, 1, 31) instead of (1, 1, 32)" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tensors_that_are_no_finite_numbers_are_refused_by_name(value):
    tensors = tiny_encoder().state_dict()
    tensors["layernorm.bias"] = torch.full((32,), value)
    with pytest.raises(InputError, match=r"^a\.pth: NaN or infinity in layernorm\.bias; "):
        built(ViTScratchModel, tiny_config(), tensors, "a.pth")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_of_no_floating_point_numbers_are_refused_by_name_and_dtype(dtype):
    tensors = tiny_encoder().state_dict()
    tensors["layernorm.bias"] = tensors["layernorm.bias"].to(dtype)
    with pytest.raises(InputError, match=rf"^a\.pth: layernorm\.bias \({dtype}\): only float16"):
        built(ViTScratchModel, tiny_config(), tensors, "a.pth")

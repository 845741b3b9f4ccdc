"""Our models as transformers' ViT: the same tensors, the same outputs, and a refusal that names the field."""

import pytest
import torch
import transformers
from fixtures_convert_transformers import CLOSE, deit, random_peer, vit
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder
from peft import LoraConfig, get_peft_model

from modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedPatchPrediction,
    ViTScratchImageProcessor,
    ViTScratchModel,
)
from modeling_vit_scratch.convert_transformers_vit_scratch import from_transformers, to_transformers_vit
from modeling_vit_scratch.errors_vit_scratch import InputError

PROCESSOR = ViTScratchImageProcessor(size=32, patch_size=8)
SAME_CONFIG = (
    "image_size",
    "patch_size",
    "num_channels",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "qkv_bias",
    "dtype",
)
OURS = {
    "classifier": lambda **fields: tiny_classifier(**fields),
    "encoder": lambda **fields: tiny_encoder(**fields),
    "encoder with pre-logits": lambda **fields: tiny_encoder(representation_size=24, **fields),
}
VARIANTS = {
    "as it is": {},
    "without square": {"image_size": [32, 48], "patch_size": [8, 16]},
    "other fields": {"qkv_bias": False, "hidden_act": "relu", "layer_norm_eps": 1e-3, "num_channels": 1},
    "half precision": {"dtype": torch.bfloat16},
    "multi-label": {"problem_type": "multi_label_classification"},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", OURS)
def test_ours_to_vit_and_back_is_the_same_bit_by_bit(tmp_path, kind, fields):
    ours = OURS[kind](**fields)
    image_processor = ViTScratchImageProcessor.from_config(ours.config)
    theirs, processor = to_transformers_vit(ours, image_processor)
    theirs.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    back = from_transformers(tmp_path)
    torch.testing.assert_close(back.model.state_dict(), ours.state_dict(), rtol=0, atol=0)
    names = [*SAME_CONFIG, "representation_size"]
    if kind == "classifier":
        names += ["id2label", "label2id", "problem_type"]
    assert {name: getattr(back.model.config, name) for name in names} == {
        name: getattr(ours.config, name) if name != "dtype" else next(ours.parameters()).dtype for name in names
    }
    assert type(back.model) is type(ours)
    assert back.image_processor.to_dict() == image_processor.to_dict()


@pytest.mark.parametrize("class_name", ["ViTModel", "ViTForImageClassification"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vit_to_ours_and_back_is_the_same_bit_by_bit(tmp_path, class_name, dtype):
    theirs = random_peer(class_name, vit()).to(dtype)
    theirs.save_pretrained(tmp_path)
    conversion = from_transformers(tmp_path)
    back, _ = to_transformers_vit(conversion.model, conversion.image_processor)
    torch.testing.assert_close(back.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    names = (*SAME_CONFIG, "id2label") if "Classification" in class_name else SAME_CONFIG
    assert {name: getattr(back.config, name) for name in names} == {
        name: dtype if name == "dtype" else getattr(theirs.config, name) for name in names
    }
    assert type(back) is type(theirs)


@pytest.mark.parametrize("kind", OURS)
def test_the_exported_model_read_without_our_code_gives_the_same_outputs(tmp_path, kind):
    ours = OURS[kind](position_interpolation="bicubic")
    to_transformers_vit(ours, PROCESSOR)[0].save_pretrained(tmp_path)
    auto_class = transformers.AutoModelForImageClassification if kind == "classifier" else transformers.AutoModel
    with_pooler = {} if kind != "encoder" else {"add_pooling_layer": False}
    theirs = auto_class.from_pretrained(tmp_path, **with_pooler).double().eval()
    for height, width in ((32, 32), (48, 64)):
        pixels = random_pixels(height=height, width=width, dtype=torch.float64)
        actual = ours.double()(pixels)
        expected = theirs(pixels, interpolate_pos_encoding=True)
        names = [name for name in ("logits", "last_hidden_state", "pooler_output") if expected.get(name) is not None]
        torch.testing.assert_close({n: actual[n] for n in names}, {n: expected[n] for n in names}, **CLOSE)


def test_the_exported_model_shares_no_memory_with_ours():
    ours = tiny_classifier()
    theirs, _ = to_transformers_vit(ours, PROCESSOR)
    before = theirs.classifier.bias.clone()
    torch.nn.init.constant_(ours.classifier.bias, 7.0)
    assert torch.equal(theirs.classifier.bias, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"stem_depths": [], "patch_size": 8},
        {"position_embedding_type": "none"},
        {"position_embedding_type": "learned_2d"},
        {"position_embedding_type": "sincos_2d"},
        {"position_embedding_type": "relative"},
        {"position_embedding_type": "rope_2d"},
        {"position_embedding_placement": "every_layer"},
        {"position_embedding_placement": "every_layer_shared"},
        {"class_token_position": False},
        {"use_distillation_token": True},
        {"num_register_tokens": 2},
        {"pooling": "mean"},
        {"pooling": "attention"},
        {"pooling": "class_token_and_mean"},
        {"final_norm": "after_pooling", "pooling": "mean"},
        {"mlp_type": "swiglu", "hidden_act": "silu"},
        {"qk_norm": True},
        {"layer_scale_init": 0.1},
        {"representation_size": 24},
    ],
    ids=str,
)
def test_a_field_that_vit_has_not_is_named_with_its_value(fields):
    name, value = next(iter(fields.items()))
    name, value = ("pooling", "mean") if name == "final_norm" else (name, value)
    model = ViTScratchForImageClassification(tiny_config(**fields))
    with pytest.raises(InputError) as refusal:
        to_transformers_vit(model, PROCESSOR)
    assert str(refusal.value).startswith(f"{name}={value!r} has no counterpart in ")
    assert "\n" not in str(refusal.value)


def test_a_distilled_deit_is_refused_and_exported_without_its_token(tmp_path):
    random_peer("DeiTForImageClassificationWithTeacher", deit()).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="use_distillation_token=True"):
        to_transformers_vit(from_transformers(tmp_path).model, PROCESSOR)
    vit_of_the_rest, _ = to_transformers_vit(from_transformers(tmp_path, keep_distillation=False).model, PROCESSOR)
    assert type(vit_of_the_rest) is transformers.ViTForImageClassification


def test_a_model_with_another_head_is_refused():
    model = ViTScratchForMaskedPatchPrediction(tiny_config())
    with pytest.raises(InputError, match="a ViTScratchForMaskedPatchPrediction has no counterpart"):
        to_transformers_vit(model, PROCESSOR)


def test_a_model_with_adapters_is_refused_until_they_are_merged():
    adapted = get_peft_model(tiny_classifier(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(InputError, match="merge adapters"):
        to_transformers_vit(adapted.base_model.model, PROCESSOR)
    merged = adapted.merge_and_unload()
    assert to_transformers_vit(merged, PROCESSOR)[0].num_labels == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at other image sizes transformers' ViT resamples positions by bicubic"),
        ({"drop_path_rate": 0.1}, "drop_path_rate=0.1 is left out"),
        ({"patch_dropout_rate": 0.1}, "patch_dropout_rate=0.1 is left out"),
        ({"hidden_dropout_prob": 0.1}, "no dropout after the activation of the MLP"),
    ],
)
def test_what_differs_in_training_or_at_other_sizes_is_logged(caplog, fields, message):
    to_transformers_vit(tiny_encoder(**fields), PROCESSOR)
    assert message in caplog.text


def test_an_encoder_loads_into_vit_by_its_own_names():
    ours = ViTScratchModel(tiny_config(representation_size=32))
    theirs, _ = to_transformers_vit(ours, PROCESSOR)
    assert list(theirs.state_dict()) and theirs.state_dict().keys() == ours.state_dict().keys()

"""Models of ours as Google's npz files, and back, bit by bit."""

import numpy as np
import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder
from fixtures_npz import POSITIONS, below, big_vision, by_formula, linen_arrays, linen_shapes, released, write_npz
from peft import LoraConfig, get_peft_model

from modeling_vit_scratch import ViTScratchForMaskedAutoencoding, ViTScratchImageProcessor
from modeling_vit_scratch.convert_npz_vit_scratch import from_npz, to_npz
from modeling_vit_scratch.errors_vit_scratch import InputError


def exported(model, **processor_fields):
    return to_npz(model, ViTScratchImageProcessor.from_config(model.config, **processor_fields))


def assert_same_arrays(arrays, others):
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert array.dtype == others[name].dtype and array.shape == others[name].shape, name
        assert array.tobytes() == others[name].tobytes(), name


FILES = {
    "class token": released(linen_arrays()),
    "pre-logits": released(linen_arrays(representation_size=16)),
    "no head": {name: array for name, array in released(linen_arrays()).items() if "head/" not in name},
    "mean": released(linen_arrays(pooling="mean", num_positions=16)),
    "hybrid": released(linen_arrays(stem_depths=[1, 2], patch=1)),
    "root alone": released(linen_arrays(stem_depths=[], patch=4, num_positions=5)),
    "float16": released(by_formula(linen_shapes(), np.float16)),
    "float64": released(by_formula(linen_shapes(), np.float64)),
    "big_vision, class token": below("params/", big_vision(linen_arrays())),
    "big_vision, attention": below("params/", big_vision(linen_arrays(pooling="attention", num_positions=16))),
}


@pytest.mark.parametrize("file", FILES)
def test_a_file_read_and_written_has_the_same_names_and_bytes(tmp_path, file):
    conversion = from_npz(write_npz(tmp_path, FILES[file]))
    assert_same_arrays(to_npz(conversion.model, conversion.image_processor), FILES[file])


def test_bfloat16_is_written_as_big_vision_stores_it(tmp_path):
    arrays = exported(tiny_classifier(dtype=torch.bfloat16))
    assert {array.dtype for array in arrays.values()} == {np.dtype("V2")}
    back = from_npz(write_npz(tmp_path, arrays)).model
    assert torch.equal(back.classifier.weight, tiny_classifier(dtype=torch.bfloat16).classifier.weight)


@pytest.mark.parametrize("fields", [
    {},
    {"representation_size": 24},
    {"pooling": "mean"},
    {"pooling": "mean", "position_embedding_type": "sincos_2d"},
    {"position_embedding_type": "sincos_2d"},
    {"pooling": "attention", "representation_size": 24},
    {"class_token_position": False},
    {"stem_depths": [2, 1], "patch_size": 16},
    {"stem_depths": [], "stem_width_factor": 2, "patch_size": 4},
    {"image_size": [32, 64], "patch_size": [8, 4], "num_channels": 1},
    {"num_labels": 1, "problem_type": "multi_label_classification"},
], ids=str)  # fmt: skip
def test_a_model_written_and_read_has_the_same_tensors_and_logits(tmp_path, fields):
    model = tiny_classifier(**fields)
    back = from_npz(write_npz(tmp_path, exported(model)), image_size=model.config.image_size).model
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in back.state_dict().items())
    height, width = model.config.image_height_width
    pixels = random_pixels(height=height, width=width, channels=model.config.num_channels)
    assert torch.equal(back(pixels).logits, model(pixels).logits)


def test_an_encoder_is_written_without_a_head(tmp_path):
    encoder = tiny_encoder()
    arrays = exported(encoder)
    assert not [name for name in arrays if "head" in name]
    back = from_npz(write_npz(tmp_path, arrays)).model
    assert torch.equal(back(random_pixels()).pooler_output, encoder(random_pixels()).pooler_output)


def test_names_are_those_of_the_released_files():
    names = {name.replace("encoderblock_1/", "") for name in exported(tiny_classifier()) if "encoderblock_1" in name}
    attention = [
        f"MultiHeadDotProductAttention_1/{part}/{leaf}"
        for part in ("query", "key", "value", "out")
        for leaf in ("kernel", "bias")
    ]
    norms = [f"LayerNorm_{index}/{leaf}" for index in (0, 2) for leaf in ("scale", "bias")]
    mlp = [f"MlpBlock_3/Dense_{index}/{leaf}" for index in (0, 1) for leaf in ("kernel", "bias")]
    assert names == {f"Transformer/{name}" for name in attention + norms + mlp}


@pytest.mark.parametrize("fields", [
    {"pooling": "attention"},
    {"position_embedding_type": "sincos_2d"},
    {"class_token_position": False},
], ids=str)  # fmt: skip
def test_what_only_big_vision_has_comes_under_its_names(fields):
    arrays = exported(tiny_classifier(**fields))
    assert all(name.startswith("params/") for name in arrays)
    assert f"params/{POSITIONS}" not in arrays
    assert "params/Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel" in arrays


REFUSED = {
    "mlp_type='swiglu'": {"mlp_type": "swiglu", "hidden_act": "silu"},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "layer_norm_eps=1e-12": {"layer_norm_eps": 1e-12},
    "qkv_bias=False": {"qkv_bias": False},
    "qk_norm=True": {"qk_norm": True},
    "layer_scale_init=0.1": {"layer_scale_init": 0.1},
    "position_embedding_type='none'": {"position_embedding_type": "none"},
    "position_embedding_type='learned_2d'": {"position_embedding_type": "learned_2d"},
    "position_embedding_type='rope_2d'": {"position_embedding_type": "rope_2d"},
    "position_embedding_type='relative'": {"position_embedding_type": "relative"},
    "position_embedding_placement='every_layer_shared'": {"position_embedding_placement": "every_layer_shared"},
    "use_distillation_token=True": {"use_distillation_token": True},
    "num_register_tokens=2": {"num_register_tokens": 2},
    "pooling='class_token_and_mean'": {"pooling": "class_token_and_mean"},
    "use_class_token=True": {"pooling": "mean", "use_class_token": True},
    "final_norm='after_pooling'": {"pooling": "mean", "final_norm": "after_pooling"},
    "problem_type='multi_label_classification'": {"problem_type": "multi_label_classification"},
    r"stem_depths=\[1\]": {"stem_depths": [1], "pooling": "attention"},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_the_official_code_has_not_is_refused_by_field_and_value(field):
    with pytest.raises(InputError, match=f"^{field} has no place in an npz file"):
        exported(tiny_classifier(**REFUSED[field]))


@pytest.mark.parametrize("field", ["image_mean", "image_std"])
def test_other_pixels_than_the_official_codes_are_refused_by_field(field):
    with pytest.raises(InputError, match=field):
        exported(tiny_classifier(), **{field: [0.485, 0.456, 0.406]})


def test_a_head_for_pretraining_is_refused_by_class():
    small = {"decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = tiny_config(**small, decoder_intermediate_size=8)
    with pytest.raises(InputError, match="ViTScratchForMaskedAutoencoding has no place"):
        to_npz(ViTScratchForMaskedAutoencoding(config), ViTScratchImageProcessor.from_config(config))


def test_adapters_must_be_merged_first():
    adapted = get_peft_model(tiny_classifier(), LoraConfig(target_modules=["q_proj"])).base_model.model
    with pytest.raises(InputError, match=r"merge or unload what made .*lora"):
        exported(adapted)


LOST = {
    "class names: those of the 2 classes": {"id2label": {0: "cat", 1: "dog"}, "num_labels": 2},
    "hidden_dropout_prob=0.1": {"hidden_dropout_prob": 0.1},
    "drop_path_rate=0.2": {"drop_path_rate": 0.2},
    "--image_size 32 32": {"position_embedding_type": "sincos_2d"},
}


@pytest.mark.parametrize("loss", LOST)
def test_what_the_format_has_no_place_for_is_said(loss, caplog):
    exported(tiny_classifier(**LOST[loss]))
    assert loss in caplog.text and len(caplog.records) == 1


def test_a_plain_network_loses_nothing(caplog):
    exported(tiny_classifier())
    assert not caplog.records


@pytest.mark.peer
@pytest.mark.parametrize("fields, timm_fields", [
    ({}, {}),
    ({"class_token_position": False}, {"no_embed_class": True}),
    ({"pooling": "mean"}, {"global_pool": "avg", "class_token": False, "fc_norm": False}),
    ({"pooling": "attention"}, {"global_pool": "map", "class_token": False}),
], ids=["class token", "without position", "mean", "attention"])  # fmt: skip
def test_timm_reads_the_written_file_and_computes_the_same_logits(tmp_path, fields, timm_fields):
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    model = tiny_classifier(**fields)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
    network = VisionTransformer(**shape, num_classes=7, act_layer="gelu_tanh", norm_layer="layernorm", **timm_fields)
    network.load_pretrained(str(write_npz(tmp_path, exported(model))))
    pixels = random_pixels(dtype=torch.float64)
    with torch.no_grad():
        theirs, ours = network.double().eval()(pixels), model.double()(pixels).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)  # measured: 1e-14

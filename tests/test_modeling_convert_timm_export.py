"""ViTScratch networks become timm's: files that timm loads by itself, bit by bit those they came from."""

import json
import sys

import pytest
import torch
from fixtures_modeling import random_pixels, randomize, tiny_classifier, tiny_encoder
from safetensors.torch import save_file

from modeling_vit_scratch import ViTScratchBackbone, ViTScratchImageProcessor
from modeling_vit_scratch.convert_timm_vit_scratch import from_timm, read_timm_config, to_timm
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

pytestmark = pytest.mark.peer
timm = pytest.importorskip("timm", reason="needs timm")

CLOSE = {"rtol": 0, "atol": 1e-12}  # in float64, where rounding is about 1e-15

PATCHES_ONLY = {"class_token_position": False}
REGISTERS = {"num_register_tokens": 3}
SWIGLU = {"mlp_type": "swiglu", "hidden_act": "silu"}
MODELS = {
    "class token": {},
    "class token, positions of patches only": PATCHES_ONLY,
    "mean": {"pooling": "mean"},
    "mean beside a class token, norm behind": {
        "pooling": "mean",
        "use_class_token": True,
        "final_norm": "after_pooling",
    },
    "attention pooling": {"pooling": "attention"},
    "attention pooling, class token": {"pooling": "attention", "use_class_token": True, **REGISTERS},
    "registers": REGISTERS,
    "registers, positions of patches only": {**REGISTERS, **PATCHES_ONLY},
    "registers without a class token": {**REGISTERS, "pooling": "mean"},
    "LayerScale, QK-norm": {"layer_scale_init": 1e-4, "qk_norm": True},
    "SwiGLU": {"mlp_type": "swiglu", "hidden_act": "silu"},
    "SwiGLU, registers, LayerScale": {
        "mlp_type": "swiglu",
        "hidden_act": "silu",
        "layer_scale_init": 1e-5,
        **REGISTERS,
    },
    "distilled": {"use_distillation_token": True},
    "no positions, no bias": {"position_embedding_type": "none", "qkv_bias": False},
    "eps 1e-5": {"layer_norm_eps": 1e-5},
    "erf GELU": {"hidden_act": "gelu"},
    "an MLP of 61 / 28, times 28 below 61 in floats": {"hidden_size": 28, "intermediate_size": 61},
    "quick GELU": {"hidden_act": "quick_gelu"},
    "not square, 1 channel": {"image_size": [16, 48], "patch_size": [8, 16], "num_channels": 1},
    "width of a registered network": {"hidden_size": 192, "num_attention_heads": 3},
}
RATES = {
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "patch_dropout_rate": 0.3,
    "drop_path_rate": 0.4,
}


def model_of(make=tiny_classifier, **fields):
    model = make(**fields)
    randomize(model)
    return model


def processor_of(model, **fields):
    return ViTScratchImageProcessor.from_config(model.config, **fields)


def write_folder(folder, exported):
    """Writes what timm reads and returns timm's name for it."""
    state_dict, config = exported
    save_file(state_dict, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return f"local-dir:{folder}"


def pixels_for(config):
    height, width = config.image_height_width
    return random_pixels(height=height, width=width, channels=config.num_channels, dtype=torch.float64)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_timm_loads_the_folder_and_computes_the_same_logits(fields, tmp_path):
    model = model_of(**fields)
    name = write_folder(tmp_path, to_timm(model, processor_of(model)))
    network = timm.create_model(name, pretrained=True).double().eval()
    pixels = pixels_for(model.config)
    torch.testing.assert_close(network(pixels), model.double()(pixels).logits, **CLOSE)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_timm_loads_an_encoder_and_computes_the_same_features(fields, tmp_path):
    model = model_of(tiny_encoder, **fields)
    name = write_folder(tmp_path, to_timm(model, processor_of(model)))
    network = timm.create_model(name, pretrained=True).double().eval()
    pixels = pixels_for(model.config)
    expected = model.double()(pixels).last_hidden_state
    torch.testing.assert_close(network.forward_features(pixels), expected, **CLOSE)


@pytest.mark.parametrize("make", [tiny_classifier, tiny_encoder])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_tensors_of_ours_to_timm_and_back_are_bitwise_equal(make, fields):
    model = model_of(make, **fields).to(torch.bfloat16)
    state_dict, config = to_timm(model, processor_of(model))
    back = from_timm(state_dict, source="export", **read_timm_config(config)).model.state_dict()
    assert back.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert bits(tensor).equal(bits(back[name])), name


def test_registers_without_positions_come_back_untouched_to_the_sign_of_zero():
    model = model_of(**REGISTERS)
    torch.nn.init.constant_(model.vit.embeddings.register_tokens, -0.0)
    state_dict, config = to_timm(model, processor_of(model))
    conversion = from_timm(state_dict, source="export", **read_timm_config(config))
    assert conversion.model.vit.embeddings.register_tokens.signbit().all()
    assert not conversion.notes


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_the_config_comes_back_from_timm(fields):
    model = model_of(**fields, position_interpolation="bicubic_antialias")
    state_dict, config = to_timm(model, processor_of(model))
    back = from_timm(state_dict, source="export", **read_timm_config(config)).model
    assert network_fields(back.config) == network_fields(model.config)


def network_fields(config):
    return {name: value for name, value in config.to_dict().items() if name != "dtype"}


def bits(tensor):
    return tensor.view(torch.int16)


@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("vit_tiny_patch16_224", {"depth": 2}),
        ("vit_tiny_patch16_224", {"depth": 2, "num_classes": 0, "qk_norm": True, "init_values": 1e-5}),
        ("deit_tiny_distilled_patch16_224", {"depth": 2}),
        ("deit3_small_patch16_224", {"depth": 1}),
        ("vit_base_patch16_siglip_224", {"depth": 1, "embed_dim": 64, "num_heads": 4}),
        ("vit_small_patch14_reg4_dinov2", {"depth": 1}),
        ("vit_giant_patch14_dinov2", {"depth": 1, "embed_dim": 48, "num_heads": 4}),
        ("vit_medium_patch16_reg4_gap_256", {"depth": 1}),
    ],
)
def test_timm_to_ours_and_back_is_bitwise(architecture, arguments):
    network = timm.create_model(architecture, **arguments).to(torch.bfloat16)
    randomize(network)
    state_dict = network.state_dict()
    conversion = from_timm(state_dict, source="weights", architecture=architecture, model_args=arguments)
    back, _ = to_timm(conversion.model, processor_of(conversion.model))
    assert back.keys() == state_dict.keys()
    for name, tensor in state_dict.items():
        assert bits(tensor).equal(bits(back[name])), name


def test_training_rates_reach_timm_and_come_back():
    model = model_of(**RATES)
    state_dict, config = to_timm(model, processor_of(model))
    back = from_timm(state_dict, source="export", **read_timm_config(config)).model.config
    assert {name: getattr(back, name) for name in RATES} == pytest.approx(RATES)


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({"hidden_size": 192, "num_attention_heads": 3, "image_size": 384, "patch_size": 16}, "vit_tiny_patch16_384"),
        ({"hidden_size": 192, "num_attention_heads": 3}, "vit_tiny_patch16_224"),
        ({}, "vit_base_patch16_224"),
        ({"use_distillation_token": True, "hidden_size": 384}, "deit_small_distilled_patch16_224"),
    ],
)
def test_the_architecture_is_the_nearest_that_timm_has(fields, architecture):
    model = model_of(**fields, num_hidden_layers=1)
    assert to_timm(model, processor_of(model))[1]["architecture"] == architecture


def test_class_names_reach_timm_and_come_back(tmp_path):
    names = {index: f"kind {index}" for index in range(7)}
    model = model_of(id2label=names)
    exported = to_timm(model, processor_of(model))
    network = timm.create_model(write_folder(tmp_path, exported), pretrained=True)
    assert network.pretrained_cfg["label_names"] == list(names.values())
    back = from_timm(exported[0], source="export", **read_timm_config(exported[1])).model
    assert back.config.id2label == names


@pytest.mark.parametrize(
    "fields",
    [
        {"resize_mode": "shorter", "crop_pct": 0.9, "resample": 3, "image_mean": [0.1, 0.2, 0.3]},
        {"resize_mode": "squash", "resample": 2, "image_std": [0.1, 0.2, 0.3]},
    ],
)
def test_preprocessing_reaches_timm_and_comes_back(fields, tmp_path):
    model = model_of()
    exported = to_timm(model, processor_of(model, **fields))
    network = timm.create_model(write_folder(tmp_path, exported), pretrained=True)
    data = timm.data.resolve_data_config(model=network)
    assert data["crop_mode"] == {"shorter": "center", "squash": "squash"}[fields["resize_mode"]]
    back = from_timm(exported[0], source="export", **read_timm_config(exported[1])).image_processor
    assert {name: getattr(back, name) for name in fields} == fields


# What does not fit


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stem_depths": [], "patch_size": 32}, r"stem_depths=\[\]"),
        ({"position_embedding_type": "learned_2d"}, "position_embedding_type='learned_2d'"),
        ({"position_embedding_type": "sincos_2d"}, "position_embedding_type='sincos_2d'"),
        ({"position_embedding_type": "relative"}, "position_embedding_type='relative'"),
        ({"position_embedding_type": "rope_2d"}, "position_embedding_type='rope_2d'"),
        ({"position_embedding_placement": "every_layer"}, "position_embedding_placement='every_layer'"),
        ({"pooling": "class_token_and_mean"}, "pooling='class_token_and_mean'"),
        ({"representation_size": 16}, "representation_size=16"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps=1e-12"),
        ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new'"),
        ({"problem_type": "multi_label_classification"}, "problem_type='multi_label_classification'"),
        ({**SWIGLU, "pooling": "attention"}, "mlp_type='swiglu'"),
        ({**SWIGLU, "layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05"),
        ({"use_distillation_token": True, "num_register_tokens": 1}, "num_register_tokens=1"),
        ({"use_distillation_token": True, "class_token_position": False}, "class_token_position=False"),
        ({"use_distillation_token": True, "layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05"),
    ],
)
def test_export_refuses_by_the_field_that_does_not_fit(fields, name):
    model = tiny_classifier(**fields)
    with pytest.raises(InputError, match=f"^{name} does not fit timm") as caught:
        to_timm(model, processor_of(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 48}, r"size=\{'height': 48, 'width': 48\} of the image processor does not fit"),
        ({"resize_mode": "pad"}, "resize_mode='pad' does not fit"),
        ({"resize_mode": "none"}, "resize_mode='none' does not fit"),
    ],
)
def test_export_refuses_preprocessing_that_timm_has_not(fields, message):
    model = tiny_classifier()
    with pytest.raises(InputError, match=message):
        to_timm(model, processor_of(model, **fields))


def test_export_refuses_a_head_that_timm_has_not():
    backbone = ViTScratchBackbone(tiny_encoder().config)
    with pytest.raises(InputError, match="ViTScratchBackbone is no class of timm's"):
        to_timm(backbone, processor_of(backbone))


def test_export_without_timm_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    model = tiny_classifier()
    with pytest.raises(EnvironmentFault, match="pip install timm"):
        to_timm(model, processor_of(model))

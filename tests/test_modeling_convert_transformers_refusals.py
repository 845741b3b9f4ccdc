"""What is no checkpoint that can be converted is refused in one line that names the file and the field."""

from pathlib import Path

import pytest
import torch
from fixtures_convert_transformers import (
    dinov2,
    dinov3,
    mae,
    registers,
    saved_peer,
    set_config,
    siglip,
    vit,
)
from safetensors.torch import load_file, save_file

from modeling_vit_scratch.convert_transformers_vit_scratch import from_transformers
from modeling_vit_scratch.errors_vit_scratch import InputError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "swin"}, "model_type='swin' is not converted; it must be one of vit, deit"),
        ({"architectures": ["ViTHybridModel"]}, r"architectures=\['ViTHybridModel'\] must name one of ViTModel"),
        ({"architectures": None}, r"architectures=\[\] must name one of ViTModel"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantization_config"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a whole number"),
        ({"qkv_bias": "no"}, "transformers cannot load it: .*qkv_bias"),
        ({"image_size": 4}, "of another shape: .*position_embeddings"),
        ({"num_attention_heads": 3}, r"of another shape: .*q_proj"),
        ({"hidden_size": 64}, "of another shape: .*cls_token"),
        ({"num_hidden_layers": 3}, r"missing: .*layers\.2\."),
        ({"num_hidden_layers": 1}, r"without a place: .*layers?\.1\."),
        ({"problem_type": "regression"}, "problem_type='regression' has no counterpart"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1.0 must be in \[0, 1\)"),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused_in_one_line(tmp_path, fields, message):
    saved_peer(tmp_path, "ViTForImageClassification", vit())
    set_config(tmp_path, **fields)
    with pytest.raises(InputError, match=message) as refusal:
        from_transformers(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    ("class_name", "config", "message"),
    [
        ("ViTModel", vit(head_dim=16), "head_dim=16 is not hidden_size / num_attention_heads = 32 / 4"),
        ("ViTForImageClassification", vit(id2label={}, num_labels=0), "num_labels=0"),
        ("ViTModel", vit(pooler_act="relu"), "pooler_act='relu' has no counterpart; it must be 'tanh'"),
        ("Dinov2Model", dinov2(image_size=[32, 48]), r"image_size=\[32, 48\] .* not square"),
        ("DINOv3ViTModel", dinov3(use_gated_mlp=True), "use_gated_mlp=True with hidden_act='gelu'"),
    ],
)
def test_a_network_without_counterpart_is_refused(tmp_path, class_name, config, message):
    saved_peer(tmp_path, class_name, config)
    with pytest.raises(InputError, match=message):
        from_transformers(tmp_path)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("encoder.layer.0.attention.attention.query.weight", False),
        ("embeddings.cls_token", False),
        ("layernorm.bias", False),
        ("pooler.dense.weight", True),
    ],
)
def test_a_missing_tensor_is_refused_by_name_unless_nothing_reads_it(tmp_path, name, kept):
    saved_peer(tmp_path, "ViTModel", vit())
    file = tmp_path / "model.safetensors"
    tensors = {
        key: tensor for key, tensor in load_file(file).items() if not (key == name or (kept and "pooler" in key))
    }
    save_file(tensors, file, metadata={"format": "pt"})
    if kept:
        assert from_transformers(tmp_path).model.config.representation_size is None
        return
    with pytest.raises(InputError, match="missing: "):
        from_transformers(tmp_path)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "layernorm2.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"without a place: layernorm2\.weight"):
        from_transformers(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no config\.json"):
        from_transformers(tmp_path)


def test_a_truncated_file_of_weights_is_refused(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        from_transformers(tmp_path)


def test_pickled_code_beside_the_config_is_not_run(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weights": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        from_transformers(tmp_path)


MANGLED = {
    "model_type": ([], {}, 3),
    "architectures": (5, "ViTModel", [["a"]], [], ["ViTModel", "ViTModel"]),
    "quantization_config": (0, "x", []),
    "image_size": ([], [32], [32, 0], 0, -32, "32", True),
    "patch_size": ([], [8], [8, 0], 0, "8", 8.5),
    "hidden_size": (0, -32, "x", [32]),
    "num_attention_heads": (0, -4, [4]),
    "num_hidden_layers": (0, "2"),
    "num_channels": (0, [3]),
    "intermediate_size": (0, "48"),
    "id2label": ("x", 3, ["a"], {"a": "b"}),
    "dtype": ("x", 3, "nn"),
    "torch_dtype": ("x", []),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in MANGLED for value in MANGLED[field]])
def test_a_mangled_field_is_refused_in_one_line_that_names_file_and_field(tmp_path, field, value):
    saved_peer(tmp_path, "ViTForImageClassification", vit())
    set_config(tmp_path, **{field: value})
    with pytest.raises(InputError, match=field) as refusal:
        from_transformers(tmp_path)
    assert "\n" not in str(refusal.value) and f"{tmp_path}" in str(refusal.value)
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize(
    ("class_name", "config", "fields"),
    [
        ("ViTMAEForPreTraining", mae(), {"decoder_num_attention_heads": 0}),
        ("Dinov2Model", dinov2(), {"mlp_ratio": "x"}),
        ("Dinov2WithRegistersModel", registers(), {"num_register_tokens": -1}),
        ("DINOv3ViTModel", dinov3(), {"rope_theta": "x"}),
        ("SiglipModel", siglip(), {"vision_config": []}),
        ("SiglipForImageClassification", siglip(), {"vision_config": {"model_type": "x"}}),
        ("SiglipForImageClassification", siglip(), {"vision_config": {"model_type": []}}),
        ("Dinov2Model", dinov2(), {"drop_path_rate": -1}),
        ("SiglipModel", siglip(), {"vision_config": {"patch_size": 0}}),
    ],
)
def test_mangled_fields_of_the_other_types_are_refused_in_one_line(tmp_path, class_name, config, fields):
    saved_peer(tmp_path, class_name, config)
    set_config(tmp_path, **fields)
    with pytest.raises(InputError, match="config\\.json") as refusal:
        from_transformers(tmp_path)
    assert "\n" not in str(refusal.value)


def test_what_transformers_says_of_a_config_is_cut_short(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    set_config(tmp_path, qkv_bias="x" * 3000)
    with pytest.raises(InputError, match="transformers cannot load it") as refusal:
        from_transformers(tmp_path)
    assert len(str(refusal.value)) < len(str(tmp_path)) + 300

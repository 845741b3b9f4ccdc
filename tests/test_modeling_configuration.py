"""The config: named variants, what is refused, what is saved."""

import ast
import inspect
import json
import traceback
from typing import Any

import pytest
from fixtures_modeling import tiny_config
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, validation_vit_scratch
from modeling_vit_scratch.errors_vit_scratch import InputError


def test_from_variant_lets_fields_override_the_shape():
    config = ViTScratchConfig.from_variant("Ti/16", num_hidden_layers=3, num_labels=5)
    assert (config.num_hidden_layers, config.num_labels, config.hidden_size) == (3, 5, 192)


@pytest.mark.parametrize("name", ["B", "b/16", "B/", "B/sixteen", "XXL/16", "/16", "", "R50+B/8", "R+B/16", "+B/16"])
def test_from_variant_refuses_a_name_it_does_not_know_and_lists_those_it_knows(name):
    with pytest.raises(InputError, match=r"Ti, S, B, L, H, g, G, So400m.*R\+Ti/16, R26\+S/32.*R50\+L/32"):
        ViTScratchConfig.from_variant(name)


def test_the_defaults_are_those_of_vit_b_16_in_the_official_code():
    config = ViTScratchConfig()
    assert config.to_dict() == ViTScratchConfig.from_variant("B/16").to_dict()
    assert (config.layer_norm_eps, config.hidden_act) == (1e-6, "gelu_pytorch_tanh")


# What is refused.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("num_hidden_layers", None),
        ("num_channels", True),
        ("qkv_bias", 1),
        ("layer_norm_eps", "1e-6"),
        ("image_size", (32, 64)),
        ("image_size", 32.0),
        ("patch_size", ["8", "8"]),
        ("hidden_act", None),
        ("pooling", "cls"),
        ("position_interpolation", "bilinear"),
        ("problem_type", "regression"),
        ("problem_type", None),
        ("representation_size", "16"),
        ("hidden_dropout_prob", "0.1"),
        ("mlp_type", "glu"),
        ("qk_norm", 1),
        ("layer_scale_init", "0.1"),
        ("drop_path_rate", None),
        ("patch_dropout_rate", "0.5"),
        ("position_embedding_type", "rope"),
        ("position_embedding_type", None),
        ("position_embedding_placement", "all"),
        ("class_token_position", 0),
        ("rope_theta", "100"),
        ("use_class_token", "yes"),
        ("use_distillation_token", None),
        ("num_register_tokens", 4.0),
        ("final_norm", None),
        ("stem_depths", [3, 4.0]),
        ("stem_depths", 3),
        ("stem_width_factor", 1.5),
        ("corruption_ratio", "0.5"),
        ("prediction_target", "mean"),
        ("image_mean", 0.5),
        ("image_std", ["0.5"] * 3),
        ("mask_ratio", None),
        ("norm_pix_loss", "true"),
        ("decoder_hidden_size", 512.0),
        ("apply_layernorm", 1),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(field, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        tiny_config(**{field: value})


def test_a_value_of_a_wrong_type_is_refused_at_assignment():
    with pytest.raises(StrictDataclassFieldValidationError, match="hidden_size"):
        tiny_config().hidden_size = "32"


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 30}, "hidden_size=30 must be a multiple of num_attention_heads=4"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
    ({"num_channels": 0}, "num_channels=0"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"intermediate_size": -1}, "intermediate_size=-1"),
    ({"representation_size": 0}, "representation_size=0 must be at least 1, or None"),
    ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1.0 must be in \[0, 1\)"),
    ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob=-0.1"),
    ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob=nan"),
    ({"hidden_act": "gelu_pytorch_tan"}, "near:.*gelu_pytorch_tanh"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be above 0"),
    ({"image_size": 30}, "height of 30 leaves 6 pixels; use 24"),
    ({"image_size": [32, 47]}, "width of 47 leaves 7 pixels; use 40"),
    ({"image_size": 4}, "use 8"),
    ({"image_size": 0}, "at least 1 pixel"),
    ({"image_size": [32, 32, 3]}, r"one number or \[height, width\]"),
    ({"patch_size": []}, r"one number or \[height, width\]"),
    ({"id2label": {0: "cat", 1: "cat"}}, r"\['cat'\] stand more than once"),
    ({"id2label": {0: "cat", 2: "dog"}}, r"number its classes 0\.\.1; got \[0, 2\]"),
    ({"id2label": {1: "cat", 2: "dog"}}, r"number its classes 0\.\.1"),
    ({"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 1, "dog": 0}}, "inverse of id2label"),
    ({"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0}}, "inverse of id2label"),
    ({"label2id": {"cat": 0, "dog": 0, "bird": 1}}, "inverse of id2label"),
    ({"layer_norm_eps": float("inf")}, "layer_norm_eps=inf must be a finite number"),
    ({"head_bias_init": float("nan")}, "head_bias_init=nan must be a finite number"),
    # Layers.
    ({"mlp_type": "swiglu"}, "mlp_type='swiglu' is gated by a SiLU: set hidden_act='silu', not 'gelu_pytorch_tanh'"),
    ({"layer_scale_init": 0.0}, "layer_scale_init=0.0 must be above 0, or None"),
    ({"layer_scale_init": -1}, "layer_scale_init=-1"),
    ({"drop_path_rate": 1.0}, r"drop_path_rate=1.0 must be in \[0, 1\)"),
    ({"drop_path_rate": 0.1, "num_hidden_layers": 1}, "drop_path_rate=0.1 rises from 0.*num_hidden_layers=1"),
    ({"patch_dropout_rate": 1}, r"patch_dropout_rate=1 must be in \[0, 1\)"),
    # The ResNet.
    ({"stem_width_factor": 0, "stem_depths": []}, "stem_width_factor=0 must be at least 1"),
    ({"stem_width_factor": 2}, "stem_width_factor=2 needs stem_depths"),
    ({"stem_depths": [3, 0]}, r"stem_depths=\[3, 0\] must be at least 1 unit a stage"),
    ({"stem_depths": [], "patch_size": 2}, "patch_size=2 must be a multiple of 4, the pixels behind one feature"),
    ({"stem_depths": [3, 4, 9]}, r"patch_size=8 must be a multiple of 16.*stem_depths=\[3, 4, 9\]"),
    ({"stem_depths": [1, 1], "patch_size": [8, 4]}, r"patch_size=\[8, 4\] must be a multiple of 8"),
    # Tokens and pooling.
    ({"num_register_tokens": -1}, "num_register_tokens=-1 must be at least 0"),
    ({"use_class_token": False}, "pooling='class_token' reads the class token, so use_class_token must not be False"),
    ({"pooling": "class_token_and_mean", "use_class_token": False}, "pooling='class_token_and_mean'.*use_class_token"),
    (
        {"pooling": "attention", "use_distillation_token": True},
        "use_distillation_token=True needs pooling='class_token'.*got pooling='attention'",
    ),
    ({"pooling": "mean", "use_distillation_token": True}, "use_distillation_token=True needs pooling='class_token'"),
    (
        {"use_distillation_token": True, "representation_size": 16},
        "use_distillation_token=True has no pre-logits layer: representation_size must be None, not 16",
    ),
    ({"final_norm": "after_pooling"}, "final_norm='after_pooling' is for pooling='mean'; got pooling='class_token'"),
    ({"final_norm": "after_pooling", "pooling": "attention"}, "final_norm='after_pooling' is for pooling='mean'"),
    # Positions.
    *(
        (
            {"position_embedding_type": kind, "position_embedding_placement": placement},
            f"position_embedding_placement='{placement}' is for positions that are added.*'{kind}'",
        )
        for kind in ("none", "relative", "rope_2d")
        for placement in ("every_layer", "every_layer_shared")
    ),
    (
        {"position_embedding_type": "sincos_2d", "position_embedding_placement": "every_layer"},
        "position_embedding_placement='every_layer' learns a table.*use 'every_layer_shared'",
    ),
    *(
        (
            {"position_embedding_type": kind, "class_token_position": False},
            f"class_token_position=False is for position_embedding_type='learned_1d'; got '{kind}'",
        )
        for kind in ("none", "learned_2d", "sincos_2d", "relative", "rope_2d")
    ),
    ({"rope_theta": 1.0, "position_embedding_type": "rope_2d"}, "rope_theta=1.0 must be above 1"),
    ({"rope_theta": 10000.0}, "rope_theta=10000.0 is for position_embedding_type='rope_2d'; 'learned_1d' leaves it"),
    (
        {"position_embedding_type": "learned_2d", "hidden_size": 33, "num_attention_heads": 3},
        "position_embedding_type='learned_2d' needs hidden_size to be a multiple of 2; got 33",
    ),
    (
        {"position_embedding_type": "sincos_2d", "hidden_size": 30, "num_attention_heads": 3},
        "position_embedding_type='sincos_2d' needs hidden_size to be a multiple of 4; got 30",
    ),
    (
        {"position_embedding_type": "rope_2d", "hidden_size": 36, "num_attention_heads": 4},
        "needs head_dim to be a multiple of 4; got 9 = hidden_size / num_attention_heads = 36 / 4",
    ),
    (
        {"position_embedding_type": "rope_2d", "hidden_size": 24, "num_attention_heads": 4},
        "needs head_dim to be a multiple of 4; got 6",
    ),
    # Self-supervised training.
    ({"corruption_ratio": 0.0}, r"corruption_ratio=0.0 must be in \(0, 1\]"),
    ({"corruption_ratio": 1.1}, "corruption_ratio=1.1"),
    ({"mask_ratio": 0}, r"mask_ratio=0 must be in \(0, 1\)"),
    ({"mask_ratio": 1.0}, "mask_ratio=1.0"),
    ({"mask_ratio": float("nan")}, "mask_ratio=nan"),
    ({"decoder_num_hidden_layers": 0}, "decoder_num_hidden_layers=0 must be at least 1"),
    ({"decoder_hidden_size": 48, "decoder_num_attention_heads": 5}, "decoder_hidden_size=48.*_attention_heads=5"),
    ({"decoder_hidden_size": 6, "decoder_num_attention_heads": 3}, "decoder_hidden_size=6 must be a multiple of 4"),
    ({"image_mean": [0.5] * 3}, "image_mean=.*and image_std=None go together"),
    ({"image_std": [0.5] * 3}, "image_mean=None and image_std=.* go together"),
    ({"image_mean": [123.7] * 3, "image_std": [58.4] * 3}, r"image_mean=\[123.7.*must be in \[0, 1\]"),
    ({"image_mean": [0.5] * 3, "image_std": [0.5, 0.0, 0.5]}, r"image_std=\[0.5, 0.0, 0.5\] must be above 0"),
]


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS)
def test_fields_that_contradict_each_other_are_refused_and_the_remedy_is_named(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message) as refusal:
        tiny_config(**fields)
    assert isinstance(refusal.value.__cause__, InputError)


def test_every_refusal_of_the_validation_has_a_case_above():
    source = inspect.getsource(validation_vit_scratch)
    refusals = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    raised = set()
    for fields, _ in CONTRADICTIONS:
        with pytest.raises(StrictDataclassError) as refusal:
            tiny_config(**fields)
        cause = refusal.value.__cause__
        if isinstance(cause, InputError):
            raised.add(traceback.extract_tb(cause.__traceback__)[-1].lineno)
    missing = [
        ast.unparse(node) for node in refusals if not raised & set(range(node.lineno, (node.end_lineno or 0) + 1))
    ]
    # Names of classes that are no text have a test below: some versions of transformers refuse them by their type.
    assert [text for text in missing if "id2label must name its classes by text" not in text] == []


def test_a_default_that_another_field_makes_idle_is_not_refused():
    fields = {"position_embedding_type": "none", "position_interpolation": "bicubic", "pooling": "mean"}
    assert tiny_config(**fields).position_embedding_type == "none"
    assert tiny_config(class_token_position=False, pooling="mean").num_prefix_positions == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 0}, "num_labels=0 must be a whole number of at least 1"),
        ({"num_labels": "7"}, "num_labels='7' must be a whole number"),
        ({"num_labels": 5, "id2label": {0: "cat", 1: "dog"}}, "num_labels=5 contradicts id2label of 2"),
        ({"num_labels": 1}, "problem_type='multi_label_classification'"),
        ({"id2label": {0: "cat"}}, "problem_type='multi_label_classification'"),
    ],
)
def test_a_number_of_classes_that_cannot_be_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        tiny_config(**fields)


def test_one_class_is_accepted_where_it_has_a_sigmoid_of_its_own():
    assert tiny_config(num_labels=1, problem_type="multi_label_classification").num_labels == 1


@pytest.mark.parametrize(
    ("field", "suggestion"),
    [("hidden_sise", "hidden_size"), ("num_layers", "num_labels|num_hidden_layers"), ("image_sizes", "image_size")],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(field, suggestion):
    with pytest.raises(InputError, match=rf"no field '{field}'; did you mean ({suggestion})\?"):
        tiny_config(**{field: 1})


def test_an_unknown_field_without_a_near_name_is_refused_with_the_list_of_fields():
    with pytest.raises(InputError, match=r"no field 'xyz'; the fields are .*hidden_size.*qkv_bias"):
        tiny_config(xyz=1)


def test_an_unknown_field_in_a_config_file_is_refused(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "hidden_sise": 64}))
    with pytest.raises(InputError, match="did you mean hidden_size"):
        ViTScratchConfig.from_pretrained(tmp_path)


# The grid.


@pytest.mark.parametrize(
    ("image_size", "patch_size", "grid_size"),
    [(32, 8, (4, 4)), ([32, 64], 8, (4, 8)), ([64, 32], 8, (8, 4)), (32, [4, 8], (8, 4)), ([24, 64], [8, 16], (3, 4))],
)
def test_the_grid_is_rows_by_columns(image_size, patch_size, grid_size):
    config = tiny_config(image_size=image_size, patch_size=patch_size)
    assert config.grid_size == grid_size
    assert config.num_patches == grid_size[0] * grid_size[1]


# Labels.


def test_label_keys_read_from_json_are_integers():
    config = tiny_config(id2label={"0": "cat", "1": "dog"}, label2id={"cat": "0", "dog": "1"})
    assert config.id2label == {0: "cat", 1: "dog"}
    assert config.label2id == {"cat": 0, "dog": 1}


def test_label2id_is_derived_from_id2label():
    assert tiny_config(id2label={0: "cat", 1: "dog", 2: "bird"}).label2id == {"cat": 0, "dog": 1, "bird": 2}


def test_id2label_is_derived_from_label2id():
    config = tiny_config(label2id={"cat": 0, "dog": 1, "bird": 2})
    assert config.id2label == {0: "cat", 1: "dog", 2: "bird"}


def test_labels_that_became_wrong_are_refused_at_save(tmp_path):
    config = tiny_config(id2label={0: "cat", 1: "dog"})
    config.id2label = {0: "cat", 1: "cat"}
    with pytest.raises(StrictDataclassClassValidationError, match="cat"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_other_labels_at_load_replace_both_maps(tmp_path):
    tiny_config(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    config = ViTScratchConfig.from_pretrained(tmp_path, id2label={"0": "a", "1": "b", "2": "c"})
    assert config.id2label == {0: "a", 1: "b", 2: "c"}
    assert config.label2id == {"a": 0, "b": 1, "c": 2}


def test_another_number_of_labels_at_load_replaces_both_maps(tmp_path):
    tiny_config(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    config = ViTScratchConfig.from_pretrained(tmp_path, num_labels=3)
    assert config.label2id == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}


def test_the_same_number_of_labels_at_load_keeps_their_names(tmp_path):
    tiny_config(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    assert ViTScratchConfig.from_pretrained(tmp_path, num_labels=2).id2label == {0: "cat", 1: "dog"}


def test_a_field_given_at_load_is_checked_like_any_other(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassClassValidationError, match="multiple of patch_size"):
        ViTScratchConfig.from_pretrained(tmp_path, image_size=30)


# Files.


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"image_size": [32, 64], "patch_size": [8, 16]},
        {"representation_size": 16, "head_bias_init": -10, "hidden_act": "gelu"},
        {"id2label": {0: "cat", 1: "dog"}, "problem_type": "multi_label_classification"},
        {"output_attentions": True, "output_hidden_states": True, "return_dict": False},
        {"pooling": "mean", "use_class_token": True, "num_register_tokens": 2, "final_norm": "after_pooling"},
        {"position_embedding_type": "rope_2d", "rope_theta": 10, "qk_norm": True, "layer_scale_init": 1},
        {"stem_depths": [], "stem_width_factor": 2},
        {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.2, 0.2], "prediction_target": "pixels"},
        {"out_features": ["stem", "stage2"], "apply_layernorm": False},
    ],
)
def test_a_config_survives_saving_and_loading(tmp_path, fields):
    config = tiny_config(**fields)
    config.save_pretrained(tmp_path)
    assert ViTScratchConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_the_saved_config_of_a_model_holds_its_fields_and_nothing_else(tmp_path):
    config = tiny_config()
    ViTScratchForImageClassification(config).config.save_pretrained(tmp_path)
    stored = set(json.loads((tmp_path / "config.json").read_text()))
    of_transformers = {"architectures", "dtype", "id2label", "label2id", "model_type", "transformers_version"}
    assert stored - of_transformers == {name.lstrip("_") for name in ViTScratchConfig.__annotations__}


def test_classes_named_by_numbers_are_refused():
    # By the type of the field, or by our own check, as transformers declares the field in this version.
    with pytest.raises(StrictDataclassError, match="id2label"):
        tiny_config(id2label={0: 7, 1: 8})

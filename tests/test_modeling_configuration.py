"""The config: named variants and their sizes, what is refused, what is saved, and that no field is without effect."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_config
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch.configuration_vit_scratch import VARIANTS
from modeling_vit_scratch.errors_vit_scratch import InputError

# Parameters of the official checkpoints: 1000 classes at 224 pixels, 21843 classes at 224, no head at 224, and 1000
# classes at 384 (518 for patch 14). The official repository's own tests state most of them.
PARAMETERS = {
    "Ti/16": (5_717_416, 9_740_115, 5_524_416, 5_790_376),
    "S/32": (22_878_952, 30_903_507, 22_493_952, 22_915_432),
    "S/16": (22_050_664, 30_075_219, 21_665_664, 22_196_584),
    "B/32": (88_224_232, 104_252_499, 87_455_232, 88_297_192),
    "B/16": (86_567_656, 102_595_923, 85_798_656, 86_859_496),
    "B/8": (86_576_872, 102_605_139, 85_807_872, 87_744_232),
    "L/32": (306_535_400, 327_899_475, 305_510_400, 306_632_680),
    "L/16": (304_326_632, 325_690_707, 303_301_632, 304_715_752),
    "H/14": (632_045_800, 658_745_683, 630_764_800, 633_470_440),
    "g/14": (1_012_611_432, 1_041_979_219, 1_011_202_432, 1_014_178_536),
    "G/14": (1_844_440_680, 1_879_144_275, 1_842_775_680, 1_846_292_712),
}
# The patches each size was released or used with.
PATCHES = {"Ti": [16], "S": [16, 32], "B": [8, 16, 32], "L": [16, 32], "H": [14], "g": [14], "G": [14]}
# Not an official ViT but big_vision's (D, L, MLP, heads); its models have no count that compares, so by formula.
FROM_BIG_VISION = {"So400m"}

PARAMETERS_MEAN_POOLING = {"S/16": 22_049_896, "S/32": 22_878_184, "B/16": 86_566_120, "B/32": 88_222_696}
PARAMETERS_PRE_LOGITS = {  # 21843 classes at 224 pixels
    "Ti/16": 9_777_171,
    "S/16": 30_223_059,
    "B/32": 104_843_091,
    "B/16": 103_186_515,
    "L/32": 328_949_075,
    "L/16": 326_740_307,
    "H/14": 660_385_363,
}


def count_parameters(name: str, *, head: bool = True, **fields: Any) -> int:
    config = ViTScratchConfig.from_variant(name, **fields)
    with torch.device("meta"):
        model = ViTScratchForImageClassification(config) if head else ViTScratchModel(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_no_variant_is_missing_from_the_table_of_parameter_counts():
    assert set(PARAMETERS) == {f"{size}/{patch}" for size, patches in PATCHES.items() for patch in patches}
    assert set(PATCHES) | FROM_BIG_VISION == set(VARIANTS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_with_1000_classes(name):
    assert count_parameters(name, num_labels=1000) == PARAMETERS[name][0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_with_21843_classes(name):
    assert count_parameters(name, num_labels=21843) == PARAMETERS[name][1]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_without_a_head(name):
    assert count_parameters(name, head=False) == PARAMETERS[name][2]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_at_the_higher_resolution(name):
    image_size = 518 if name.endswith("/14") else 384
    assert count_parameters(name, num_labels=1000, image_size=image_size) == PARAMETERS[name][3]


@pytest.mark.parametrize("name", PARAMETERS_MEAN_POOLING)
def test_mean_pooling_has_neither_class_token_nor_its_position(name):
    assert count_parameters(name, num_labels=1000, pooling="mean") == PARAMETERS_MEAN_POOLING[name]


@pytest.mark.parametrize("name", PARAMETERS_PRE_LOGITS)
def test_the_pre_logits_layer_adds_the_official_number_of_parameters(name):
    hidden_size = ViTScratchConfig.from_variant(name).hidden_size
    num_parameters = count_parameters(name, num_labels=21843, representation_size=hidden_size)
    assert num_parameters == PARAMETERS_PRE_LOGITS[name]


@pytest.mark.parametrize("num_labels", [1000, 21843])
def test_so400m_has_the_number_of_parameters_of_the_formula(num_labels):
    dim, depth, mlp, patch, num_patches = 1152, 27, 4304, 14, (224 // 14) ** 2
    embeddings = patch * patch * 3 * dim + dim + (num_patches + 1) * dim + dim
    layer = 4 * (dim * dim + dim) + 2 * dim * mlp + mlp + dim + 4 * dim
    expected = embeddings + depth * layer + 2 * dim + num_labels * (dim + 1)
    assert count_parameters("So400m/14", num_labels=num_labels) == expected


@pytest.mark.parametrize(
    ("size", "head_dim"),
    [("Ti", 64), ("S", 64), ("B", 64), ("L", 64), ("H", 80), ("g", 88), ("G", 104), ("So400m", 72)],
)
def test_a_variant_has_the_head_width_of_its_paper(size, head_dim):
    assert ViTScratchConfig.from_variant(f"{size}/16").head_dim == head_dim


def test_from_variant_lets_fields_override_the_shape():
    config = ViTScratchConfig.from_variant("Ti/16", num_hidden_layers=3, num_labels=5)
    assert (config.num_hidden_layers, config.num_labels, config.hidden_size) == (3, 5, 192)


@pytest.mark.parametrize("name", ["B", "b/16", "B/", "B/sixteen", "XXL/16", "/16", ""])
def test_from_variant_refuses_a_name_it_does_not_know_and_lists_the_sizes(name):
    with pytest.raises(InputError, match=r"Ti, S, B, L, H, g, G, So400m"):
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
    ],
)
def test_a_value_of_a_wrong_type_is_refused(field, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        tiny_config(**{field: value})


def test_a_value_of_a_wrong_type_is_refused_at_assignment():
    with pytest.raises(StrictDataclassFieldValidationError, match="hidden_size"):
        tiny_config().hidden_size = "32"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
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
    ],
)
def test_fields_that_contradict_each_other_are_refused_and_the_remedy_is_named(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message) as refusal:
        tiny_config(**fields)
    assert isinstance(refusal.value.__cause__, InputError)


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
    assert stored - of_transformers == set(ViTScratchConfig.__annotations__)


# No field is without effect: for each, two values and what they change.


def _model_output(config: ViTScratchConfig, training: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = ViTScratchModel(config).train(training)
    return model(random_pixels(height=64)).pooler_output.flatten().tolist()


def _weight_shape(name: str) -> Callable[[ViTScratchConfig], list[int] | None]:
    def shape(config: ViTScratchConfig) -> list[int] | None:
        weight = ViTScratchForImageClassification(config).state_dict().get(name)
        return None if weight is None else list(weight.shape)

    return shape


def _loss(config: ViTScratchConfig) -> float:
    return ViTScratchForImageClassification(config)(random_pixels(), labels=torch.tensor([0, 3])).loss.item()


def _num_attention_maps(config: ViTScratchConfig) -> int:
    return ViTScratchModel(config)(random_pixels(), output_attentions=True).attentions[0].shape[1]


def _num_hidden_states(config: ViTScratchConfig) -> int:
    return len(ViTScratchModel(config)(random_pixels(), output_hidden_states=True).hidden_states)


def _training_output(config: ViTScratchConfig) -> list[float]:
    return _model_output(config, training=True)


def _fresh_logits(config: ViTScratchConfig) -> list[float]:
    return ViTScratchForImageClassification(config)(random_pixels()).logits.flatten().tolist()


# field: (one value, another, what is observed, what is seen with the one, with the other); None: just that they differ
EFFECTS: dict[str, tuple[Any, Any, Callable[[ViTScratchConfig], Any], Any, Any]] = {
    "image_size": (32, 64, _weight_shape("vit.embeddings.position_embeddings"), [1, 17, 32], [1, 65, 32]),
    "patch_size": (
        8,
        [4, 16],
        _weight_shape("vit.embeddings.patch_embeddings.projection.weight"),
        [32, 3, 8, 8],
        [32, 3, 4, 16],
    ),
    "num_channels": (
        3,
        1,
        _weight_shape("vit.embeddings.patch_embeddings.projection.weight"),
        [32, 3, 8, 8],
        [32, 1, 8, 8],
    ),
    "hidden_size": (32, 64, _weight_shape("vit.layernorm.weight"), [32], [64]),
    "num_hidden_layers": (2, 3, _num_hidden_states, 3, 4),
    "num_attention_heads": (4, 8, _num_attention_maps, 4, 8),
    "intermediate_size": (64, 48, _weight_shape("vit.layers.1.mlp.fc1.weight"), [64, 32], [48, 32]),
    "hidden_act": ("gelu_pytorch_tanh", "relu", _model_output, None, None),
    "layer_norm_eps": (1e-6, 1e-2, _model_output, None, None),
    "hidden_dropout_prob": (0.0, 0.5, _training_output, None, None),
    "attention_probs_dropout_prob": (0.0, 0.5, _training_output, None, None),
    "qkv_bias": (True, False, _weight_shape("vit.layers.0.attention.k_proj.bias"), [32], None),
    "pooling": ("class_token", "mean", _weight_shape("vit.embeddings.cls_token"), [1, 1, 32], None),
    "representation_size": (None, 16, _weight_shape("classifier.weight"), [7, 32], [7, 16]),
    "head_bias_init": (0.0, -10, _fresh_logits, [0.0] * 14, [-10.0] * 14),
    "position_interpolation": ("bilinear_corners", "bicubic", _model_output, None, None),
    "problem_type": ("single_label_classification", "multi_label_classification", _loss, None, None),
}


def test_every_field_of_the_config_has_a_case_below():
    assert set(EFFECTS) == set(ViTScratchConfig.__annotations__)


@pytest.mark.parametrize("field", EFFECTS)
def test_two_values_of_a_field_give_two_behaviours(field):
    one, other, observe, seen_with_one, seen_with_other = EFFECTS[field]
    with_one, with_other = observe(tiny_config(**{field: one})), observe(tiny_config(**{field: other}))
    assert with_one != with_other
    assert seen_with_one is None or with_one == seen_with_one
    assert seen_with_other is None or with_other == seen_with_other


def test_classes_named_by_numbers_are_refused():
    # By the type of the field, or by our own check, as transformers declares the field in this version.
    with pytest.raises(StrictDataclassError, match="id2label"):
        tiny_config(id2label={0: 7, 1: 8})

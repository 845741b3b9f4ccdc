"""What timm's config.json says: sizes, objective and preprocessing come along, and what is mangled is refused."""

import logging

import pytest
import torch
from fixtures_modeling import random_pixels, randomize, tiny_classifier

from modeling_vit_scratch import ViTScratchImageProcessor
from modeling_vit_scratch.convert_proof_vit_scratch import prove
from modeling_vit_scratch.convert_timm_vit_scratch import from_timm, read_timm_config, to_timm
from modeling_vit_scratch.errors_vit_scratch import InputError

pytestmark = pytest.mark.peer
timm = pytest.importorskip("timm", reason="needs timm")

CLOSE = {"rtol": 0, "atol": 1e-12}  # in float64, where rounding is about 1e-15

PLAIN = "vit_base_patch16_224"
SMALL = {"embed_dim": 32, "depth": 1, "num_heads": 4, "mlp_ratio": 2}
ARGS = {**SMALL, "img_size": 32, "patch_size": 8}
IMAGENET_21K = 21_843


def converted(pretrained_cfg=None, architecture=PLAIN, num_classes=7, **arguments):
    """Returns timm's network in float64, every tensor drawn anew, and what becomes of it."""
    network = timm.create_model(architecture, num_classes=num_classes, **arguments)
    randomize(network)
    network = network.double().eval()
    conversion = from_timm(
        network.state_dict(),
        source="weights",
        architecture=architecture,
        pretrained_cfg=pretrained_cfg,
        model_args=arguments,
    )
    return network, conversion


# Images that are no multiple of the patch

WITH_REST = {"attention": "vit_so400m_patch14_siglip_384", "mean": "vit_so400m_patch14_siglip_gap_384"}


@pytest.mark.parametrize("architecture", WITH_REST.values(), ids=WITH_REST)
def test_pixels_that_fill_no_patch_are_dropped_as_timm_drops_them(architecture):
    network, conversion = converted(architecture=architecture, **SMALL)
    pixels = random_pixels(height=384, width=384, dtype=torch.float64)
    torch.testing.assert_close(conversion.model(pixels[..., :378, :378]).logits, network(pixels), **CLOSE)


@pytest.mark.parametrize("architecture", WITH_REST.values(), ids=WITH_REST)
def test_the_proof_runs_at_the_size_of_whole_patches(architecture):
    _, conversion = converted(architecture=architecture, **SMALL)
    differences = prove(conversion)
    assert {difference.image_size for difference in differences} == {(378, 378)}
    assert all(difference.is_equal for difference in differences)


def test_model_and_processor_are_sized_to_whole_patches_and_that_is_noted():
    _, conversion = converted(img_size=[20, 33], patch_size=8, **SMALL)
    assert conversion.model.config.image_size == [16, 32]
    assert conversion.image_processor.size == {"height": 16, "width": 32}
    [note] = conversion.notes
    assert note.startswith("timm resizes to 20x33 and drops what fills no patch of 8x8")


def test_a_state_dict_of_such_a_size_is_sized_to_whole_patches_too():
    network, _ = converted(img_size=20, patch_size=8, **SMALL)
    conversion = from_timm(network.state_dict(), source="weights", num_attention_heads=4, image_size=20)
    assert conversion.model.config.image_size == 16
    assert any("fills no patch" in note for note in conversion.notes)


def test_the_size_of_images_for_a_network_of_any_size_is_whole_patches():
    _, conversion = converted({"input_size": [3, 52, 52]}, **ARGS, dynamic_img_size=True)
    assert conversion.image_processor.size == {"height": 48, "width": 48}
    assert any("resizes to 52x52" in note for note in conversion.notes)


# The objective


def test_the_classes_of_imagenet_21k_are_sigmoids_as_from_npz():
    _, conversion = converted(num_classes=IMAGENET_21K, **ARGS)
    assert conversion.model.config.problem_type == "multi_label_classification"
    assert any("one sigmoid a class" in note for note in conversion.notes)


@pytest.mark.parametrize("num_labels", [1, IMAGENET_21K])
def test_an_objective_that_timms_classes_tell_is_exported(num_labels):
    model = tiny_classifier(num_labels=num_labels, problem_type="multi_label_classification")
    state_dict, config = to_timm(model, ViTScratchImageProcessor.from_config(model.config))
    back = from_timm(state_dict, source="export", **read_timm_config(config)).model
    assert back.config.problem_type == "multi_label_classification"


def test_an_objective_that_would_come_back_as_another_is_refused():
    model = tiny_classifier(num_labels=IMAGENET_21K, problem_type="single_label_classification")
    with pytest.raises(InputError, match=r"^problem_type='single_label_classification' does not fit timm"):
        to_timm(model, ViTScratchImageProcessor.from_config(model.config))


# What is lost


@pytest.mark.parametrize(
    ("fields", "is_lost"),
    [
        ({"position_interpolation": "bilinear_corners"}, True),
        ({"position_interpolation": "bicubic"}, True),
        ({"position_interpolation": "bicubic_antialias"}, False),
        ({"position_interpolation": "bicubic", "position_embedding_type": "none"}, False),
    ],
)
def test_export_warns_of_positions_that_timm_resamples_otherwise(fields, is_lost, caplog):
    model = tiny_classifier(**fields)
    with caplog.at_level(logging.WARNING):
        to_timm(model, ViTScratchImageProcessor.from_config(model.config))
    assert ("position_interpolation=" in caplog.text) is is_lost


def test_the_fold_of_register_positions_says_what_the_proof_cannot_see():
    _, conversion = converted(**ARGS, reg_tokens=3)
    assert "the original is compared with the same rounding" in conversion.notes[0]


# What is mangled


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label_names", 3),
        ("label_names", "cat"),
        ("mean", 3.5),
        ("mean", "x"),
        ("mean", [0.5, None, 0.5]),
        ("std", {"red": 1}),
        ("std", [0.5, 0.0, 0.5]),
        ("crop_pct", "all"),
        ("crop_pct", -1),
        ("crop_mode", [1]),
        ("interpolation", [1]),
        ("input_size", 224),
        ("input_size", [3, "a", 32]),
        ("input_size", [3, 0, 32]),
    ],
)
def test_a_mangled_field_of_the_preprocessing_is_refused_by_its_name(field, value):
    with pytest.raises(InputError, match=f"^weights: .*{field}") as caught:
        converted({field: value}, **ARGS, dynamic_img_size=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "field", ["label_names", "mean", "std", "crop_pct", "crop_mode", "interpolation", "input_size"]
)
def test_a_null_is_timms_default(field):
    _, conversion = converted({field: None}, **ARGS)
    assert conversion.image_processor.size == {"height": 32, "width": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": 5}, "architecture=5 must be a name"),
        ({"architecture": PLAIN, "model_args": "x"}, "model_args='x' must be a dictionary"),
        ({"architecture": PLAIN, "model_args": [1]}, r"model_args=\[1\] must be a dictionary"),
        ({"architecture": PLAIN, "pretrained_cfg": "x"}, "pretrained_cfg='x' must be a dictionary"),
        ({"architecture": PLAIN, "pretrained_cfg": 5, "labels": ["a"]}, "pretrained_cfg=5 must be a dictionary"),
        ({"architecture": PLAIN, "model_args": {**ARGS, "depth": 0}}, "depth=0"),
        ({"architecture": PLAIN, "model_args": {**ARGS, "img_size": 0}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "img_size": 4}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "patch_size": 0}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "patch_size": []}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "num_heads": 0}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "embed_dim": 0}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "embed_dim": "x"}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "in_chans": 0}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "mlp_ratio": 0}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "drop_path_rate": "x"}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "global_pool": [1]}}, ""),
        ({"architecture": PLAIN, "model_args": {**ARGS, "init_values": "x"}}, ""),
    ],
)
def test_a_mangled_config_is_refused_in_one_line_that_names_the_source(config, message):
    state = timm.create_model(PLAIN, num_classes=7, **ARGS).state_dict()
    with pytest.raises(InputError, match=f"^weights: .*{message}|^weights does not hold {message}") as caught:
        from_timm(state, source="weights", **read_timm_config(config))
    assert "\n" not in str(caught.value)


def test_a_config_whose_preprocessing_is_null_is_timms_default():
    read = read_timm_config({"architecture": PLAIN, "pretrained_cfg": None, "model_args": None})
    assert (read["architecture"], read["model_args"]) == (PLAIN, {})
    assert read["pretrained_cfg"] == {}


@pytest.mark.parametrize("model_args", ["x" * 5000, {"embed_dim": "x" * 5000}])
def test_long_values_are_cut_in_messages(model_args):
    with pytest.raises(InputError, match="model_args=") as caught:
        from_timm({}, source="weights", architecture=PLAIN, model_args=model_args)
    assert len(str(caught.value)) < 600

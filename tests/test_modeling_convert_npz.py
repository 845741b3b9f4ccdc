"""Google's npz checkpoints in and out, against the official code's logits and an independent forward in NumPy."""

import numpy as np
import pytest
import torch
from fixtures_modeling import random_pixels, tiny_config
from fixtures_npz import (
    POSITIONS,
    below,
    big_vision,
    by_formula,
    golden_pixels,
    linen_arrays,
    linen_shapes,
    released,
    scanned,
    worst,
    write_npz,
)

from modeling_vit_scratch import ViTScratchModel
from modeling_vit_scratch.convert_npz_reference_vit_scratch import reference_outputs
from modeling_vit_scratch.convert_npz_vit_scratch import from_npz
from modeling_vit_scratch.convert_proof_vit_scratch import prove
from modeling_vit_scratch.errors_vit_scratch import InputError

BLOCK = "Transformer/encoderblock_1"
QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"

# Logits of the official Flax code (google-research/vision_transformer at c6de1e5), to six digits.
GOLDEN = {  # fields of the file, parameters, tensors, logits of image 0 and 1, tolerance
    "A": (
        {},
        (24_135, 40),
        [
            [0.105306, 0.278099, 0.276815, 0.111880, -0.098551, -0.221473, -0.202879],
            [0.101823, 0.281928, 0.286155, 0.122338, -0.091893, -0.221747, -0.209956],
        ],
        2e-6,
    ),
    "B pre-logits": (
        {"representation_size": 16},
        (24_551, 42),
        [
            [0.068393, 0.205687, 0.202961, 0.071318, -0.086743, -0.162849, -0.125011],
            [0.068666, 0.207920, 0.206103, 0.073892, -0.085949, -0.164207, -0.127883],
        ],
        2e-6,
    ),
    "C mean": (
        {"pooling": "mean", "num_positions": 16},
        (24_071, 39),
        [
            [-0.110513, 0.041334, 0.160431, 0.160793, 0.052070, -0.074019, -0.124137],
            [-0.098197, 0.019838, 0.115233, 0.113150, 0.024390, -0.068718, -0.088348],
        ],
        2e-6,
    ),
    # The ResNet of D amplifies rounding: the official code's own float32 lies 4e-5 from float64, in which we compute.
    "D hybrid": (
        {"stem_depths": [1, 2], "patch": 1},
        (778_375, 76),
        [
            [-0.152726, -0.056942, 0.083037, 0.158540, 0.114592, -0.006331, -0.104333],
            [-0.159848, -0.066132, 0.076101, 0.157120, 0.119356, 0.002376, -0.095777],
        ],
        5e-5,
    ),
    "E root alone": (
        {"stem_depths": [], "patch": 4, "num_positions": 5},
        (59_911, 43),
        [
            [-0.055594, -0.261103, -0.302651, -0.164505, 0.050216, 0.203107, 0.219976],
            [-0.066953, -0.254990, -0.281942, -0.138940, 0.068614, 0.205684, 0.205521],
        ],
        5e-5,
    ),
}


def convert(folder, arrays, **options):
    return from_npz(write_npz(folder, arrays), **options)


def assert_same_tensors(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("case", GOLDEN)
def test_logits_of_a_converted_file_are_those_of_the_official_code(tmp_path, case):
    fields, counts, logits, tolerance = GOLDEN[case]
    model = convert(tmp_path, linen_arrays(**fields)).model.double()
    with torch.no_grad():
        found = model(golden_pixels()).logits
    torch.testing.assert_close(found, torch.tensor(logits).double(), rtol=0, atol=tolerance)
    parameters = list(model.parameters())
    assert (sum(parameter.numel() for parameter in parameters), len(parameters)) == counts


@pytest.mark.parametrize("case", GOLDEN)
def test_logits_of_the_reference_are_those_of_the_official_code(case):
    fields, _, logits, tolerance = GOLDEN[case]
    arrays = by_formula(linen_shapes(**fields), dtype=np.float64)
    pixels = golden_pixels().permute(0, 2, 3, 1).numpy()
    found = reference_outputs(arrays, pixels, grid_size=(2, 2) if "E" in case else (4, 4))["logits"]
    np.testing.assert_allclose(found, logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", GOLDEN)
def test_a_conversion_is_proven_on_every_output(tmp_path, case):
    found = prove(convert(tmp_path, linen_arrays(**GOLDEN[case][0])))
    assert {difference.output for difference in found} == {"last_hidden_state", "pooler_output", "logits"}
    assert all(difference.is_equal for difference in found)


NAMINGS = {
    "released": released,
    "beside a Flax optimizer": lambda arrays: below("opt/target/", released(arrays)),
    "beside an Optax optimizer": lambda arrays: below("params/", arrays),
    "image tower": lambda arrays: below("params/img/", arrays),
    "scanned": scanned,
    "scanned image tower": lambda arrays: below("params/img/", scanned(arrays)),
    "positions of 2022": lambda arrays: {name.replace("posembed_input/", ""): arrays[name] for name in arrays},
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_gives_the_same_tensors_and_the_same_reference(tmp_path, naming):
    arrays = linen_arrays(representation_size=16)
    plain = from_npz(write_npz(tmp_path, arrays))
    renamed = from_npz(write_npz(tmp_path, NAMINGS[naming](arrays), "renamed.npz"))
    assert_same_tensors(renamed.model, plain.model)
    pixels = random_pixels(dtype=torch.float64)
    assert torch.equal(renamed.reference(pixels)["logits"], plain.reference(pixels)["logits"])


def test_group_norms_of_the_old_shape_are_read(tmp_path):
    arrays = linen_arrays(stem_depths=[1], patch=2)
    old = {name: array.reshape(1, 1, 1, -1) if "gn" in name else array for name, array in arrays.items()}
    conversion = from_npz(write_npz(tmp_path, old, "old.npz"))
    assert_same_tensors(conversion.model, convert(tmp_path, arrays).model)
    assert worst(conversion) < 1


def test_big_vision_adds_positions_to_patches_only(tmp_path):
    conversion = convert(tmp_path, below("params/", big_vision(linen_arrays())))
    assert conversion.model.config.class_token_position is False
    assert worst(conversion) < 1


def test_the_class_token_of_big_vision_holds_its_position(tmp_path):
    """As big_vision loads old files: the class token's position is added to the token, which changes no output."""
    arrays = linen_arrays()
    moved = big_vision(arrays) | {"cls": arrays["cls"].astype(np.float64) + arrays[POSITIONS][:, :1]}
    old = from_npz(write_npz(tmp_path, arrays)).model.double()
    new = from_npz(write_npz(tmp_path, moved, "moved.npz")).model.double()
    pixels = random_pixels(dtype=torch.float64)
    torch.testing.assert_close(new(pixels).logits, old(pixels).logits, rtol=0, atol=1e-14)


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_big_vision_models_without_a_class_token_are_read(tmp_path, pooling):
    arrays = big_vision(linen_arrays(pooling=pooling, num_positions=16, representation_size=16))
    conversion = convert(tmp_path, below("params/img/", scanned(arrays)))
    assert (conversion.model.config.pooling, conversion.model.config.use_class_token) == (pooling, False)
    assert worst(conversion) < 1


def test_a_file_without_positions_has_the_fixed_ones_of_big_vision(tmp_path):
    arrays = big_vision(linen_arrays(pooling="mean", num_positions=16))
    del arrays["pos_embedding"]
    conversion = convert(tmp_path, below("params/", arrays))
    assert conversion.model.config.position_embedding_type == "sincos_2d"
    assert conversion.model.config.image_size == 224
    conversion.image_sizes = [(32, 40)]  # fixed positions are as good for another, and quicker
    assert worst(conversion) < 1
    assert any("sincos_2d" in note for note in conversion.notes)
    assert any("224" in note for note in conversion.notes)


def test_bfloat16_as_big_vision_stores_it_is_read(tmp_path):
    values = {name: torch.from_numpy(array).bfloat16() for name, array in linen_arrays().items()}
    stored = {name: tensor.view(torch.int16).numpy().view("V2") for name, tensor in values.items()}
    conversion = convert(tmp_path, stored)
    assert conversion.model.classifier.weight.dtype == torch.bfloat16
    assert torch.equal(conversion.model.classifier.weight, values["head/kernel"].T)
    assert worst(conversion) < 1


def test_a_file_without_a_head_is_the_encoder(tmp_path):
    arrays = {name: array for name, array in linen_arrays(representation_size=16).items() if "head" not in name}
    conversion = convert(tmp_path, arrays)
    assert type(conversion.model) is ViTScratchModel
    assert conversion.model.config.representation_size == 16
    assert worst(conversion) < 1


def test_shapes_and_the_official_choices_make_the_config(tmp_path):
    conversion = convert(tmp_path, linen_arrays(stem_depths=[1, 2], patch=1))
    config = conversion.model.config
    expected = tiny_config(stem_depths=[1, 2], patch_size=8)
    assert config.to_diff_dict() | {"dtype": "float32"} == expected.to_diff_dict() | {"dtype": "float32"}
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu_pytorch_tanh", 1e-6)
    assert config.position_interpolation == "bilinear_corners"


def test_the_image_processor_squashes_to_pixels_of_minus_one_to_one(tmp_path):
    processor = convert(tmp_path, linen_arrays()).image_processor
    assert (processor.size, processor.resize_mode, processor.resample) == ({"height": 32, "width": 32}, "squash", 2)
    image = np.zeros((32, 32, 3), np.uint8)
    image[:16] = 255
    assert processor(image)["pixel_values"].unique().tolist() == [-1, 1]


def test_a_grid_that_is_not_square_comes_from_the_image_size(tmp_path):
    conversion = convert(tmp_path, linen_arrays(num_positions=9), image_size=[16, 32])
    assert conversion.model.config.grid_size == (2, 4)
    assert worst(conversion) < 1


@pytest.mark.parametrize("image_size", [None, 32, [32, 16, 8]])
def test_positions_that_fit_no_grid_are_refused(tmp_path, image_size):
    with pytest.raises(InputError, match=r"image_size=\[height, width\]|must be one number or \[height, width\]"):
        convert(tmp_path, linen_arrays(num_positions=11), image_size=image_size)


def test_a_head_of_zeros_is_noted(tmp_path):
    arrays = linen_arrays()
    zeroed = arrays | {name: np.zeros_like(arrays[name]) for name in ("head/kernel", "head/bias")}
    conversion = convert(tmp_path, zeroed)
    assert any("predictions mean nothing" in note for note in conversion.notes)
    assert worst(conversion) < 1
    assert not convert(tmp_path, arrays).notes


def test_imagenet_21k_is_a_problem_of_many_labels_and_noted(tmp_path):
    arrays = linen_arrays() | {
        "head/kernel": np.full((32, 21_843), 0.1, np.float32),
        "head/bias": np.zeros(21_843, np.float32),
    }
    conversion = convert(tmp_path, arrays)
    assert conversion.model.config.problem_type == "multi_label_classification"
    assert [note for note in conversion.notes if "21843" in note and "multi_label_classification" in note]


def test_the_optimizer_and_the_text_tower_are_left_out_and_noted(tmp_path):
    number = np.ones(1, np.float32)
    arrays = below("params/img/", linen_arrays()) | {"params/txt/head/bias": number, "params/t": number}
    conversion = convert(tmp_path, arrays | {"opt/0/mu": number, "chrono/steps": number})
    assert [note.split(":")[0] for note in conversion.notes] == [
        "left out the training state",
        "left out the text tower",
    ]


ONE = np.ones(1, np.float32)
ODD = {  # what is done to the file: arrays that are put in (None: taken out), what the message must say
    "missing": ({f"{BLOCK}/MlpBlock_0/Dense_1/bias": None}, "missing: .*encoderblock_1/MlpBlock_3/Dense_1/bias"),
    "extra": ({"Transformer/scale": ONE}, "without a place: Transformer/scale"),
    "two": ({"opt/target/embedding/kernel": ONE}, "holds 2 Vision Transformers"),
    "none": ({"embedding/kernel": None}, "holds 0 Vision Transformers"),
    "shape": ({"head/bias": ONE}, r"head/bias \(1,\) instead of \(7,\)"),
    "axes": ({"head/kernel": ONE}, r"head/kernel is \(1,\), but its axes must be \(width, classes\)"),
    "twice": ({f"{BLOCK}/MlpBlock_3/Dense_1/bias": ONE}, "is there twice"),
    "narrow heads": ({QUERY: np.ones((32, 4, 4))}, "4 heads of 4 are not as wide together as the network, 32"),
    "no layer": ({QUERY: None}, "has no array Transformer/encoderblock_0/"),
    "text": ({"head/bias": np.array(["a"] * 7)}, "head/bias is an array of <U1"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_file_that_is_not_such_a_network_is_refused_by_name(tmp_path, odd):
    changes, message = ODD[odd]
    arrays = {name: array for name, array in (linen_arrays() | changes).items() if array is not None}
    with pytest.raises(InputError, match=message) as refusal:
        convert(tmp_path, arrays)
    assert "\n" not in str(refusal.value) and "network.npz" in str(refusal.value)


def test_arrays_beside_the_network_are_refused_by_name(tmp_path):
    arrays = below("params/img/", linen_arrays()) | {"params/llm/kernel": np.ones(1)}
    with pytest.raises(InputError, match="params/llm/kernel beside the network"):
        convert(tmp_path, arrays)


def test_scanned_layers_of_different_numbers_are_refused(tmp_path):
    arrays = scanned(linen_arrays())
    name = "Transformer/encoderblock/LayerNorm_0/scale"
    with pytest.raises(InputError, match="different numbers of layers"):
        convert(tmp_path, arrays | {name: arrays[name][:1]})

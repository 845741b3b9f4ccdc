"""Image processors of transformers as ours and back, compared by the pixel values of an image like a photo."""

import json

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from fixtures_modeling import tiny_config

from modeling_vit_scratch import ViTScratchImageProcessor
from modeling_vit_scratch.convert_transformers_processors_vit_scratch import (
    from_transformers_processor,
    to_vit_processor,
)
from modeling_vit_scratch.errors_vit_scratch import InputError

# One rounding of float32 of values up to 3, where a scale is folded into mean and std.
FOLDED = {"rtol": 0, "atol": 1e-6}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def photo(width: int = 150, height: int = 110) -> PIL.Image.Image:
    """Returns an RGB image of smooth shading, edges and grain."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    shading = 120 + 70 * np.sin(rows / 17) + 50 * np.cos(columns / 23)
    edges = 60 * ((rows - 50) ** 2 + (columns - 70) ** 2 < 900)
    grain = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    channels = np.stack((shading + edges, shading - edges, 255 - shading), axis=2)
    return PIL.Image.fromarray(np.clip(channels + grain, 0, 255).astype(np.uint8))


def converted(folder, theirs, **config_fields):
    theirs.save_pretrained(folder)
    return from_transformers_processor(folder, "vit", tiny_config(**{"image_size": 32, **config_fields}))


def pixels_of(processor, image):
    return processor(image, return_tensors="pt").pixel_values


SQUARE = {"height": 32, "width": 32}
SAME = {
    "ViT": transformers.ViTImageProcessor(size=SQUARE),
    "ViT without square": transformers.ViTImageProcessor(size={"height": 32, "width": 48}),
    "ViT bicubic": transformers.ViTImageProcessor(size=SQUARE, resample=3, **IMAGENET),
    "ViT nearest": transformers.ViTImageProcessor(size=SQUARE, resample=0),
    "ViT as it is": transformers.ViTImageProcessor(do_resize=False),
    "ViT with a crop that takes all": transformers.ViTImageProcessor(
        size=SQUARE, do_center_crop=True, crop_size=SQUARE
    ),
    "SigLIP": transformers.SiglipImageProcessor(size=SQUARE),
    "Bit": transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size=SQUARE),
    "Bit without margin": transformers.BitImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE),
    "CLIP": transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE),
}


@pytest.mark.parametrize("case", SAME)
def test_pixel_values_equal_those_of_transformers_bit_by_bit(tmp_path, case):
    theirs = SAME[case]
    ours, _ = converted(tmp_path, theirs)
    image = photo(224, 112)  # multiples of the patch, and an even number of pixels goes at every crop
    assert torch.equal(pixels_of(ours, image), pixels_of(theirs, image))


@pytest.mark.parametrize(
    "fields",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
    ],
)
def test_scales_that_are_not_those_of_ours_are_folded_into_mean_and_deviation(tmp_path, fields):
    theirs = transformers.ViTImageProcessor(size=SQUARE, **fields)
    ours, _ = converted(tmp_path, theirs)
    expected = pixels_of(theirs, photo()).to(torch.float32)
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(pixels_of(ours, photo()) / scale, expected / scale, **FOLDED)


def test_dinov3_resizes_in_floats_so_that_ours_is_up_to_a_grey_level_away(tmp_path):
    theirs = transformers.DINOv3ViTImageProcessor(size=SQUARE)
    ours, notes = converted(tmp_path, theirs)
    a_level = 1 / 255 / min(theirs.image_std)  # half of one rounds each of the two passes of an 8-bit resize
    expected = pixels_of(theirs, photo())
    torch.testing.assert_close(pixels_of(ours, photo()), expected, rtol=0, atol=a_level)
    assert any("a grey level away" in note for note in notes)


def test_deit_of_a_square_image_equals_transformers_bit_by_bit(tmp_path):
    theirs = transformers.DeiTImageProcessor(size={"height": 36, "width": 36}, crop_size=SQUARE, **IMAGENET)
    ours, notes = converted(tmp_path, theirs)
    image = photo(120, 120)
    assert torch.equal(pixels_of(ours, image), pixels_of(theirs, image))
    assert any("only square images come out the same" in note for note in notes)


def test_a_centre_crop_of_an_odd_margin_sits_at_most_one_pixel_off(tmp_path):
    theirs = transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size=SQUARE)
    ours, notes = converted(tmp_path, theirs)
    image = photo(90, 72)  # 45 x 36 after resizing, of which 13 / 2 columns go on the left
    wider = transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 33})
    expected = pixels_of(wider, image)
    assert torch.equal(pixels_of(theirs, image), expected[..., :32])
    assert any(torch.equal(pixels_of(ours, image), expected[..., left : left + 32]) for left in (0, 1))
    assert any("one pixel off" in note for note in notes)


@pytest.mark.parametrize(("crop", "edge"), [(224, 256), (224, 400), (384, 384), (336, 384), (32, 33), (98, 111)])
def test_every_pair_of_shortest_edge_and_crop_covers_exactly_that_edge(tmp_path, crop, edge):
    theirs = transformers.BitImageProcessor(size={"shortest_edge": edge}, crop_size={"height": crop, "width": crop})
    ours, _ = converted(tmp_path, theirs, image_size=crop, patch_size=1)
    assert int(crop / ours.crop_pct) == edge


@pytest.mark.parametrize("field", ["feature_extractor_type", "image_processor_type"])
@pytest.mark.parametrize("name", ["ViTFeatureExtractor", "ViTImageProcessor", "ViTImageProcessorFast"])
def test_a_file_of_an_old_feature_extractor_is_read(tmp_path, field, name):
    stored = {field: name, "do_resize": True, "size": 32, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, "do_normalize": True, **IMAGENET}))
    ours, notes = from_transformers_processor(tmp_path, "vit", tiny_config())
    theirs = transformers.ViTImageProcessor(size=SQUARE, **IMAGENET)
    assert torch.equal(pixels_of(ours, photo()), pixels_of(theirs, photo()))
    assert notes == []


def test_a_file_that_names_no_type_is_of_that_of_the_model(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 36}, "crop_size": 32}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2"}))
    ours, _ = from_transformers_processor(tmp_path, "dinov2", tiny_config())
    theirs = transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size=SQUARE)
    assert torch.equal(pixels_of(ours, photo(224, 112)), pixels_of(theirs, photo(224, 112)))


@pytest.mark.parametrize(
    ("theirs", "size"),
    [
        (transformers.SiglipImageProcessor(size={"height": 35, "width": 35}), "35x35"),
        (transformers.ViTImageProcessor(size={"height": 32, "width": 39}), "32x39"),
        (
            transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 35, "width": 35}),
            "35x35",
        ),
    ],
)
def test_a_size_that_patches_do_not_fill_becomes_the_size_they_fill(tmp_path, theirs, size):
    ours, notes = converted(tmp_path, theirs)
    assert ours.size == SQUARE
    assert pixels_of(ours, photo()).shape == (1, 3, 32, 32)
    assert f"images are resized to 32x32 here; the source resizes to {size} and drops what fills no patch" in notes


@pytest.mark.parametrize(
    ("model_type", "theirs"),
    [
        ("vit", transformers.ViTImageProcessor(size=SQUARE)),
        ("siglip_vision_model", transformers.SiglipImageProcessor(size=SQUARE)),
        ("vit_mae", transformers.ViTImageProcessor(size=SQUARE, **IMAGENET)),
        ("dinov2", transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size=SQUARE, **IMAGENET)),
    ],
)
def test_without_a_file_the_preprocessing_of_the_published_checkpoints_is_assumed(tmp_path, model_type, theirs):
    ours, notes = from_transformers_processor(tmp_path, model_type, tiny_config())
    image = photo(224, 112)
    assert torch.equal(pixels_of(ours, image), pixels_of(theirs, image))
    assert notes == [
        f"there is no preprocessor_config.json: that of the published {model_type} checkpoints is assumed"
    ]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (transformers.ViTImageProcessor(size=SQUARE, resample=1), r"resample=1 must be one of \(0, 2, 3\)"),
        (transformers.ViTImageProcessor(size=SQUARE, do_pad=True), "do_pad=true has no counterpart"),
        (transformers.ViTImageProcessor(size={"shortest_edge": 32}), r"\{'shortest_edge': 32\} without a centre crop"),
        (transformers.ViTImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}), "longest_edge"),
        (
            transformers.ViTImageProcessor(do_resize=False, do_center_crop=True, crop_size=SQUARE),
            "do_center_crop=true with do_resize=false",
        ),
        (
            transformers.BitImageProcessor(size={"shortest_edge": 24}, crop_size=SQUARE),
            "crop_size=32x32 out of 24x24 has no counterpart",
        ),
        (
            transformers.BitImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 24}),
            "crop_size=32x24 out of 36x36 has no counterpart",
        ),
        (transformers.ViTImageProcessor(size={"height": 32, "width": 7}), "size=32x7 holds no patch of 8 pixels"),
        (transformers.ConvNextImageProcessor(), "image_processor_type='ConvNextImageProcessor' is not converted"),
    ],
)
def test_preprocessing_without_counterpart_is_refused_in_one_line(tmp_path, theirs, message):
    with pytest.raises(InputError, match=message) as refusal:
        converted(tmp_path, theirs)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_statistics_of_other_channels_than_the_models_are_refused(tmp_path):
    theirs = transformers.ViTImageProcessor(size=SQUARE)
    with pytest.raises(InputError, match=r"preprocessor_config\.json: image_mean=.* \(num_channels=1\)"):
        converted(tmp_path, theirs, num_channels=1)


def test_without_a_file_one_channel_gets_no_statistics_of_rgb(tmp_path):
    ours, _ = from_transformers_processor(tmp_path, "dinov2", tiny_config(num_channels=1))
    assert (ours.image_mean, ours.image_std) == ([0.5], [0.5])


MANGLED = {
    "image_processor_type": (5, ["ViTImageProcessor"], "NoSuchProcessor", "PreTrainedModel"),
    "rescale_factor": (None, 0, "x", [1]),
    "crop_size": (0, {"height": 0, "width": 32}, "x", [[]]),
    "size": (0, {"height": 32}, {"height": "a", "width": "b"}, {"shortest_edge": 0}, [], "x"),
    "resample": ("x", 7, []),
    "image_mean": ("x", [1], {}, ["a", "b", "c"]),
    "image_std": ("x", 0, [1], ["a", "b", "c"]),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in MANGLED for value in MANGLED[field]])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_mangled_field_is_refused_in_one_line_that_names_file_and_field(tmp_path, field, value, scaled):
    theirs = transformers.CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=SQUARE).to_dict()
    stored = {**theirs, **({} if scaled else {"rescale_factor": 1.0}), field: value}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match=field) as refusal:
        from_transformers_processor(tmp_path, "vit", tiny_config())
    assert "\n" not in str(refusal.value) and f"{tmp_path}" in str(refusal.value)
    assert "preprocessor_config.json" in str(refusal.value)
    assert len(str(refusal.value)) < len(str(tmp_path)) + 400


@pytest.mark.parametrize("text", ['{"size": 32}', '{"image_processor_type": null}', '{"image_processor": 3}'])
def test_a_file_that_is_no_processor_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(InputError, match=r"preprocessor_config\.json cannot be read as an image processor") as refusal:
        from_transformers_processor(tmp_path, "vit", tiny_config())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_object_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(InputError, match=r"its preprocessor_config\.json (is no JSON|holds no fields)") as refusal:
        from_transformers_processor(tmp_path, "vit", tiny_config())
    assert "\n" not in str(refusal.value)


# Ours as transformers'


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"size": {"height": 32, "width": 48}, "resample": 3, **IMAGENET},
        {"resize_mode": "shorter", "crop_pct": 0.8},
        {"resize_mode": "shorter", "crop_pct": 1.0},
        {"resize_mode": "none"},
    ],
)
def test_the_exported_processor_gives_the_same_pixel_values_and_comes_back_as_it_was(tmp_path, fields):
    ours = ViTScratchImageProcessor(**{"size": 32, "patch_size": 8, **fields})
    theirs = to_vit_processor(ours)
    image = photo(224, 112)
    assert torch.equal(pixels_of(theirs, image), pixels_of(ours, image))
    back, _ = converted(tmp_path, theirs)
    unread = {"none": ("size", "resample"), "squash": ("crop_pct",)}.get(ours.resize_mode, ())
    expected = {name: value for name, value in ours.to_dict().items() if name not in unread}
    assert {name: value for name, value in back.to_dict().items() if name not in unread} == expected


def test_the_exported_processor_of_one_channel_takes_grey_images(caplog):
    ours = ViTScratchImageProcessor(size=32, num_channels=1)
    image = photo().convert("L")
    assert torch.equal(pixels_of(to_vit_processor(ours), image), pixels_of(ours, image))
    assert "does not convert to grey" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resize_mode": "pad"}, "resize_mode='pad'"),
        ({"resize_mode": "shorter", "size": {"height": 32, "width": 48}}, "resize_mode='shorter' with size=32x48"),
    ],
)
def test_an_exported_processor_is_refused_by_the_field_without_counterpart(fields, message):
    with pytest.raises(InputError, match=message):
        to_vit_processor(ViTScratchImageProcessor(**{"size": 32, **fields}))


@pytest.mark.parametrize("fields", [{"alpha_background": [0, 0, 0]}, {"input_range": [0.0, 4095.0]}])
def test_an_input_policy_that_transformers_has_not_is_logged(caplog, fields):
    to_vit_processor(ViTScratchImageProcessor(size=32, **fields))
    assert "alpha_background and input_range are left out" in caplog.text

"""From images to pixel_values: resizing, normalisation, batches, fields, saving and loading."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2
from transformers import AutoImageProcessor, BatchFeature, ViTImageProcessor

import modeling_vit_scratch
from modeling_vit_scratch import ViTScratchConfig
from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.image_processing_vit_scratch import ViTScratchImageProcessor


@pytest.fixture(scope="module")
def photos() -> list[Image.Image]:
    """Two photographs, 427x640 pixels, and a part of one upright."""
    china, flower = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    return [china, flower, china.crop((100, 0, 301, 399))]


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


# -------------------------------------------------------------------------------- against transformers and torchvision


@pytest.mark.parametrize("resample", [0, 2, 3], ids=["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [{"height": 224, "width": 224}, {"height": 48, "width": 112}], ids=["square", "wide"])
def test_rgb_photos_equal_transformers_vit_image_processor_bit_by_bit(photos, resample, size):
    expected = ViTImageProcessor(size=size, resample=resample)(photos, return_tensors="pt").pixel_values
    assert torch.equal(ViTScratchImageProcessor(size=size, resample=resample)(photos).pixel_values, expected)


def test_other_means_and_stds_equal_transformers_bit_by_bit(photos):
    statistics = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    expected = ViTImageProcessor(**statistics)(photos, return_tensors="pt").pixel_values
    assert torch.equal(ViTScratchImageProcessor(**statistics)(photos).pixel_values, expected)


def test_enlarged_images_equal_transformers_bit_by_bit():
    image = Image.fromarray(noise(9, 13, 3))
    expected = ViTImageProcessor()(image, return_tensors="pt").pixel_values
    assert torch.equal(ViTScratchImageProcessor()(image).pixel_values, expected)


@pytest.mark.parametrize("crop_pct", [1.0, 0.875, 0.9])
def test_resize_mode_shorter_equals_torchvisions_resize_and_center_crop(photos, crop_pct):
    recipe = v2.Compose([v2.Resize(int(96 / crop_pct)), v2.CenterCrop(96)])
    processor = ViTScratchImageProcessor(size=96, resize_mode="shorter", crop_pct=crop_pct)
    for photo in photos:
        image = processor.decode(photo)
        assert torch.equal(processor.resize(image), recipe(image))


# ---------------------------------------------------------------------------------------------------------- resizing


def test_pixels_are_mapped_to_minus_one_and_one_by_default():
    image = np.array([[0, 255]], dtype=np.uint8)
    processor = ViTScratchImageProcessor(size={"height": 1, "width": 2})
    assert processor(image).pixel_values[0, 0].tolist() == [[-1.0, 1.0]]


def test_uint8_and_float_twins_differ_by_less_than_the_rounding_of_uint8(photos):
    processor = ViTScratchImageProcessor(size=64)
    pixels = np.asarray(photos[0])
    of_uint8, of_floats = processor([pixels, pixels / 255]).pixel_values
    assert (of_uint8 - of_floats).abs().max() <= 1.01 * 2 / 255  # one 8-bit step, in units of std 0.5


def test_16_bit_images_are_resized_without_being_cut_to_8_bits():
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16)[None].repeat(8, 0)
    image = ViTScratchImageProcessor(size={"height": 8, "width": 32}).resize(ViTScratchImageProcessor().decode(ramp))
    expected = (ramp[0, ::2].astype(float) + ramp[0, 1::2]) / 2 / 65535  # a linear filter keeps a ramp, up to its ends
    assert np.allclose(image[0, 0, 1:-1], expected[1:-1], rtol=0, atol=1e-5)


def test_bicubic_floats_stay_in_the_unit_interval():
    edge = np.zeros((16, 16), dtype=np.float32)
    edge[:, 8:] = 1
    processor = ViTScratchImageProcessor(size=64, resample=3)
    resized = processor.resize(processor.decode(edge))
    assert (resized.min(), resized.max()) == (0, 1)


def test_resize_mode_shorter_keeps_the_aspect_for_a_wide_target():
    disc = Image.fromarray(((np.hypot(*np.mgrid[-50:50, -100:100]) < 30) * 255).astype(np.uint8))
    processor = ViTScratchImageProcessor(size={"height": 32, "width": 96}, resize_mode="shorter", crop_pct=1.0)
    bright = processor.resize(processor.decode(disc))[0] > 127
    # 100x200 covers 32x96 when it is 48x96: a disc 60 wide becomes 28.8 wide and high.
    assert abs(bright.any(0).sum().item() - 28.8) <= 1
    assert abs(bright.any(1).sum().item() - 28.8) <= 1


@pytest.mark.parametrize(("shape", "inside"), [((20, 40), (8, 24, 0, 32)), ((40, 20), (0, 32, 8, 24))])
def test_resize_mode_pad_fits_the_image_and_shows_the_background_beside_it(shape, inside):
    processor = ViTScratchImageProcessor(size=32, resize_mode="pad", alpha_background=[10, 20, 30])
    resized = processor.resize(processor.decode(np.full((*shape, 3), 200, np.uint8)))
    expected = torch.tensor([10, 20, 30])[:, None, None].repeat(1, 32, 32)
    top, bottom, left, right = inside
    expected[:, top:bottom, left:right] = 200
    assert torch.equal(resized, expected.to(torch.uint8))


def test_resize_mode_pad_keeps_at_least_one_row_of_a_thin_image():
    processor = ViTScratchImageProcessor(size=16, resize_mode="pad", image_mean=0.0, image_std=1.0)
    pixel_values = processor(Image.new("RGB", (400, 1))).pixel_values
    assert (pixel_values == 0).any(dim=-1).sum().item() == 3  # one black row in each channel, the rest white


@pytest.mark.parametrize("resize_mode", ["squash", "shorter", "pad"])
def test_a_stack_of_decoded_images_is_resized_as_each_alone(resize_mode):
    stack = torch.from_numpy(noise(2, 3, 20, 30))
    processor = ViTScratchImageProcessor(size=16, resize_mode=resize_mode)
    assert torch.equal(processor.resize(stack), torch.stack([processor.resize(image) for image in stack]))


def test_resize_mode_none_leaves_the_pixels_as_they_are():
    pixels = noise(24, 40, 3)
    processor = ViTScratchImageProcessor(resize_mode="none", patch_size=8)
    expected = torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(processor(pixels).pixel_values[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shape", "nearest"), [((30, 30), "32x32"), ((33, 47), "32x48"), ((5, 8), "8x8")])
def test_resize_mode_none_refuses_sides_that_are_no_multiple_of_the_patch(shape, nearest):
    processor = ViTScratchImageProcessor(resize_mode="none", patch_size=8)
    with pytest.raises(InputError, match=f"patches of 8x8.*{nearest}.*squash, shorter or pad"):
        processor(Image.fromarray(noise(*shape, 3)))


def test_resize_mode_none_checks_each_side_against_its_own_patch_side():
    processor = ViTScratchImageProcessor(resize_mode="none", patch_size=[4, 8])
    assert processor(noise(20, 40, 3)).pixel_values.shape == (1, 3, 20, 40)
    with pytest.raises(InputError, match="patches of 4x8"):
        processor(noise(40, 20, 3))


def test_resize_mode_none_refuses_two_sizes_in_a_batch_and_names_the_row():
    processor = ViTScratchImageProcessor(resize_mode="none", patch_size=8)
    with pytest.raises(InputError, match=r"images\[1\] has 16x24 pixels, images\[0\] 16x16"):
        processor([noise(16, 16, 3), noise(16, 24, 3)])


# ----------------------------------------------------------------------------------------------------------- batches


def test_a_list_of_mixed_sizes_kinds_and_modes_equals_its_images_one_by_one(tmp_path):
    Image.fromarray(noise(50, 70, 3)).save(tmp_path / "a.png")
    images = [
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        (tmp_path / "a.png").read_bytes(),
        Image.fromarray(noise(20, 30, 4)),
        Image.fromarray(noise(33, 21)),
        noise(3, 60, 40),
        torch.from_numpy(noise(60, 40, 3) / 255),
        Image.new("I;16", (10, 10), 40000),
    ]
    processor = ViTScratchImageProcessor(size=32)
    expected = torch.cat([processor(image).pixel_values for image in images])
    assert torch.equal(processor(images).pixel_values, expected)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_an_array_of_a_batch_equals_its_images_in_either_layout(make):
    pixels = noise(5, 20, 30, 3)
    processor = ViTScratchImageProcessor(size=16)
    expected = processor(list(pixels)).pixel_values
    assert torch.equal(processor(make(pixels)).pixel_values, expected)
    assert torch.equal(processor(make(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))).pixel_values, expected)


def test_a_datasets_column_is_a_batch():
    from datasets import Dataset, Features
    from datasets import Image as ImageFeature

    pixels = [Image.fromarray(noise(20, 30, 3)), Image.fromarray(noise(40, 30, 3))]
    column = Dataset.from_dict({"image": pixels}, features=Features({"image": ImageFeature()}))["image"]
    processor = ViTScratchImageProcessor(size=16)
    assert torch.equal(processor(column).pixel_values, processor(pixels).pixel_values)


def test_a_broken_file_of_a_list_is_named_with_its_row(tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    with pytest.raises(InputError, match=r"images\[2\]: .*bad\.jpg: not an image"):
        ViTScratchImageProcessor()([noise(8, 8, 3), noise(8, 8, 3), tmp_path / "bad.jpg"])


@pytest.mark.parametrize("images", [[], np.zeros((0, 8, 8, 3), np.uint8)], ids=["list", "array"])
def test_an_empty_batch_is_an_error(images):
    with pytest.raises(InputError, match="images is empty"):
        ViTScratchImageProcessor()(images)


def test_return_tensors_np_gives_the_same_numbers_as_pt():
    processor = ViTScratchImageProcessor(size=16)
    pixel_values = processor(noise(8, 8, 3), return_tensors="np").pixel_values
    assert isinstance(pixel_values, np.ndarray)
    assert np.array_equal(pixel_values, processor(noise(8, 8, 3), return_tensors="pt").pixel_values.numpy())


def test_return_tensors_none_gives_a_list_of_images():
    batch = ViTScratchImageProcessor(size=16)([noise(8, 8, 3)] * 2, return_tensors=None)
    assert isinstance(batch, BatchFeature)
    assert [tuple(image.shape) for image in batch.pixel_values] == [(3, 16, 16), (3, 16, 16)]


def test_another_kind_of_return_tensors_is_an_error():
    with pytest.raises(InputError, match="return_tensors='jax'"):
        ViTScratchImageProcessor()(noise(8, 8, 3), return_tensors="jax")


# ------------------------------------------------------------------------------------------------------------ fields


def test_a_field_given_to_a_call_holds_for_that_call_only(photos):
    processor = ViTScratchImageProcessor(size=32)
    expected = ViTScratchImageProcessor(size=16, resize_mode="pad")(photos).pixel_values
    assert torch.equal(processor(photos, size=16, resize_mode="pad").pixel_values, expected)
    assert processor(photos).pixel_values.shape == (3, 3, 32, 32)


@pytest.mark.parametrize("field", ["do_resize", "do_center_crop", "sise"])
def test_an_unknown_field_is_an_error_that_names_it_at_creation_and_call(field):
    with pytest.raises(InputError, match=field):
        ViTScratchImageProcessor(**{field: True})
    with pytest.raises(InputError, match=field):
        ViTScratchImageProcessor()(noise(8, 8, 3), **{field: True})


def test_a_misspelt_field_is_told_the_right_one():
    with pytest.raises(InputError, match="did you mean resize_mode"):
        ViTScratchImageProcessor(resize_mod="pad")


BAD_VALUES: dict[str, list] = {
    "size": ["224", 0, -1, True, 2.5, {"height": 8}, {"shortest_edge": 8}, {"height": 8, "width": 0}, [8, 8]],
    "resize_mode": ["stretch", None, 1],
    "resample": [1, "bilinear", 2.0, True, None],
    "image_mean": [[0.5, 0.5], "0.5", None, [0.5, 0.5, float("nan")]],
    "image_std": [0, [0.5, 0.5, -0.5], float("inf")],
    "crop_pct": [0, 1.1, 87.5, None, True],
    "alpha_background": [255, [255, 255], [0.5, 0.5, 0.5], [0, 0, 256], "white"],
    "input_range": [(1, 0), (0, 0), 255, (0, float("inf")), (0, 1, 2)],
    "input_data_format": ["HWC", 0],
    "num_channels": [0, 2, 4, 3.0, True, None],
    "patch_size": [0, [8], [8, 0], "8", 8.0],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values], ids=str
)
def test_a_bad_value_is_an_error_that_names_its_field(field, value):
    with pytest.raises(InputError, match=f"^{field}="):
        ViTScratchImageProcessor(**{field: value})


def test_a_processor_from_a_config_has_its_size_patch_and_channels():
    config = ViTScratchConfig(image_size=[32, 64], patch_size=[4, 8], num_channels=1)
    processor = ViTScratchImageProcessor.from_config(config, resize_mode="pad")
    assert processor.size == {"height": 32, "width": 64}
    assert processor.patch_size == [4, 8]
    assert processor.resize_mode == "pad"
    assert processor(noise(20, 20, 3)).pixel_values.shape == (1, 1, 32, 64)


# ----------------------------------------------------------------------------------------------------- save and load

ALL_FIELDS = {
    "size": {"height": 32, "width": 48},
    "resize_mode": "pad",
    "resample": 3,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
    "crop_pct": 0.9,
    "alpha_background": [1, 2, 3],
    "input_range": [0, 4095],
    "input_data_format": "channels_first",
    "num_channels": 3,
    "patch_size": [4, 8],
}


def test_preprocessor_config_json_holds_the_fields_and_the_class_and_nothing_else(tmp_path):
    ViTScratchImageProcessor(**ALL_FIELDS).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved == {**ALL_FIELDS, "image_processor_type": "ViTScratchImageProcessor"}


def test_save_load_save_gives_the_same_bytes(tmp_path):
    ViTScratchImageProcessor(**ALL_FIELDS).save_pretrained(tmp_path / "first")
    ViTScratchImageProcessor.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "preprocessor_config.json").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_field_given_to_from_pretrained_overrides_the_saved_one(tmp_path):
    ViTScratchImageProcessor(**ALL_FIELDS).save_pretrained(tmp_path)
    processor = ViTScratchImageProcessor.from_pretrained(tmp_path, size=16)
    assert (processor.size, processor.resize_mode) == ({"height": 16, "width": 16}, "pad")


def test_an_unknown_field_in_a_saved_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"resize_mod": "pad"}')
    with pytest.raises(InputError, match="resize_mod"):
        ViTScratchImageProcessor.from_pretrained(tmp_path)


REMOTE_SCRIPT = """
import sys
from transformers import AutoImageProcessor
processor = AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(processor).__module__.startswith("transformers_modules"), type(processor)
processor.save_pretrained(sys.argv[2])
"""


@pytest.mark.e2e
def test_a_fresh_process_loads_and_saves_the_processor_as_remote_code(tmp_path):
    processor = ViTScratchImageProcessor(**ALL_FIELDS)
    processor.auto_map = {"AutoImageProcessor": "image_processing_vit_scratch.ViTScratchImageProcessor"}
    processor.save_pretrained(tmp_path / "repo")
    for name in ("errors", "image_input", "image_processing"):
        source = Path(modeling_vit_scratch.__file__).with_name(f"{name}_vit_scratch.py")
        (tmp_path / "repo" / source.name).write_text(source.read_text())
    command = [sys.executable, "-c", REMOTE_SCRIPT, str(tmp_path / "repo"), str(tmp_path / "again")]
    subprocess.run(command, check=True, cwd=tmp_path)  # outside the checkout: the package itself is not importable
    for path in (tmp_path / "repo").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("load", [ViTScratchImageProcessor.from_pretrained, AutoImageProcessor.from_pretrained])
def test_a_misspelt_field_at_load_is_refused(load, tmp_path):
    ViTScratchImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no field 'resize_mod'; did you mean resize_mode\?"):
        load(tmp_path, resize_mod="pad")
    assert load(tmp_path, resize_mode="pad").resize_mode == "pad"

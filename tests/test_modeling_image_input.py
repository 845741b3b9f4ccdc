"""What counts as an image, and on which scale its values are (design: one image policy)."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from modeling_vit_scratch.image_processing_vit_scratch import ViTScratchImageProcessor

FORMATS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "TIFF": "tif", "BMP": "bmp"}
RED, WHITE = (255, 0, 0), (255, 255, 255)


def decode(image, **fields) -> torch.Tensor:
    return ViTScratchImageProcessor(**fields).decode(image)


def encode(image: Image.Image, file_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def gradient(height: int = 30, width: int = 40) -> np.ndarray:
    """(H, W, 3) uint8 with few enough colours for a GIF palette, no two rows or columns alike."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 8 % 256 // 32 * 32, columns * 6 % 256 // 32 * 32, np.full_like(rows, 64)], -1).astype("u1")


# ------------------------------------------------------------------------------------------------ files and formats


@pytest.mark.parametrize(("file_format", "suffix"), FORMATS.items())
def test_a_file_decodes_to_the_pixels_pillow_reads(tmp_path, file_format, suffix):
    path = tmp_path / f"image.{suffix}"
    path.write_bytes(encode(Image.fromarray(gradient()), file_format))
    expected = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(decode(path).numpy(), expected)


@pytest.mark.parametrize(("file_format", "suffix"), FORMATS.items())
def test_path_string_bytes_and_pillow_image_decode_alike(tmp_path, file_format, suffix):
    path = tmp_path / f"image.{suffix}"
    path.write_bytes(encode(Image.fromarray(gradient()), file_format))
    expected = decode(path)
    for image in (str(path), path.read_bytes(), Image.open(path)):
        assert torch.equal(decode(image), expected)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "TIFF"])
def test_of_several_frames_the_first_is_read(file_format):
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "lime", "blue")]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], lossless=True)
    assert decode(data)[:, 7, 9].tolist() == list(RED)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_a_16_bit_file_keeps_all_65536_levels(file_format):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = torch.from_numpy(ramp.astype(np.float64) / 65535).to(torch.float32).expand(3, 256, 256)
    assert torch.equal(decode(encode(Image.fromarray(ramp), file_format)), expected)


@pytest.mark.parametrize("image", [np.uint16, ">u2", torch.uint16, "I"], ids=str)
def test_the_16_bit_ramp_is_the_same_from_arrays_tensors_and_mode_i(image):
    ramp = np.arange(65536).reshape(256, 256)
    if image == "I":
        image = Image.fromarray(ramp.astype(np.int32))
    elif image is torch.uint16:
        image = torch.from_numpy(ramp.astype(np.uint16))
    else:
        image = ramp.astype(image)
    expected = torch.from_numpy(ramp / 65535).to(torch.float32).expand(3, 256, 256)
    assert torch.equal(decode(image), expected)


# ------------------------------------------------------------------------------------------------- Pillow's modes

# mode, a pixel in it, the RGB it shows over white, the tolerance in 1/255 (conversions that round)
MODES = [
    ("1", 1, WHITE, 0),
    ("L", 100, (100, 100, 100), 0),
    ("LA", (100, 255), (100, 100, 100), 0),
    ("LA", (100, 0), WHITE, 0),
    ("La", (50, 128), (177, 177, 177), 1),
    ("PA", (0, 0), WHITE, 0),
    ("RGB", (10, 20, 30), (10, 20, 30), 0),
    ("RGBX", (10, 20, 30, 0), (10, 20, 30), 0),
    ("RGBA", (10, 20, 30, 255), (10, 20, 30), 0),
    ("RGBA", (10, 20, 30, 0), WHITE, 0),
    ("RGBA", (255, 0, 0, 51), (255, 204, 204), 0),
    ("RGBa", (51, 0, 0, 51), (255, 204, 204), 0),
    ("CMYK", (0, 255, 255, 0), RED, 0),
    ("YCbCr", (76, 85, 255), RED, 1),
    ("LAB", (136, 208, 195), RED, 12),  # 8-bit Lab is coarse
    ("HSV", (0, 255, 255), RED, 0),
    ("I", 65535, WHITE, 0),
    ("I", 0, (0, 0, 0), 0),
    ("I;16", 257 * 100, (100, 100, 100), 1e-4),
    ("I;16L", 257 * 100, (100, 100, 100), 1e-4),
    ("I;16B", 257 * 100, (100, 100, 100), 1e-4),
    ("I;16N", 257 * 100, (100, 100, 100), 1e-4),
    ("F", 0.2, (51, 51, 51), 1e-4),
    ("F", 51.0, (51, 51, 51), 1e-4),
]


@pytest.mark.parametrize(("mode", "pixel", "rgb", "tolerance"), MODES, ids=[f"{m[0]}-{m[1]}" for m in MODES])
def test_every_pillow_mode_shows_its_color_over_white(mode, pixel, rgb, tolerance):
    image = decode(Image.new(mode, (40, 30), pixel))
    assert image.shape == (3, 30, 40)
    on_255 = image.double() if image.dtype == torch.uint8 else image.double() * 255
    assert (on_255 - torch.tensor(rgb)[:, None, None]).abs().max() <= tolerance


def test_a_palette_without_transparency_shows_its_colors():
    image = Image.fromarray(gradient()).quantize(16)
    assert np.array_equal(decode(image).numpy(), np.asarray(image.convert("RGB")).transpose(2, 0, 1))


@pytest.mark.parametrize("transparency", [0, b"\x00\xff"], ids=["index", "table"])
def test_a_transparent_palette_entry_shows_the_background(transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, 0, 0, 255])
    image.putpixel((1, 0), 1)
    data = encode(image, "PNG", transparency=transparency)
    assert decode(data)[:, 0].T.tolist() == [[255, 255, 255], [0, 0, 255]]


@pytest.mark.parametrize(
    ("pixels", "transparency"),
    [
        (np.array([[7, 9]], dtype=np.uint8), 7),
        (np.array([[[1, 2, 3], [9, 9, 9]]], dtype=np.uint8), (1, 2, 3)),
        (np.array([[300, 2313]], dtype=np.uint16), 300),
    ],
    ids=["L", "RGB", "I;16"],
)
def test_a_png_color_declared_transparent_shows_the_background(pixels, transparency):
    image = decode(encode(Image.fromarray(pixels), "PNG", transparency=transparency))
    assert ViTScratchImageProcessor(image_mean=0.0, image_std=1.0).normalize(image)[:, 0, 0].tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    assert image[:, 0, 1].double().mul(255 if image.is_floating_point() else 1).round().tolist() == [9, 9, 9]


@pytest.mark.parametrize("background", [[0, 0, 0], [10, 200, 30]])
def test_alpha_background_is_what_transparent_pixels_show(background):
    image = Image.new("RGBA", (4, 3), (255, 255, 255, 0))
    assert decode(image, alpha_background=background)[:, 0, 0].tolist() == background


def test_half_transparent_pixels_equal_pillows_own_composition():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (50, 60, 4), dtype=np.uint8))
    canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
    expected = np.asarray(Image.alpha_composite(canvas, image).convert("RGB")).transpose(2, 0, 1)
    assert np.abs(decode(image).numpy().astype(int) - expected).max() <= 1  # Pillow rounds in fixed point


# --------------------------------------------------------------------------------------------- luminance, num_channels


def test_num_channels_1_gives_the_luminance_of_pillow_exactly():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (200, 300, 3), dtype=np.uint8))
    assert np.array_equal(decode(image, num_channels=1)[0].numpy(), np.asarray(image.convert("L")))


def test_num_channels_1_leaves_grey_images_as_they_are():
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(decode(Image.fromarray(ramp).convert("RGB"), num_channels=1)[0].numpy(), ramp)


def test_luminance_of_floats_stays_in_the_unit_interval():
    image = np.ones((8, 8, 3), dtype=np.float32)
    assert torch.equal(decode(image, num_channels=1), torch.ones(1, 8, 8))


# -------------------------------------------------------------------------------------------------------------- EXIF

UPRIGHT = gradient(60, 40)
STORED = {  # what a camera stores so that the given orientation tag makes it UPRIGHT
    1: UPRIGHT,
    2: np.fliplr(UPRIGHT),
    3: np.rot90(UPRIGHT, 2),
    4: np.flipud(UPRIGHT),
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT),
    7: np.rot90(UPRIGHT, 2).transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}


def turned(orientation: int, file_format: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if file_format == "WEBP" else {}
    return encode(Image.fromarray(np.ascontiguousarray(STORED[orientation])), file_format, exif=exif, **options)


@pytest.mark.parametrize("orientation", STORED)
def test_each_exif_orientation_is_undone(orientation):
    assert np.array_equal(decode(turned(orientation)).numpy(), UPRIGHT.transpose(2, 0, 1))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("source", ["path", "bytes", "pillow", "converted", "upright already"])
def test_exif_is_applied_once_however_the_image_comes(tmp_path, file_format, source):
    from PIL import ImageOps

    path = tmp_path / "turned"
    path.write_bytes(turned(6, file_format))
    image = {
        "path": lambda: path,
        "bytes": path.read_bytes,
        "pillow": lambda: Image.open(path),
        "converted": lambda: Image.open(path).convert("RGB"),
        "upright already": lambda: ImageOps.exif_transpose(Image.open(path)),
    }[source]()
    assert np.array_equal(decode(image).numpy(), UPRIGHT.transpose(2, 0, 1))


def test_a_jpeg_left_half_red_with_orientation_6_is_red_above():
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:, :30, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decode(encode(Image.fromarray(pixels), "JPEG", exif=exif, quality=100)).int()
    assert image.shape == (3, 60, 40)
    assert image[0, :28].min() > 250
    assert image[0, 32:].max() < 5


def test_decoding_leaves_the_callers_image_as_it_was():
    image = Image.open(io.BytesIO(turned(6)))
    decode(image)
    assert image.size == (60, 40)
    assert image.getexif()[0x0112] == 6


# -------------------------------------------------------------------------------------------- arrays: scale and layout


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_uint8_and_floats_over_255_are_twins(dtype):
    pixels = gradient()
    as_floats = decode((pixels / 255).astype(dtype))
    assert as_floats.dtype == torch.float32
    tolerance = 1e-3 if dtype == np.float16 else 1e-7  # the twin's own rounding
    assert torch.allclose(as_floats, decode(pixels) / 255, rtol=0, atol=tolerance)


def test_floats_up_to_255_are_divided_by_255():
    assert torch.allclose(decode(gradient().astype(np.float32)), decode(gradient()) / 255, rtol=0, atol=1e-7)


def test_floats_a_rounding_error_above_1_are_still_in_the_unit_interval():
    image = np.full((8, 8), np.nextafter(np.float32(1), np.float32(2)))
    assert torch.equal(decode(image), torch.ones(3, 8, 8))


def test_booleans_are_black_and_white():
    assert decode(np.array([[False, True]]))[0].tolist() == [[0, 255]]


def test_pixels_do_not_depend_on_the_range_an_image_happens_to_use():
    dark, bright = np.full((4, 4), 10, np.uint8), np.full((4, 4), 200, np.uint8)
    assert decode(dark).unique().tolist() == [10]
    assert decode(bright).unique().tolist() == [200]


@pytest.mark.parametrize(
    "image",
    [
        np.full((8, 8, 3), -0.5),
        np.full((8, 8, 3), 255.5),
        np.full((8, 8, 3), np.nan),
        np.full((8, 8, 3), np.inf),
        np.arange(64).reshape(8, 8),
        np.arange(64, dtype=np.int32).reshape(8, 8),
        torch.arange(64, dtype=torch.int16).reshape(8, 8),
        Image.new("I", (8, 8), 65536),
        Image.new("I", (8, 8), -1),
        Image.new("F", (8, 8), 300.0),
    ],
    ids=["negative", "above 255", "nan", "inf", "int64", "int32", "int16", "I above", "I below", "F above"],
)
def test_values_without_a_known_scale_are_an_error_that_names_input_range(image):
    with pytest.raises(InputError, match="input_range"):
        decode(image)


@pytest.mark.parametrize(
    ("image", "input_range"),
    [
        (np.array([[-1.0, 0.0, 1.0]]), (-1, 1)),
        (np.array([[0, 2048, 4096]]), (0, 4096)),
        (np.array([[0, 8, 16]], dtype=np.uint8), (0, 16)),
        (Image.fromarray(np.array([[-1000, 0, 1000]], dtype=np.int32)), (-1000, 1000)),
    ],
    ids=["float", "int64", "uint8", "mode I"],
)
def test_input_range_overrides_the_table(image, input_range):
    assert decode(image, input_range=input_range)[0].tolist() == [[0.0, 0.5, 1.0]]


@pytest.mark.parametrize("image", [np.array([[0.0, 1.5]]), np.array([[0.0, np.nan]]), np.array([[-0.1, 1.0]])])
def test_values_outside_a_given_input_range_are_an_error(image):
    with pytest.raises(InputError, match=r"outside input_range=\(0, 1\)"):
        decode(image, input_range=(0, 1))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_both_layouts_of_an_array_decode_to_what_pillow_shows(channels, make):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, channels), dtype=np.uint8)
    expected = decode(Image.fromarray(pixels[..., 0] if channels == 1 else pixels))
    assert torch.equal(decode(make(pixels)), expected)
    assert torch.equal(decode(make(np.ascontiguousarray(pixels.transpose(2, 0, 1)))), expected)


def test_a_grey_array_without_channel_axis_is_repeated():
    pixels = gradient()[..., 0]
    assert np.array_equal(decode(pixels).numpy(), np.stack([pixels] * 3))


def test_flipped_and_read_only_arrays_decode_to_what_they_show():
    pixels = gradient()
    flipped = pixels[::-1, ::-1]
    flipped.flags.writeable = False
    assert np.array_equal(decode(flipped).numpy(), pixels[::-1, ::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("shape", [(3, 40, 3), (3, 3, 3), (1, 300, 3), (3, 300, 1), (4, 40, 3)])
def test_an_ambiguous_channel_axis_is_an_error_that_asks_for_the_layout(shape):
    with pytest.raises(InputError, match="input_data_format"):
        decode(np.zeros(shape, dtype=np.uint8))


def test_input_data_format_settles_an_ambiguous_channel_axis():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 3), dtype=np.uint8)
    assert np.array_equal(decode(pixels, input_data_format="channels_first").numpy(), pixels)
    assert np.array_equal(decode(pixels, input_data_format="channels_last").numpy(), pixels.transpose(2, 0, 1))


def test_an_input_data_format_that_the_shape_contradicts_is_an_error():
    with pytest.raises(InputError, match="gives 40 channels"):
        decode(np.zeros((3, 30, 40), dtype=np.uint8), input_data_format="channels_last")


# ------------------------------------------------------------------------------------------------------ broken inputs


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
@pytest.mark.parametrize(("file_format", "suffix"), FORMATS.items())
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, file_format, suffix, fraction):
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), file_format)
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(InputError, match=f"cut.{suffix}"):
        decode(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("zero.png", b"", "empty"),
        ("text.jpg", b"hello world", "hello wo"),
        ("head.png", b"\x89PNG\r\n\x1a\n", "image"),
    ],
)
def test_a_file_that_is_no_image_is_an_error_that_names_it(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}: .*{reason}"):
        decode(tmp_path / name)


def test_a_truncated_pillow_image_is_named_by_its_file(tmp_path):
    path = tmp_path / "cut.jpg"
    path.write_bytes(encode(Image.fromarray(gradient(200, 300)), "JPEG")[:-200])
    with pytest.raises(InputError, match=r"cut\.jpg: broken image"):
        decode(Image.open(path))


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(InputError, match=r"missing\.png: cannot be read \(No such file"):
        decode(tmp_path / "missing.png")


def test_a_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path.name}: cannot be read"):
        decode(tmp_path)


def test_a_failing_disk_is_the_environments_fault(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(EnvironmentFault, match=r"a\.png: reading failed"):
        decode(tmp_path / "a.png")


def test_an_image_with_too_many_pixels_is_an_error_that_names_it(tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    path.write_bytes(encode(Image.new("L", (100, 100)), "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match=r"bomb\.png.*exceeds limit"):
        decode(path)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((0, 0), np.uint8),
        np.zeros((3, 0, 10), np.uint8),
        np.zeros((0, 10, 3)),
        torch.zeros(3, 10, 0),
        Image.new("RGB", (0, 0)),
        Image.new("RGB", (0, 5)),
    ],
    ids=["0x0", "chw", "hwc", "tensor", "pillow 0x0", "pillow 0x5"],
)
def test_an_image_without_pixels_is_an_error(image):
    with pytest.raises(InputError, match="no pixels"):
        decode(image)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, "NoneType is no image"),
        ({"path": "a.png"}, "dict is no image"),
        (np.zeros(12), "2 or 3 axes"),
        (np.zeros((2, 2, 3, 8, 8)), "2 or 3 axes"),
        (np.zeros((8, 28, 28)), "no axis of 1 to 4 channels"),
        (np.array([["a", "b"]]), "integers, floats or booleans"),
        (np.zeros((8, 8), dtype=complex), "integers, floats or booleans"),
    ],
)
def test_what_is_no_image_is_an_error_that_says_so(image, message):
    with pytest.raises(InputError, match=message):
        decode(image)

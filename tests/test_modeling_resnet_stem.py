"""The ResNet stem of the hybrids against slow NumPy in float64, closed forms and timm's ResNetV2."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures_modeling import random_pixels
from torch import Tensor
from torch.nn import functional as F

from modeling_vit_scratch.resnet_stem_vit_scratch import (
    ViTScratchResNetStem,
    ViTScratchResNetUnit,
    ViTScratchStdConv2d,
    pad_same,
    standardise,
)

SIZES = [(16, 16), (15, 15), (16, 13), (17, 24)]
# Both sides are in float64 and sum some thousand numbers of size 1.
CLOSE = {"rtol": 0, "atol": 1e-11}


def stem_config(depths: list[int], **fields: Any) -> Any:
    stride = 4 * 2 ** max(0, len(depths) - 1)
    values = {"stem_depths": depths, "stem_width_factor": 1, "num_channels": 3, "stem_stride": stride, **fields}
    return SimpleNamespace(**values)


def random_stem(depths: list[int], **fields: Any) -> ViTScratchResNetStem:
    """Returns a stem in float64 in which no scale is one and no bias zero."""
    stem = ViTScratchResNetStem(stem_config(depths, **fields)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in stem.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise)
    return stem


# The reference: loops over the output's positions, on (H, W, C) arrays and HWIO kernels as the official code has them.


def slow_windows(features: np.ndarray, kernel_size: int, stride: int, fill: float) -> np.ndarray:
    """(rows, columns, k, k, C): the windows of TensorFlow's SAME padding, written as its documentation defines it."""
    height, width, channels = features.shape
    rows, columns = -(-height // stride), -(-width // stride)
    pad_height = max((rows - 1) * stride + kernel_size - height, 0)
    pad_width = max((columns - 1) * stride + kernel_size - width, 0)
    padded = np.full((height + pad_height, width + pad_width, channels), fill)
    padded[pad_height // 2 : pad_height // 2 + height, pad_width // 2 : pad_width // 2 + width] = features
    windows = np.empty((rows, columns, kernel_size, kernel_size, channels))
    for row in range(rows):
        for column in range(columns):
            top, left = row * stride, column * stride
            windows[row, column] = padded[top : top + kernel_size, left : left + kernel_size]
    return windows


def slow_conv(features: np.ndarray, weight: Tensor, stride: int) -> np.ndarray:
    kernel = weight.detach().numpy().transpose(2, 3, 1, 0)  # OIHW -> HWIO
    kernel = (kernel - kernel.mean(axis=(0, 1, 2))) / (kernel.std(axis=(0, 1, 2)) + 1e-5)
    windows = slow_windows(features, kernel.shape[0], stride, fill=0.0)
    return np.einsum("rcijk,ijko->rco", windows, kernel)


def slow_norm(features: np.ndarray, norm: torch.nn.Module) -> np.ndarray:
    groups = features.reshape(*features.shape[:2], 32, -1)
    centred = groups - groups.mean(axis=(0, 1, 3), keepdims=True)
    variance = (centred**2).mean(axis=(0, 1, 3), keepdims=True)
    normed = (centred / np.sqrt(variance + 1e-6)).reshape(features.shape)
    return normed * norm.weight.detach().numpy() + norm.bias.detach().numpy()


def relu(features: np.ndarray) -> np.ndarray:
    return np.maximum(features, 0)


def slow_root(pixels: np.ndarray, root: torch.nn.Module) -> np.ndarray:
    features = relu(slow_norm(slow_conv(pixels, root.conv.weight, 2), root.norm))
    return slow_windows(features, 3, 2, fill=-np.inf).max(axis=(2, 3))


def slow_unit(features: np.ndarray, unit: torch.nn.Module, stride: int, downsample: bool) -> np.ndarray:
    shortcut = features
    if downsample:
        shortcut = slow_norm(slow_conv(features, unit.downsample_conv.weight, stride), unit.downsample_norm)
    features = relu(slow_norm(slow_conv(features, unit.conv1.weight, 1), unit.norm1))
    features = relu(slow_norm(slow_conv(features, unit.conv2.weight, stride), unit.norm2))
    return relu(slow_norm(slow_conv(features, unit.conv3.weight, 1), unit.norm3) + shortcut)


def slow_stem(pixels: Tensor, stem: ViTScratchResNetStem) -> Tensor:
    images = []
    for image in pixels.numpy().transpose(0, 2, 3, 1):
        features = slow_root(image, stem.root)
        for s, stage in enumerate(stem.stages):
            for u, unit in enumerate(stage):
                features = slow_unit(features, unit, stride=2 if s and not u else 1, downsample=u == 0)
        images.append(features.transpose(2, 0, 1))
    return torch.from_numpy(np.stack(images))


# Convolution, padding, standardisation


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("kernel_size", "stride"), [(7, 2), (3, 2), (3, 1), (1, 2), (1, 1)])
def test_a_convolution_is_that_of_same_padding_by_the_standardised_kernel(kernel_size, stride, height, width):
    conv = ViTScratchStdConv2d(3, 8, kernel_size=kernel_size, stride=stride).double()
    pixels = random_pixels(1, height, width, dtype=torch.float64)
    expected = slow_conv(pixels[0].numpy().transpose(1, 2, 0), conv.weight, stride)
    torch.testing.assert_close(conv(pixels)[0], torch.from_numpy(expected.transpose(2, 0, 1)), **CLOSE)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_padding_of_a_max_pool_never_wins(height, width):
    features = -1 - random_pixels(1, height, width, dtype=torch.float64).abs()  # all below a padding of zeros
    actual = F.max_pool2d(pad_same(features, 3, 2, value=-torch.inf), 3, stride=2)
    expected = slow_windows(features[0].numpy().transpose(1, 2, 0), 3, 2, fill=-np.inf).max(axis=(2, 3))
    assert torch.equal(actual[0], torch.from_numpy(expected.transpose(2, 0, 1)))


@pytest.mark.parametrize(
    ("size", "kernel_size", "stride", "expected"),
    [
        (224, 7, 2, (2, 3)),  # this row and the next: as TensorFlow pads a ResNet at 224 pixels
        (56, 3, 2, (0, 1)),
        (57, 3, 2, (1, 1)),
        (56, 3, 1, (1, 1)),
        (56, 1, 2, (0, 0)),
        (57, 1, 2, (0, 0)),
    ],
)
def test_an_odd_row_of_padding_goes_to_the_bottom(size, kernel_size, stride, expected):
    padded = pad_same(torch.ones(1, 1, size, size), kernel_size, stride)[0, 0]
    used = padded.sum(dim=1).nonzero()
    assert (int(used[0]), int(padded.shape[0] - 1 - used[-1])) == expected


@pytest.mark.parametrize("deviation", [1.0, 1e-5])
def test_epsilon_is_added_to_the_population_deviation(deviation):
    kernel = torch.full((2, 2, 3, 3), 5.0, dtype=torch.float64)
    kernel[0].view(-1)[::2] += deviation  # nine of eighteen numbers above the mean, nine below
    kernel[0].view(-1)[1::2] -= deviation
    expected = torch.full((2, 3, 3), deviation / (deviation + 1e-5), dtype=torch.float64)
    # Against a mean of 5, a deviation of 1e-5 is known to ten digits.
    torch.testing.assert_close(standardise(kernel)[0].abs(), expected, rtol=1e-9, atol=0)


def test_a_constant_kernel_becomes_zero_and_has_finite_gradients():
    kernel = torch.full((1, 2, 3, 3), 5.0, requires_grad=True)
    standardise(kernel).square().sum().backward()
    assert torch.equal(standardise(kernel), torch.zeros(1, 2, 3, 3))
    assert torch.isfinite(kernel.grad).all()


def test_a_bfloat16_kernel_is_standardised_in_float32():
    kernel = torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(standardise(kernel), standardise(kernel.float()))


def test_autocast_standardises_in_float32_and_convolves_in_bfloat16():
    conv = ViTScratchStdConv2d(3, 8, kernel_size=3)
    with torch.autocast("cpu", torch.bfloat16):
        assert standardise(conv.weight).dtype == torch.float32
        assert conv(random_pixels()).dtype == torch.bfloat16


# Units and the stem


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 31), (40, 56)])
@pytest.mark.parametrize("depths", [[], [2], [1, 2], [1, 1, 1]])
def test_the_stem_equals_the_slow_one(depths, height, width):
    stem, pixels = random_stem(depths), random_pixels(1, height, width, dtype=torch.float64)
    torch.testing.assert_close(stem(pixels), slow_stem(pixels, stem), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("depths", "width_factor", "out_channels", "stride"),
    [([], 1, 64, 4), ([], 2, 128, 4), ([1], 1, 256, 4), ([1, 1, 1], 1, 1024, 16), ([1, 1, 1, 1], 1, 2048, 32)],
)
def test_out_channels_and_stride_are_those_of_the_feature_map(depths, width_factor, out_channels, stride):
    stem = ViTScratchResNetStem(stem_config(depths, stem_width_factor=width_factor))
    features = stem(random_pixels(2, 64, 96))
    assert (stem.out_channels, stem.stride) == (out_channels, stride)
    assert features.shape == (2, out_channels, 64 // stride, 96 // stride)


def test_another_number_of_channels_enters_at_the_root():
    stem = random_stem([], num_channels=1)
    pixels = random_pixels(1, 16, 16, channels=1, dtype=torch.float64)
    torch.testing.assert_close(stem(pixels), slow_stem(pixels, stem), **CLOSE)


def test_the_tensors_have_the_names_of_the_checkpoints():
    norms = [f"norm{index}.{kind}" for index in (1, 2, 3) for kind in ("weight", "bias")]
    unit = [*norms, *(f"conv{index}.weight" for index in (1, 2, 3))]
    first = [*unit, "downsample_conv.weight", "downsample_norm.weight", "downsample_norm.bias"]
    expected = ["root.conv.weight", "root.norm.weight", "root.norm.bias"]
    expected += [f"stages.{stage}.0.{name}" for stage in (0, 1) for name in first]
    expected += [f"stages.1.1.{name}" for name in unit]
    assert sorted(ViTScratchResNetStem(stem_config([1, 2])).state_dict()) == sorted(expected)


@pytest.mark.parametrize(
    ("depths", "num_parameters"),
    # 7*7*3*64 + 2*64, and for R50 the 23,508,032 of torchvision's resnet50 without its classifier: norms with scale
    # and bias in the same places. (Its stages are 3, 4, 6, 3.)
    [([], 9_536), ([3, 4, 6, 3], 23_508_032)],
)
def test_the_number_of_parameters_is_that_of_a_resnet(depths, num_parameters):
    with torch.device("meta"):
        stem = ViTScratchResNetStem(stem_config(depths))
    assert sum(parameter.numel() for parameter in stem.parameters()) == num_parameters


def test_a_unit_starts_as_its_shortcut():
    unit = ViTScratchResNetUnit(256, 64, stride=1, downsample=False)
    unit.initialize()
    features = random_pixels(1, 8, 8, channels=256)
    assert torch.equal(unit(features), F.relu(features))


def test_kernels_start_as_lecun_normal():
    weight = ViTScratchStdConv2d(128, 256, kernel_size=3).weight
    fan_in = 128 * 9
    # 295k draws: the deviation's own standard error is about 0.1 %. Cut at two deviations of the uncut normal.
    assert weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.01)
    assert weight.abs().max().item() <= 2 * fan_in**-0.5 / 0.87962566 * (1 + 1e-6)


def test_every_parameter_has_a_gradient():
    stem = random_stem([1, 1])
    stem(random_pixels(1, dtype=torch.float64)).square().sum().backward()
    assert [name for name, p in stem.named_parameters() if not p.grad.abs().max() > 0] == []


def test_a_bfloat16_stem_takes_float32_pixels():
    stem = ViTScratchResNetStem(stem_config([1])).to(torch.bfloat16)
    assert stem(random_pixels()).dtype == torch.bfloat16


@pytest.mark.peer
@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96), (61, 47)])
def test_the_stem_equals_the_hybrid_backbone_of_timm(height, width):
    resnetv2 = pytest.importorskip("timm.models.resnetv2", reason="needs timm")
    layers = pytest.importorskip("timm.layers", reason="needs timm")
    theirs = resnetv2.ResNetV2(
        layers=(1, 2, 1),
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=layers.StdConv2dSame,
        norm_layer=partial(layers.GroupNormAct, num_groups=32, eps=1e-6),
    ).double()
    ours = random_stem([1, 2, 1])
    state = {}
    for name, tensor in ours.state_dict().items():
        name = name.replace("root.", "stem.").replace("downsample_", "downsample.")
        parts = name.split(".")
        if parts[0] == "stages":
            parts.insert(2, "blocks")
        # timm adds 1e-8 to the variance where the official code adds 1e-5 to the deviation: at a deviation of about
        # 1e6 neither matters.
        state[".".join(parts)] = tensor * 1e7 if "conv" in name else tensor
    theirs.load_state_dict(state, strict=True)
    ours.load_state_dict({name: t * 1e7 if "conv" in name else t for name, t in ours.state_dict().items()})
    pixels = random_pixels(1, height, width, dtype=torch.float64)
    torch.testing.assert_close(ours(pixels), theirs.forward_features(pixels), rtol=0, atol=1e-9)

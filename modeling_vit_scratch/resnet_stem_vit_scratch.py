"""The ResNet under a hybrid: pixels to a feature map that is then cut into patches (paper section 3.1, "Hybrid").

As the official code builds it: ResNet-v1.5 with the activation after the sum, group normalisation, weight-standardised
convolutions and TensorFlow's SAME padding. BiT, which the paper names, normalises before the activation.

B images, C channels in, O channels out, H x W pixels.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_vit_scratch import ViTScratchConfig
from .initialization_vit_scratch import ViTScratchModule, lecun_normal_

__all__ = ["ViTScratchResNetStem", "ViTScratchResNetUnit", "ViTScratchStdConv2d"]

BASE_WIDTH = 64  # channels of the root at stem_width_factor 1
BOTTLENECK = 4  # a unit gives this many times the channels of its middle
NUM_GROUPS, GROUP_NORM_EPS = 32, 1e-6
STANDARDISATION_EPS = 1e-5  # added to the standard deviation; timm has 1e-8, added to the variance


class ViTScratchResNetStem(ViTScratchModule):
    """Returns the feature map (B, O, H / stride, W / stride) of the root and one stage for each of `stem_depths`.

    Sizes that the stride does not divide are rounded up, as SAME padding does.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        depths = cast(list[int], config.stem_depths)
        width = BASE_WIDTH * config.stem_width_factor
        self.stride: int = config.stem_stride
        self.root = ViTScratchResNetRoot(config.num_channels, width)
        self.stages = nn.Sequential()
        self.out_channels = width
        for index, depth in enumerate(depths):
            mid_channels = width * 2**index
            self.stages.append(_stage(self.out_channels, mid_channels, stride=1 if index == 0 else 2, depth=depth))
            self.out_channels = BOTTLENECK * mid_channels

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.stages(self.root(pixel_values.to(self.root.conv.weight.dtype)))


class ViTScratchResNetRoot(ViTScratchModule):
    """A 7x7 convolution and a max-pool, of stride 2 each."""

    def __init__(self, num_channels: int, width: int):
        super().__init__()
        self.conv = ViTScratchStdConv2d(num_channels, width, kernel_size=7, stride=2)
        self.norm = nn.GroupNorm(NUM_GROUPS, width, eps=GROUP_NORM_EPS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        features = F.relu(self.norm(self.conv(pixel_values)))  # (B, width, H / 2, W / 2)
        return F.max_pool2d(pad_same(features, 3, 2, value=-torch.inf), 3, stride=2)  # (B, width, H / 4, W / 4)


def _stage(in_channels: int, mid_channels: int, *, stride: int, depth: int) -> nn.Sequential:
    """Returns `depth` units, of which the first changes resolution and channels."""
    units = [ViTScratchResNetUnit(in_channels, mid_channels, stride=stride, downsample=True)]
    for _ in range(depth - 1):
        units.append(ViTScratchResNetUnit(BOTTLENECK * mid_channels, mid_channels, stride=1, downsample=False))
    return nn.Sequential(*units)


class ViTScratchResNetUnit(ViTScratchModule):
    """A bottleneck block that starts as its shortcut: the scale of its last norm is zero."""

    def __init__(self, in_channels: int, mid_channels: int, *, stride: int, downsample: bool):
        super().__init__()
        out_channels = BOTTLENECK * mid_channels
        self.conv1 = ViTScratchStdConv2d(in_channels, mid_channels, kernel_size=1)
        self.norm1 = nn.GroupNorm(NUM_GROUPS, mid_channels, eps=GROUP_NORM_EPS)
        self.conv2 = ViTScratchStdConv2d(mid_channels, mid_channels, kernel_size=3, stride=stride)
        self.norm2 = nn.GroupNorm(NUM_GROUPS, mid_channels, eps=GROUP_NORM_EPS)
        self.conv3 = ViTScratchStdConv2d(mid_channels, out_channels, kernel_size=1)
        self.norm3 = nn.GroupNorm(NUM_GROUPS, out_channels, eps=GROUP_NORM_EPS)
        self.has_downsample = downsample
        if downsample:
            self.downsample_conv = ViTScratchStdConv2d(in_channels, out_channels, kernel_size=1, stride=stride)
            self.downsample_norm = nn.GroupNorm(NUM_GROUPS, out_channels, eps=GROUP_NORM_EPS)

    def initialize(self) -> None:
        init.zeros_(self.norm3.weight)

    def forward(self, features: Tensor) -> Tensor:
        shortcut = self.downsample_norm(self.downsample_conv(features)) if self.has_downsample else features
        features = F.relu(self.norm1(self.conv1(features)))
        features = F.relu(self.norm2(self.conv2(features)))
        return F.relu(self.norm3(self.conv3(features)) + shortcut)


class ViTScratchStdConv2d(ViTScratchModule):
    """Convolution without bias, SAME padded, by a kernel of mean 0 and deviation 1 in each output channel.

    Not an `nn.Conv2d`: an adapter or a quantiser that knows one would take the stored kernel for the one applied.
    """

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1):
        super().__init__()
        self.in_channels, self.kernel_size, self.stride = in_channels, kernel_size, stride
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size, kernel_size))
        self.initialize()

    def initialize(self) -> None:
        lecun_normal_(self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {len(self.weight)}, kernel_size={self.kernel_size}, stride={self.stride}"

    def forward(self, features: Tensor) -> Tensor:
        features = pad_same(features, self.kernel_size, self.stride)
        return F.conv2d(features, standardise(self.weight).to(features.dtype), stride=self.stride)


def standardise(weight: Tensor) -> Tensor:
    """Kernel (O, C, p, q) less its mean, over its population standard deviation, in each of the O channels.

    Computed in float32 at least: in bfloat16 the mean that is taken off would carry an error of 0.4 %.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    std, mean = torch.std_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    return (weight - mean) / (std + STANDARDISATION_EPS)


def pad_same(features: Tensor, kernel_size: int, stride: int, value: float = 0.0) -> Tensor:
    """Pads (B, C, H, W) so that a window gives ceil(H / stride) rows; what is odd goes to the bottom and the right."""
    (top, bottom), (left, right) = (_same_padding(size, kernel_size, stride) for size in features.shape[2:])
    if not (top or bottom or left or right):
        return features
    return F.pad(features, (left, right, top, bottom), value=value)


def _same_padding(size: int, kernel_size: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + kernel_size - size, 0)
    return total // 2, total - total // 2

"""From pixels to tokens: patches, class token and position embeddings (paper section 3.1, equation 1).

B images, C channels, H x W pixels, N patches on a grid of rows x columns, T tokens (class token and patches),
D hidden_size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_vit_scratch import ViTScratchConfig
from .errors_vit_scratch import InputError

__all__ = [
    "ViTScratchEmbeddings",
    "ViTScratchPatchEmbeddings",
    "resize_channels",
    "resize_patch_kernel",
    "resize_positions",
]


class ViTScratchPatchEmbeddings(nn.Module):
    """Linear projection of the flattened patches, as a convolution whose stride is its kernel."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        # Read here rather than off the projection, which an adapter may wrap.
        self.patch_size, self.num_channels = config.patch_height_width, config.num_channels
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.patch_size
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        self._check(pixel_values)
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))  # (B, D, rows, columns)
        return patches.flatten(2).transpose(1, 2)  # (B, N, D)

    def _check(self, pixel_values: Tensor) -> None:
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.num_channels:
            raise InputError(
                f"pixel_values must be (batch, {self.num_channels} channels, height, width); got "
                f"{tuple(pixel_values.shape)}; resize_input(num_channels=...) changes the channels of a model"
            )
        (height, width), (patch_height, patch_width) = pixel_values.shape[2:], self.patch_size
        if height < patch_height or width < patch_width or height % patch_height or width % patch_width:
            raise InputError(
                f"an image of {height}x{width} pixels cannot be cut into patches of {patch_height}x{patch_width}: let "
                f"the image processor resize it (resize_mode squash, shorter or pad), or crop it to "
                f"{max(1, height // patch_height) * patch_height}x{max(1, width // patch_width) * patch_width}"
            )


class ViTScratchEmbeddings(nn.Module):
    """Returns the T tokens that enter the first layer: [class] and patches, with their positions added."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.config = config
        self.patch_embeddings = ViTScratchPatchEmbeddings(config)
        if config.pooling == "class_token":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        else:
            self.register_parameter("cls_token", None)
        num_tokens = config.num_prefix_tokens + config.num_patches
        self.position_embeddings = nn.Parameter(torch.zeros(1, num_tokens, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor) -> Tensor:
        embeddings = self.patch_embeddings(pixel_values)  # (B, N, D)
        patch_height, patch_width = self.patch_embeddings.patch_size
        grid_size = (pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width)
        if self.cls_token is not None:
            embeddings = torch.cat((self.cls_token.expand(len(embeddings), -1, -1), embeddings), dim=1)  # (B, T, D)
        return self.dropout(embeddings + self.positions_for(grid_size))

    def positions_for(self, grid_size: tuple[int, int]) -> Tensor:
        """Position embeddings (1, T, D) for a grid of (rows, columns), resampled if it is not the model's own."""
        if grid_size == self.config.grid_size:
            return self.position_embeddings
        return resize_positions(
            self.position_embeddings,
            self.config.grid_size,
            grid_size,
            num_prefix_tokens=self.config.num_prefix_tokens,
            interpolation=self.config.position_interpolation,
        )


def resize_positions(
    positions: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    num_prefix_tokens: int,
    interpolation: str,
) -> Tensor:
    """Positions (1, prefix + N, D) of one grid resampled to another; those of the prefix tokens stay as they are.

    "bilinear_corners" maps corner to corner, as the official code does (its `scipy.ndimage.zoom` of order 1; where
    that function's rounding zeroes the last row, this does not). "bicubic" is that of transformers' ViT.
    """
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    patches = patches.unflatten(1, old_grid).permute(0, 3, 1, 2)  # (1, D, rows, columns)
    patches = patches.to(torch.promote_types(patches.dtype, torch.float32))
    if interpolation == "bilinear_corners":
        resized = F.interpolate(patches, size=new_grid, mode="bilinear", align_corners=True)
    else:
        resized = F.interpolate(patches, size=new_grid, mode="bicubic", align_corners=False)
    resized = resized.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)  # (1, N, D)
    return torch.cat((prefix, resized), dim=1)


def resize_patch_kernel(kernel: Tensor, new_size: tuple[int, int]) -> Tensor:
    """Patch kernel (D, C, p, q) at another patch size, by the pseudo-inverse of bilinear resizing.

    The new kernel's response to a resized patch is the old kernel's response to the patch, exactly so when patches
    grow (FlexiViT, arXiv 2212.08013, section 3.4).
    """
    old_size = (kernel.shape[2], kernel.shape[3])
    num_pixels = old_size[0] * old_size[1]
    basis = torch.eye(num_pixels, dtype=torch.float64, device=kernel.device).view(num_pixels, 1, *old_size)
    resize = F.interpolate(basis, size=new_size, mode="bilinear", align_corners=False, antialias=True)
    resize = resize.flatten(1)  # (old pixels, new pixels): a patch as a row times this is the resized patch
    new_kernel = kernel.flatten(2).double() @ torch.linalg.pinv(resize).mT
    return new_kernel.unflatten(2, new_size).to(kernel.dtype)


def resize_channels(kernel: Tensor, num_channels: int) -> Tensor:
    """Patch kernel (D, C, p, q) for another number of channels: summed into one, or tiled and scaled by C_old / C_new.

    So a grey image keeps its response when three channels become one and when one becomes three.
    """
    old = kernel.shape[1]
    if num_channels == 1:
        return kernel.sum(dim=1, keepdim=True)
    return kernel.repeat(1, -(-num_channels // old), 1, 1)[:, :num_channels] * (old / num_channels)

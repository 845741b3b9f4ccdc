"""From pixels to tokens: patches, class token and position embeddings (paper section 3.1, equation 1).

B images, C channels, H x W pixels, N patches on a grid of rows x columns, T tokens (class token and patches),
D hidden_size.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_vit_scratch import ViTScratchConfig
from .errors_vit_scratch import InputError
from .initialization_vit_scratch import ViTScratchModule, lecun_normal_, replace_parameter
from .positions_vit_scratch import TokenPlaces, ViTScratchPositionEmbeddings
from .resnet_stem_vit_scratch import ViTScratchResNetStem

__all__ = ["ViTScratchEmbeddings", "ViTScratchPatchEmbeddings", "resize_channels", "resize_patch_kernel"]


class ViTScratchPatchEmbeddings(ViTScratchModule):
    """Linear projection of the flattened patches, as a convolution whose stride is its kernel.

    The patches are those of the image, or in a hybrid those of a ResNet's feature map (paper section 3.1).
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        # Read here rather than off the projection, which an adapter may wrap.
        self.patch_size, self.num_channels = config.patch_height_width, config.num_channels
        self.stem = ViTScratchResNetStem(config) if config.stem_depths is not None else None
        kernel_size = _kernel_size(config)
        in_channels = config.num_channels if self.stem is None else self.stem.out_channels
        self.projection = nn.Conv2d(in_channels, config.hidden_size, kernel_size=kernel_size, stride=kernel_size)

    def initialize(self) -> None:
        lecun_normal_(self.projection.weight)
        init.zeros_(cast(Tensor, self.projection.bias))

    def forward(self, pixel_values: Tensor) -> Tensor:
        self.check(pixel_values)
        pixel_values = pixel_values.to(self.projection.weight.dtype)
        if self.stem is not None:  # hybrids
            pixel_values = self.stem(pixel_values)
        return self.projection(pixel_values).flatten(2).transpose(1, 2)  # (B, N, D)

    def resize(self, old: ViTScratchConfig, new: ViTScratchConfig) -> None:
        kernel_size, first = _kernel_size(new), self.projection if self.stem is None else self.stem.root.conv
        if new.patch_height_width != old.patch_height_width:
            replace_parameter(self.projection, "weight", resize_patch_kernel(self.projection.weight, kernel_size))
            self.projection.kernel_size = self.projection.stride = kernel_size
        if new.num_channels != old.num_channels:
            replace_parameter(first, "weight", resize_channels(first.weight, new.num_channels))
            first.in_channels = new.num_channels
        self.patch_size, self.num_channels = new.patch_height_width, new.num_channels

    def check(self, pixel_values: Tensor) -> None:
        """Raises `InputError` unless the images can be cut into whole patches."""
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


class ViTScratchEmbeddings(ViTScratchPositionEmbeddings):
    """The T tokens that enter the first layer: [class] and patches, with their positions added.

    It is itself the table of positions, so that the tensor is called `embeddings.position_embeddings`, as in
    transformers' ViT.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config, has_table=config.position_embedding_placement == "stem")
        self.patch_embeddings = ViTScratchPatchEmbeddings(config)
        if config.use_class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        if config.use_distillation_token:
            self.distillation_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        if config.num_register_tokens:
            self.register_tokens = nn.Parameter(torch.zeros(1, config.num_register_tokens, config.hidden_size))
        self.patch_dropout_rate = config.patch_dropout_rate
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self) -> None:
        super().initialize()
        if self.config.use_class_token:
            init.zeros_(self.cls_token)
        if self.config.use_distillation_token:
            init.normal_(self.distillation_token, std=0.02)  # else it may stay equal to the class token for ever
        if self.config.num_register_tokens:  # so would registers that begin equal
            init.normal_(self.register_tokens, std=0.02)

    def forward(
        self,
        pixel_values: Tensor,
        visible_patches: Tensor | None = None,
        corrupt: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, TokenPlaces]:
        """Returns the tokens (B, T, D) and where they stand.

        Args:
            pixel_values: (B, C, H, W).
            visible_patches: raster indices (B, n) of the patches to embed; None: all, but for patch dropout.
            corrupt: what is done to the patch embeddings (B, N, D) of masked patch prediction.
        """
        patches = self.patch_embeddings(pixel_values)  # (B, N, D)
        # Autocast convolves in bfloat16; what the layers add to stays in the dtype of the weights.
        patches = patches.to(self.patch_embeddings.projection.weight.dtype)
        if corrupt is not None:
            patches = corrupt(patches)
        if visible_patches is None and self.training and self.patch_dropout_rate > 0:
            visible_patches = _kept_patches(patches, self.patch_dropout_rate)
        if visible_patches is not None:
            patches = patches.gather(1, visible_patches.unsqueeze(2).expand(-1, -1, patches.shape[2]))
        patch_height, patch_width = self.patch_embeddings.patch_size
        grid_size = (pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width)
        batch_size = patches.shape[0]  # not len(patches), which torch.export takes for a constant
        tokens = torch.cat((*(token.expand(batch_size, -1, -1) for token in self._prefix()), patches), dim=1)
        places = TokenPlaces(grid_size, visible_patches)
        positions = self.positions_at(places, like=tokens)
        return self.dropout(tokens if positions is None else tokens + positions), places  # (B, T, D)

    def _prefix(self) -> list[Tensor]:
        names = {
            "cls_token": self.config.use_class_token,
            "distillation_token": self.config.use_distillation_token,
            "register_tokens": self.config.num_register_tokens > 0,
        }
        return [getattr(self, name) for name, is_there in names.items() if is_there]


def _kept_patches(patches: Tensor, rate: float) -> Tensor:
    """Raster indices (B, n), rising, of the patches that patch dropout keeps: another set for each image."""
    num_kept = max(1, round(patches.shape[1] * (1 - rate)))
    order = torch.rand(patches.shape[:2], device=patches.device).argsort(dim=1)
    return order[:, :num_kept].sort(dim=1).values


def _kernel_size(config: ViTScratchConfig) -> tuple[int, int]:
    patch_height, patch_width = config.patch_height_width
    return patch_height // config.stem_stride, patch_width // config.stem_stride


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

    So a grey image keeps its response when three channels become one and when one becomes three; behind a ResNet stem,
    whose kernels are standardised, only up to a factor for each of its channels.
    """
    old = kernel.shape[1]
    if num_channels == 1:
        return kernel.sum(dim=1, keepdim=True)
    return kernel.repeat(1, -(-num_channels // old), 1, 1)[:, :num_channels] * (old / num_channels)

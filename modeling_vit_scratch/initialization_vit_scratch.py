"""How a part of the network begins, and how it follows another input size."""

import math
from typing import Any

from torch import Tensor, nn
from transformers import initialization as init

__all__ = ["ViTScratchModule", "lecun_normal_", "replace_parameter"]


class ViTScratchModule(nn.Module):
    """A part that knows how its own tensors begin, and what becomes of them when the input changes.

    The initialisers are those of the official code; none is stated in the paper. They go through
    `transformers.initialization`, which leaves alone what was loaded.
    """

    def initialize(self) -> None:
        """Gives the tensors of this part their first values; nothing to do by default."""

    def resize(self, old: Any, new: Any) -> None:
        """Resamples the tensors that depend on image_size, patch_size or num_channels, from one config to another."""


def lecun_normal_(weight: Tensor) -> None:
    """Flax's: cut at two sigma, then scaled back to variance 1 / fan_in; the first axis is the outputs'."""
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978  # sigma of the cut unit normal
    init.trunc_normal_(weight, mean=0.0, std=std, a=-2 * std, b=2 * std)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Puts a parameter of another shape in the place of one, as trainable as that was."""
    setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=getattr(module, name).requires_grad))

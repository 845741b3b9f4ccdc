"""What may lie between a layer's update and the residual stream: LayerScale, and stochastic depth."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_vit_scratch import ViTScratchConfig
from .initialization_vit_scratch import ViTScratchModule

__all__ = ["ViTScratchLayerScale", "drop_path_rates", "forward_with_stochastic_depth"]

# Tokens (B, T, D) and what goes with them -> the update (B, T, D) and the attention weights, if there are any.
Branch = Callable[[Tensor, tuple[Any, ...] | None], tuple[Tensor, Tensor | None]]


class ViTScratchLayerScale(ViTScratchModule):
    """A learned factor for each channel of an update (arXiv 2103.17239, equation 4)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.initial = float(cast(float, config.layer_scale_init))
        self.lambda1 = nn.Parameter(torch.full((config.hidden_size,), self.initial))

    def initialize(self) -> None:
        init.constant_(self.lambda1, self.initial)

    def forward(self, update: Tensor) -> Tensor:
        return update * self.lambda1


def drop_path_rates(config: ViTScratchConfig) -> list[float]:
    """How often each layer is skipped in training: from 0 at the first, linearly to `drop_path_rate` at the last."""
    last = max(1, config.num_hidden_layers - 1)
    return [config.drop_path_rate * index / last for index in range(config.num_hidden_layers)]


def forward_with_stochastic_depth(
    layer: nn.Module,
    hidden_states: Tensor,
    token_positions: tuple[Any, ...] | None,
    output_attentions: bool,
    class_token_only: bool,
) -> tuple[Tensor, Tensor | None]:
    """The forward of a ViTScratchLayer in training at `layer.drop_path_rate`; each branch is dropped by itself."""
    attention_branch, mlp_branch = cast(Any, layer.attention_branch), cast(Any, layer.mlp_branch)
    hidden_states, weights = _add_for_some_images(
        hidden_states,
        lambda tokens, token_positions: attention_branch(tokens, token_positions, output_attentions, class_token_only),
        token_positions,
        cast(float, layer.drop_path_rate),
        skip=not output_attentions,
    )
    hidden_states, _ = _add_for_some_images(
        hidden_states, lambda tokens, _: (mlp_branch(tokens), None), None, cast(float, layer.drop_path_rate)
    )
    return hidden_states, weights


def _add_for_some_images(
    hidden_states: Tensor, branch: Branch, token_positions: tuple[Any, ...] | None, rate: float, *, skip: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Adds the branch's update, divided by 1 - rate, for an image with probability 1 - rate.

    The branch runs for these images only. Their number is B (1 - rate) to the next whole number above or below, drawn
    so that its mean is exact. Where every image is needed (attentions are asked for) or the number must be known
    beforehand (compiled graphs), the branch runs for all of them and its update is masked: the same in expectation.
    """
    num_images = hidden_states.shape[0]
    if not skip or torch.compiler.is_compiling():
        update, weights = branch(hidden_states, token_positions)
        mask = torch.rand(num_images, 1, 1, device=update.device) >= rate
        return hidden_states[:, : update.shape[1]] + update * mask / (1 - rate), weights
    num_kept = int(num_images * (1 - rate) + torch.rand(()).item())
    images = torch.randperm(num_images, device=hidden_states.device)[: max(1, num_kept)]
    update, _ = branch(hidden_states[images], _of_images(token_positions, images))
    # With none to keep one runs all the same, for nothing: its parameters must have a gradient on every rank.
    scale = 1 / (1 - rate) if num_kept else 0.0
    hidden_states = hidden_states[:, : update.shape[1]]
    return hidden_states.index_add(0, images, update.to(hidden_states.dtype), alpha=scale), None


def _of_images(token_positions: tuple[Any, ...] | None, images: Tensor) -> tuple[Any, ...] | None:
    """The positions of these images; tensors whose first axis is 1 hold for all."""
    if token_positions is None:
        return None
    return tuple(part[images] if isinstance(part, Tensor) and len(part) > 1 else part for part in token_positions)

"""The attention head (MAP) of Scaling Vision Transformers (https://arxiv.org/abs/2106.04560, section 3.2).

B images, N patches, D hidden_size, A heads, d head_dim = D / A.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_vit_scratch import ViTScratchConfig
from .initialization_vit_scratch import ViTScratchModule

__all__ = ["ViTScratchAttentionPooling"]


class ViTScratchProbeAttention(ViTScratchModule):
    """Attention of one query to the patch tokens."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def initialize(self) -> None:
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            init.xavier_uniform_(projection.weight)
            init.zeros_(projection.bias)

    def forward(self, query_token: Tensor, hidden_states: Tensor) -> Tensor:
        query, key, value = (
            projected.unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # (B, A, 1 or N, d)
            for projected in (self.q_proj(query_token), self.k_proj(hidden_states), self.v_proj(hidden_states))
        )
        context = F.scaled_dot_product_attention(query, key, value)  # (B, A, 1, d)
        return self.o_proj(context.transpose(1, 2).flatten(2))  # (B, 1, D)


class ViTScratchAttentionPooling(ViTScratchModule):
    """A learned probe attends to the patch tokens, without a residual connection; an MLP with one follows."""

    def __init__(self, config: ViTScratchConfig, mlp: nn.Module):
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.attention = ViTScratchProbeAttention(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = mlp

    def initialize(self) -> None:
        limit = math.sqrt(6 / (1 + self.probe.shape[2]))  # Flax's xavier_uniform of a (1, 1, D) tensor
        init.uniform_(self.probe, -limit, limit)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns (B, D) for patch tokens (B, N, D)."""
        pooled = self.attention(self.probe.expand(hidden_states.shape[0], -1, -1), hidden_states)
        return (pooled + self.mlp(self.layernorm(pooled))).squeeze(1)

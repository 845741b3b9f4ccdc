"""SwiGLU (https://arxiv.org/abs/2002.05202) in the place of the MLP, as in DINOv2 and DINOv3's largest models."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_vit_scratch import ViTScratchConfig
from .initialization_vit_scratch import ViTScratchModule

__all__ = ["ViTScratchSwiGLU"]


class ViTScratchSwiGLU(ViTScratchModule):
    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def initialize(self) -> None:
        for dense in (self.gate_proj, self.up_proj, self.down_proj):
            init.xavier_uniform_(dense.weight)
            init.normal_(dense.bias, std=1e-6)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.dropout(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)))

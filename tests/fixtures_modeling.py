"""Small models and inputs shared by the modeling tests; everything is seeded."""

from typing import Any

import torch
from torch import Tensor, nn

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel

TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def tiny_config(**fields: Any) -> ViTScratchConfig:
    """Returns a config of 16 patches, 2 layers and 7 classes; `fields` override."""
    labels = {} if {"id2label", "label2id", "num_labels"} & fields.keys() else {"num_labels": 7}
    return ViTScratchConfig(**{**TINY, **labels, **fields})


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draws every tensor anew, large enough that no part of the network can hide behind zeros or saturation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_scale = "layernorm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_scale else 0.2 * noise)


def tiny_classifier(
    seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any
) -> ViTScratchForImageClassification:
    """Returns a tiny classifier in evaluation mode with `randomize`d weights."""
    model = ViTScratchForImageClassification(tiny_config(**fields)).to(dtype).eval()
    randomize(model, seed)
    return model


def tiny_encoder(seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> ViTScratchModel:
    """Returns a tiny encoder in evaluation mode with `randomize`d weights."""
    model = ViTScratchModel(tiny_config(**fields)).to(dtype).eval()
    randomize(model, seed)
    return model


def random_pixels(
    batch: int = 2, height: int = 32, width: int = 32, channels: int = 3, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns (batch, channels, height, width), standard normal."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, height, width, generator=generator, dtype=torch.float64).to(dtype)

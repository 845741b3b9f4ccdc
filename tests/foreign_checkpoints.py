"""What the tests of foreign checkpoints share beside the fixtures."""

from pathlib import Path

import torch
from fixtures_training import Outcome, call

__all__ = ["DIGITS", "VIT", "convert", "images", "randomized"]

DIGITS = list("0123456789")
VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def convert(source: Path | str, folder: Path, *more: object) -> Outcome:
    outcome = call("convert", source, "--output_dir", folder, *more)
    assert outcome.code == 0, outcome.err
    return outcome


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))

"""Checkpoints of other codes, tiny, and the command that converts them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_modeling import tiny_classifier
from fixtures_training import Outcome, call
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from modeling_vit_scratch import ViTScratchImageProcessor
from modeling_vit_scratch.convert_npz_vit_scratch import to_npz

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


@pytest.fixture(scope="session")
def vit_folder(tmp_path_factory) -> Path:
    """transformers' ViT with the digits as classes and pixels of its own."""
    folder = tmp_path_factory.mktemp("vit")
    labels = {"id2label": dict(enumerate(DIGITS)), "label2id": {name: index for index, name in enumerate(DIGITS)}}
    randomized(ViTForImageClassification(ViTConfig(**VIT, **labels))).save_pretrained(folder)
    pixels = {"size": {"height": 32, "width": 32}, "image_mean": [0.3] * 3, "image_std": [0.2] * 3, "resample": 3}
    ViTImageProcessor(**pixels).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def npz_file(tmp_path_factory) -> Path:
    """A classifier of three classes without names, in Google's format."""
    path = tmp_path_factory.mktemp("npz") / "weights.npz"
    model = tiny_classifier(num_labels=3)
    np.savez(path, **to_npz(model, ViTScratchImageProcessor.from_config(model.config)))
    return path


def convert(source: Path | str, folder: Path, *more: object) -> Outcome:
    outcome = call("convert", source, "--output_dir", folder, *more)
    assert outcome.code == 0, outcome.err
    return outcome


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def repo(online, vit_folder) -> str:
    """The transformers folder as alice/vit, beside files that hold or are code."""
    online.create("alice/vit")
    files = {path.name: path.read_bytes() for path in vit_folder.iterdir()}
    online.write("alice/vit", {**files, "pytorch_model.bin": b"pickled", "modeling_vit.py": b"raise SystemExit"})
    return "alice/vit"

"""Checkpoints of other codes, tiny: folders, files and a repo."""

from pathlib import Path

import numpy as np
import pytest
from fixtures_modeling import tiny_classifier
from foreign_checkpoints import DIGITS, VIT, randomized
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from modeling_vit_scratch import ViTScratchImageProcessor
from modeling_vit_scratch.convert_npz_vit_scratch import to_npz


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


@pytest.fixture
def repo(online, vit_folder) -> str:
    """The transformers folder as alice/vit, beside files that hold or are code."""
    online.create("alice/vit")
    files = {path.name: path.read_bytes() for path in vit_folder.iterdir()}
    online.write("alice/vit", {**files, "pytorch_model.bin": b"pickled", "modeling_vit.py": b"raise SystemExit"})
    return "alice/vit"

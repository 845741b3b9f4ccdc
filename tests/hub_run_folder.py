"""A small but real run folder: its figures are computed from its own predictions on the digits."""

import hashlib
import json
import os
import platform
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support
from sklearn.model_selection import train_test_split

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchImageProcessor

CLASSES = [str(digit) for digit in range(10)]
RECIPE = {
    "verb": "pretrain",
    "dataset_name": "digits",
    "output_dir": "/home/somebody/runs/digits",
    "optimizer": "adamw",
    "learning_rate": 0.001,
    "num_train_epochs": 1,
    "global_batch_size": 64,
    "seed": 0,
}
# What a run costs: the card repeats it, no test measures it.
TRAINING = {
    "num_train_samples": 1437,
    "global_batch_size": 64,
    "num_steps": 1,
    "num_epochs": 1.0,
    "elapsed_seconds": 1.5,
    "cpu_seconds": 1.25,
    "images_per_second": 958.0,
    "final_train_loss": 0.5,
    "world_size": 1,
}


def make_run_folder(folder: Path) -> Path:
    """Returns `folder`, holding what a training run leaves: a tiny ViT whose head was solved for on the digits."""
    torch.manual_seed(0)
    (folder / "figures").mkdir(parents=True)
    model = ViTScratchForImageClassification(_tiny_config()).eval()
    processor = ViTScratchImageProcessor.from_config(model.config)
    digits = load_digits()
    images = np.repeat((digits.images * 255 / 16).round().astype(np.uint8)[..., None], 3, axis=-1)
    train, test = train_test_split(np.arange(len(images)), test_size=360, random_state=0, stratify=digits.target)
    pixels = processor(list(images), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        _solve_head(model, pixels[train], torch.from_numpy(digits.target[train]))
        logits = model(pixels[test]).logits
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    _write_json(folder / "metrics.json", _metrics(digits.target[test], logits))
    _write_json(folder / "data.json", _data(train, test, digits.target))
    _write_json(folder / "environment.json", _environment())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    matrix = confusion_matrix(digits.target[test], logits.argmax(-1))
    pictures = {
        "learning_curves": images[0],
        "confusion_matrix": matrix * 255 // matrix.max(),
        "attention_rollout": images[1],
    }
    for name, picture in pictures.items():
        Image.fromarray(picture.astype(np.uint8)).resize((64, 64)).save(folder / "figures" / f"{name}.png")
    return folder


def _tiny_config() -> ViTScratchConfig:
    return ViTScratchConfig(
        image_size=8,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        id2label=dict(enumerate(CLASSES)),
    )


def _solve_head(model: ViTScratchForImageClassification, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    """Sets the classifier to the least-squares fit from the features it reads."""
    features: list[torch.Tensor] = []
    handle = model.classifier.register_forward_pre_hook(lambda module, inputs: features.append(inputs[0]))
    model(pixels)
    handle.remove()
    inputs = torch.cat([features[0], torch.ones(len(labels), 1)], dim=1)
    targets = torch.nn.functional.one_hot(labels, len(CLASSES)).float()
    solution = torch.linalg.lstsq(inputs, targets).solution
    model.classifier.weight.copy_(8 * solution[:-1].T)
    model.classifier.bias.copy_(8 * solution[-1])


def _metrics(labels: np.ndarray, logits: torch.Tensor) -> dict:
    predictions = logits.argmax(-1).numpy()
    precision, recall, f1, support = precision_recall_fscore_support(labels, predictions, zero_division=0)
    num_correct, n = int((predictions == labels).sum()), len(labels)
    value, z = num_correct / n, 1.959964
    centre, half = value + z**2 / (2 * n), z * np.sqrt(value * (1 - value) / n + z**2 / (4 * n**2))
    top_5 = logits.topk(5).indices.numpy() == labels[:, None]
    confidence = logits.softmax(-1).amax(-1).numpy()
    rows = zip(CLASSES, support, precision, recall, f1, strict=True)
    names = ("label", "num_samples", "precision", "recall", "f1")
    return {
        "schema_version": 1,
        "evaluation": {
            "split": "test",
            "num_samples": n,
            "loss": torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).item(),
            "accuracy": {
                "value": value,
                "low": (centre - half) / (1 + z**2 / n),
                "high": (centre + half) / (1 + z**2 / n),
                "confidence": 0.95,
                "interval": "wilson",
                "num_correct": num_correct,
            },
            "top_5_accuracy": top_5.any(1).mean().item(),
            "balanced_accuracy": recall.mean().item(),
            "macro_f1": f1_score(labels, predictions, average="macro"),
            "expected_calibration_error": abs(confidence.mean().item() - value),  # one bin
            "per_class": [
                dict(zip(names, (label, int(count), float(p), float(r), float(f)), strict=True))
                for label, count, p, r, f in rows
            ],
            "confusion_matrix": confusion_matrix(labels, predictions).tolist(),
        },
        "training": TRAINING,
    }


def _data(train: np.ndarray, test: np.ndarray, labels: np.ndarray) -> dict:
    def split(rows: np.ndarray) -> dict:
        text = "".join(f"digits/{row} {labels[row]}\n" for row in rows)
        return {
            "num_samples": len(rows),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "origin": "carved from train",
        }

    return {
        "schema_version": 1,
        "dataset": "digits",
        "kind": "digits",
        "revision": None,
        "source": "Handwritten digits of 8x8 pixels that come with scikit-learn",
        "license": "CC BY 4.0",
        "num_classes": 10,
        "class_names": CLASSES,
        "splits": {"train": split(train), "test": split(test)},
        "split_seed": 0,
        "inferred": {},
        "dropped": [],
    }


def _environment() -> dict:
    return {
        "schema_version": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": platform.machine(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "accelerator": None,
        "packages": {"torch": torch.__version__, "transformers": transformers.__version__},
        "git_commit": None,
        "date": "2030-01-02T03:04:05+00:00",
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))


def edit_json(path: Path, **fields: object) -> None:
    """Sets fields of a JSON file; a dotted name reaches into it, with `__` for the dot."""
    content = json.loads(path.read_text())
    for name, value in fields.items():
        *outer, last = name.split("__")
        place = content
        for part in outer:
            place = place[part]
        place[last] = value
    _write_json(path, content)

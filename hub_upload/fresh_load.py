"""Prints, as one line of JSON, how a published folder or repository behaves for somebody who has only transformers.

Run as a file in a fresh process: `python -P fresh_load.py SOURCE GOLDEN [--revision R]`. It imports nothing of this
project: the registered package would win over the code that the repository carries.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open

__all__ = ["golden_images", "replay_golden"]


def golden_images(path: str | Path) -> list[Image.Image]:
    """Returns the golden input images in their order: RGB, 8 bits a channel."""
    with safe_open(str(path), framework="numpy") as file:
        names = sorted(name for name in file.keys() if name.startswith("image_"))  # noqa: SIM118
        return [Image.fromarray(file.get_tensor(name)) for name in names]


@torch.no_grad()
def replay_golden(path: str | Path, model: Any, processor: Any) -> dict[str, Any]:
    """Returns the largest differences to the recorded pixel_values and logits, and where the logits differ most.

    The logits are computed from the recorded pixel_values, so that a resize that rounds differently on another machine
    shows as a pixel difference only.
    """
    with safe_open(str(path), framework="pt") as file:
        pixel_values, logits = file.get_tensor("pixel_values"), file.get_tensor("logits")
    images = golden_images(path)
    pixels = torch.cat([processor([image], return_tensors="pt")["pixel_values"] for image in images])
    if pixels.shape != pixel_values.shape:
        raise ValueError(f"the processor gives {tuple(pixels.shape)}, the golden has {tuple(pixel_values.shape)}")
    answer = model.eval()(pixel_values).logits
    if answer.shape != logits.shape:
        raise ValueError(f"the model gives logits {tuple(answer.shape)}, the golden has {tuple(logits.shape)}")
    # A NaN compares as no difference, so it is turned into an infinite one.
    differences = (answer - logits).abs().nan_to_num(nan=torch.inf)
    image, label = divmod(int(differences.argmax()), logits.shape[1])
    return {
        "max_logit_difference": differences.max().item(),
        "max_logit": logits.abs().max().item(),
        "at_image": image,
        "at_class": label,
        "min_std": float(torch.tensor(processor.image_std).min()),
        "max_pixel_difference": (pixels - pixel_values).abs().nan_to_num(nan=torch.inf).max().item(),
    }


def _load_everything(source: str, revision: str | None) -> dict[str, Any]:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

    remote: dict[str, Any] = {"trust_remote_code": True, "revision": revision}
    # float32 whatever the file holds: the golden was made so, and half precision differs from machine to machine.
    return {
        "AutoConfig": AutoConfig.from_pretrained(source, **remote),
        "AutoModel": AutoModel.from_pretrained(source, dtype=torch.float32, **remote),
        "AutoModelForImageClassification": AutoModelForImageClassification.from_pretrained(
            source, dtype=torch.float32, **remote
        ),
        "AutoImageProcessor": AutoImageProcessor.from_pretrained(source, **remote),
        "pipeline": pipeline("image-classification", model=source, dtype=torch.float32, device="cpu", **remote),
    }


def _check_base_model(base: Any, classifier: Any) -> None:
    """Raises ValueError where AutoModel did not get the classifier's weights."""
    prefix = classifier.base_model_prefix + "."
    weights = classifier.state_dict()
    expected = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    got = base.state_dict()
    differing = sorted(expected.keys() ^ got.keys())
    differing += [name for name in expected.keys() & got.keys() if not torch.equal(expected[name], got[name])]
    if differing:
        raise ValueError(f"AutoModel differs from the classifier's body in {', '.join(differing)}")


def _check_labels(config: Any, num_classes: int) -> None:
    # In any order: transformers' files hold the keys as text, in the order 0, 1, 10, 2.
    if odd := set(config.id2label) ^ set(range(num_classes)):
        raise ValueError(
            f"id2label must have the int keys 0..{num_classes - 1}; odd or missing: {sorted(odd, key=str)}"
        )
    if config.label2id != {label: index for index, label in config.id2label.items()}:
        raise ValueError("label2id is not the inverse of id2label")


@torch.no_grad()
def _check_pipeline(classify: Any, model: Any, processor: Any, image: Image.Image) -> list[dict[str, Any]]:
    """Returns the pipeline's answer; raises ValueError where it is not the one of processor and model."""
    logits = model(processor([image], return_tensors="pt")["pixel_values"]).logits[0]
    multi_label = model.config.problem_type == "multi_label_classification"
    scores = logits.sigmoid() if multi_label else logits.softmax(dim=-1)
    answer = classify(image, top_k=len(scores))
    for item in answer:
        expected = scores[model.config.label2id[item["label"]]].item()
        if abs(item["score"] - expected) > 1e-4:
            raise ValueError(f"pipeline scores {item['label']!r} {item['score']:.6f}, the model {expected:.6f}")
    if len(answer) != len(scores):
        raise ValueError(f"pipeline names {len(answer)} of {len(scores)} classes")
    return answer[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="folder or repository id")
    parser.add_argument("golden", help="golden.safetensors")
    parser.add_argument("--revision")
    arguments = parser.parse_args()

    loaded = _load_everything(arguments.source, arguments.revision)
    model, processor = loaded["AutoModelForImageClassification"], loaded["AutoImageProcessor"]
    report = replay_golden(arguments.golden, model, processor)
    _check_base_model(loaded["AutoModel"], model)
    _check_labels(model.config, report_classes := model.config.num_labels)
    report["top_3"] = _check_pipeline(loaded["pipeline"], model, processor, golden_images(arguments.golden)[0])
    report["num_classes"] = report_classes
    report["classes"] = {name: type(thing).__module__ + "." + type(thing).__name__ for name, thing in loaded.items()}
    local = sorted(name for name, where in report["classes"].items() if not where.startswith("transformers_modules."))
    if local or "modeling_vit_scratch" in sys.modules:
        raise ValueError(f"not loaded from the repository's own code: {', '.join(local) or 'modeling_vit_scratch'}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

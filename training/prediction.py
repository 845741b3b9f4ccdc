"""`vit-scratch predict`: classify images and folders of images."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from modeling_vit_scratch.errors_vit_scratch import InputError
from training.evaluation import probabilities_of
from training.parsing import FlagParser
from training.pretrained import class_names_of, load_classifier, load_processor
from training.run_folder import replace_file

__all__ = ["predict"]

logger = logging.getLogger(__name__)

# What Pillow opens of the formats the image policy names; other files of a folder are not images.
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp"}


@torch.inference_mode()
def predict(
    source: str,
    images: list[str],
    *,
    revision: str | None = None,
    batch_size: int = 32,
    top_k: int = 5,
    on_broken_image: str = "raise",
) -> Iterator[dict[str, Any]]:
    """Yields {"image": path, "predictions": [{"label", "score"}, ...]} for every image, likeliest label first."""
    model, processor = load_classifier(source, revision), load_processor(source, revision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.eval().to(device)
    names = class_names_of(model.config)
    paths = list_images(images)
    for start in tqdm(range(0, len(paths), batch_size), desc="predict", unit="batch"):
        readable, pixel_values = [], []
        for path in paths[start : start + batch_size]:
            try:
                pixel_values.append(processor(str(path))["pixel_values"][0])
                readable.append(path)
            except InputError as error:
                if on_broken_image == "raise":
                    raise
                logger.warning("skipped: %s", error)
        if not readable:
            continue
        logits = model(pixel_values=torch.stack(pixel_values).to(device)).logits.float().cpu()
        scores, classes = torch.from_numpy(probabilities_of(logits.numpy(), model)).topk(min(top_k, len(names)), dim=1)
        for path, row_scores, row_classes in zip(readable, scores.tolist(), classes.tolist(), strict=True):
            predictions = [
                {"label": names[index], "score": score} for score, index in zip(row_scores, row_classes, strict=True)
            ]
            yield {"image": str(path), "predictions": predictions}


def list_images(places: list[str]) -> list[Path]:
    """Returns the images that files and folders name, folders searched to any depth in the order of names."""
    paths: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            found = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
            if not found:
                raise InputError(f"{place} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
            paths += found
        elif place.is_file():
            paths.append(place)
        else:
            raise InputError(f"{place}: no such file or folder")
    return paths


def main(argv: list[str], prog: str = "vit-scratch predict") -> int:
    parser = FlagParser(prog=prog, description="Classify images and folders of images.")
    parser.add_argument("model", help="folder or Hub repo of the model")
    parser.add_argument("images", nargs="+", help="images, or folders of images")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub model")
    parser.add_argument("--output", help="a .csv or .jsonl file; default: print")
    parser.add_argument("--top_k", type=int, default=5, help="labels an image [5]")
    parser.add_argument("--batch_size", type=int, default=32, help="images at once [32]")
    parser.add_argument("--on_broken_image", choices=["raise", "skip"], default="raise", help="[raise]")
    arguments = parser.parse_args(argv)
    rows = predict(
        arguments.model,
        arguments.images,
        revision=arguments.revision,
        batch_size=arguments.batch_size,
        top_k=arguments.top_k,
        on_broken_image=arguments.on_broken_image,
    )
    if arguments.output is None:
        for row in rows:
            print(row["image"], *(f"{item['label']} {item['score']:.4f}" for item in row["predictions"]), sep="\t")
        return 0
    if Path(arguments.output).suffix not in (".csv", ".jsonl"):
        raise InputError(f"--output {arguments.output} must end in .csv or .jsonl")
    with replace_file(arguments.output) as incomplete:
        _write(list(rows), incomplete, Path(arguments.output).suffix)
    print(arguments.output)
    return 0


def _write(rows: list[dict[str, Any]], path: Path, suffix: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        if suffix == ".jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            return
        writer = csv.writer(file)
        ranks = range(1, 1 + max((len(row["predictions"]) for row in rows), default=0))
        writer.writerow(["image", *(f"{what}_{rank}" for rank in ranks for what in ("label", "score"))])
        for row in rows:
            writer.writerow([row["image"], *(part for item in row["predictions"] for part in item.values())])


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(["predict", *sys.argv[1:]]))

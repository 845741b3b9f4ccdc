"""`vit-scratch predict`: classify images and folders of images."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.parsing import FlagParser

if TYPE_CHECKING:
    import torch

    from modeling_vit_scratch import ViTScratchImageProcessor

# The rest is imported where it is used, so that --help answers at once.

__all__ = ["predict"]

logger = logging.getLogger(__name__)


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
    import torch
    from tqdm.auto import tqdm

    from training.metrics import class_probabilities
    from training.pretrained import class_names_of, load_classifier, load_processor

    paths = list_images(images)
    model, processor = load_classifier(source, revision), load_processor(source, revision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.eval().to(device)
    names = class_names_of(model.config)
    with tqdm(total=len(paths), desc="predict", unit="image") as bar:
        for start in range(0, len(paths), batch_size):
            readable = _read_images(paths[start : start + batch_size], processor, on_broken_image)
            # Only with resize_mode none do sizes differ, and a batch has one.
            for _, group in itertools.groupby(readable, key=lambda image: image[1].shape):
                batch_paths, pixel_values = zip(*group, strict=True)
                with torch.inference_mode():
                    logits = model(pixel_values=torch.stack(pixel_values).to(device)).logits.float().cpu()
                for path, scores in zip(
                    batch_paths, class_probabilities(logits.numpy(), model.config.problem_type), strict=True
                ):
                    likeliest = scores.argsort()[::-1][:top_k]
                    predictions = [{"label": names[index], "score": float(scores[index])} for index in likeliest]
                    yield {"image": _as_text(path), "predictions": predictions}
            bar.update(min(batch_size, len(paths) - start))


def _read_images(
    paths: list[Path], processor: ViTScratchImageProcessor, on_broken_image: str
) -> list[tuple[Path, torch.Tensor]]:
    from modeling_vit_scratch.errors_vit_scratch import InputError

    readable = []
    for path in paths:
        try:
            readable.append((path, processor(str(path))["pixel_values"][0]))
        except InputError as error:
            if on_broken_image == "raise":
                raise
            logger.warning("skipped: %s", error)
    return readable


def _as_text(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")  # file names are bytes, outputs are text


def list_images(places: list[str]) -> list[Path]:
    """Returns the images that files and folders name, folders searched to any depth in the order of names."""
    from modeling_vit_scratch.errors_vit_scratch import InputError
    from training.image_folders import IMAGE_SUFFIXES, UNREAD_IMAGE_SUFFIXES

    paths: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            files = sorted(path for path in place.rglob("*") if not path.is_dir() and _is_visible(path, place))
            found = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
            unread = [path for path in files if path.suffix.lower() in UNREAD_IMAGE_SUFFIXES]
            if unread:
                logger.warning("%d images in formats that are not read are left out: %s, ...", len(unread), unread[0])
            if not found:
                raise InputError(f"{place} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
            paths += found
        elif place.is_file():
            paths.append(place)
        else:
            raise InputError(f"{place}: no such file or folder")
    return paths


def _is_visible(path: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(folder).parts)


def main(argv: list[str], prog: str = "vit-scratch predict") -> int:
    parser = FlagParser(prog=prog, description="Classify images and folders of images.")
    parser.add_argument("model", help="model, of ours or another code: folder, file or Hub repo")
    parser.add_argument("images", nargs="+", help="images, or folders of images")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub model")
    parser.add_argument("--output", help="a .csv or .jsonl file; default: print")
    parser.add_argument("--top_k", type=_positive, default=5, help="labels an image [5]")
    parser.add_argument("--batch_size", type=_positive, default=32, help="images at once [32]")
    parser.add_argument("--on_broken_image", choices=["raise", "skip"], default="raise", help="[raise]")
    arguments = parser.parse_args(argv)
    from training.run_folder import replace_file

    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        _check_output(output)
    rows = predict(
        arguments.model,
        arguments.images,
        revision=arguments.revision,
        batch_size=arguments.batch_size,
        top_k=arguments.top_k,
        on_broken_image=arguments.on_broken_image,
    )
    if output is None:
        for row in rows:
            print(row["image"], *(f"{item['label']} {item['score']:.4f}" for item in row["predictions"]), sep="\t")
        return 0
    found = list(rows)
    with replace_file(output) as incomplete:
        _write(found, incomplete, output.suffix)
    print(output)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _check_output(path: Path) -> None:
    from modeling_vit_scratch.errors_vit_scratch import InputError

    if path.suffix not in (".csv", ".jsonl"):
        raise InputError(f"--output {path} must end in .csv or .jsonl")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: there is no folder {path.parent}; make it first")


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

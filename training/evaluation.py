"""Evaluation of a model on a split: logits in float32 over all ranks, and the figures made of them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, Subset
from tqdm.auto import tqdm

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch.errors_vit_scratch import InputError
from training import run_folder
from training.arguments import DataArguments, EvaluateRecipe
from training.conversion import CONVERSION_FILE
from training.data import ImageDataset, LabelledImages, load_image_dataset
from training.image_tensors import EvaluationImages
from training.metrics import class_probabilities, evaluate_predictions
from training.pretrained import class_names_of, conversion_of, forget_converted, load_classifier, load_processor

__all__ = ["evaluate", "load_images_for", "num_decoding_processes", "predict_logits", "stack_images"]

logger = logging.getLogger(__name__)


def evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Returns the "evaluation" block of metrics.json for a stored model and a split."""
    arguments = recipe.evaluation
    if arguments.model_name_or_path is None:
        raise InputError("--model_name_or_path is missing: name the folder, file or Hub repo of the model")
    PartialState(cpu=not torch.cuda.is_available())  # before any other: the first call says how ranks talk
    if arguments.output_dir is not None:
        _check_output_dir(Path(arguments.output_dir))
    model = load_classifier(arguments.model_name_or_path, arguments.revision)
    processor = load_processor(arguments.model_name_or_path, arguments.revision)
    conversion = conversion_of(arguments.model_name_or_path, arguments.revision)
    forget_converted()
    dataset = load_images_for(model.config, recipe.data, arguments.model_name_or_path)
    images = dataset.split(arguments.split)
    if images is None:
        raise InputError(f"--split {arguments.split}: the dataset has none; --{arguments.split}_fraction carves one")
    logits = predict_logits(
        model, processor, images, batch_size=arguments.batch_size, num_workers=num_decoding_processes(recipe.data)
    )
    evaluation = evaluate_predictions(
        logits, images.labels, dataset.class_names, problem_type=model.config.problem_type, split=arguments.split
    )
    if arguments.output_dir is not None and PartialState().is_main_process:
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        run_folder.write_json(folder / run_folder.METRICS_FILE, {"evaluation": evaluation})
        if conversion is not None:
            run_folder.write_json(folder / CONVERSION_FILE, conversion)
        run_folder.write_predictions(
            folder / run_folder.PREDICTIONS_FILE,
            sample_ids=images.sample_ids,
            labels=images.labels,
            probabilities=class_probabilities(logits, model.config.problem_type),
        )
    return evaluation


def load_images_for(config: ViTScratchConfig, arguments: DataArguments, source: str) -> ImageDataset:
    """Returns the dataset in the order of the model's classes, whose names `config` gets where it has none."""
    stored = class_names_of(config)
    if stored != [f"LABEL_{index}" for index in range(len(stored))]:
        return load_image_dataset(arguments, class_names=stored)
    dataset = load_image_dataset(arguments)  # those are transformers' names for classes without one
    if len(dataset.class_names) != len(stored):
        raise InputError(
            f"{source} has {len(stored)} classes without names, and {dataset.description['dataset']} has "
            f"{len(dataset.class_names)} classes; name the dataset it was trained on, or fine-tune with a new head"
        )
    logger.warning("the classes of %s have no names: they are taken for those of the dataset, in its order", source)
    config.id2label = dict(enumerate(dataset.class_names))
    config.label2id = {name: index for index, name in enumerate(dataset.class_names)}
    return dataset


def _check_output_dir(folder: Path) -> None:
    for name in (run_folder.METRICS_FILE, run_folder.PREDICTIONS_FILE, CONVERSION_FILE):
        if (folder / name).exists():
            raise InputError(f"--output_dir {folder} already holds {name}: name another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file: name a folder")


def num_decoding_processes(arguments: DataArguments) -> int:
    """Returns what the recipe asks for, or one a core that no other rank of this machine uses."""
    if arguments.dataloader_num_workers is not None:
        return arguments.dataloader_num_workers
    return run_folder.num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@torch.inference_mode()
def predict_logits(
    model: ViTScratchForImageClassification,
    processor: ViTScratchImageProcessor,
    images: LabelledImages,
    *,
    batch_size: int,
    num_workers: int = 0,
) -> np.ndarray:
    """Returns logits (N, K) float32 in the order of the rows, computed in float32, shared by all ranks."""
    state = PartialState()
    rows = range(state.process_index, len(images), state.num_processes)
    loader = DataLoader(
        Subset(EvaluationImages(images, processor), rows),
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=stack_images,
    )
    model.eval().to(state.device)
    logits = [
        model(pixel_values=batch["pixel_values"].to(state.device)).logits.float().cpu()
        for batch in tqdm(loader, desc=f"evaluate {images.name}", unit="batch", disable=not state.is_main_process)
    ]
    own = list(zip(rows, torch.cat(logits).numpy(), strict=True)) if logits else []
    ordered = dict(gather_object(own) if state.num_processes > 1 else own)
    return np.stack([ordered[row] for row in range(len(images))])


def stack_images(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns the batch (B, C, H, W) with its labels (B,)."""
    sizes = {f"{sample['pixel_values'].shape[-2]}x{sample['pixel_values'].shape[-1]}" for sample in samples}
    if len(sizes) > 1:
        raise InputError(
            f"images of {' and '.join(sorted(sizes))} pixels (height x width) are in one batch, and resize_mode none "
            f"keeps their sizes: choose resize_mode squash, shorter or pad, or give them one size"
        )
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def main(recipe: EvaluateRecipe) -> int:
    evaluation = evaluate(recipe)
    if PartialState().is_main_process:
        print(accuracy_line(evaluation))
    PartialState().destroy_process_group()  # or some runs abort at exit
    return 0


def accuracy_line(evaluation: dict[str, Any]) -> str:
    """One line with the accuracy, the number of images and Wilson's interval."""
    accuracy = evaluation["accuracy"]
    return (
        f"{evaluation['split']} accuracy {accuracy['value']:.2%} "
        f"({accuracy['num_correct']} of {evaluation['num_samples']}; "
        f"{accuracy['confidence']:.0%} interval {accuracy['low']:.2%} to {accuracy['high']:.2%})"
    )


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(["evaluate", *sys.argv[1:]]))

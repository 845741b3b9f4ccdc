"""Going on with a run: which checkpoint, under which settings, with which images."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import torch
from accelerate import PartialState

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch.errors_vit_scratch import InputError
from training import checkpoints, run_folder
from training.arguments import (
    FinetuneRecipe,
    NetworkArguments,
    PixelArguments,
    PretrainRecipe,
    StartArguments,
    flat,
)
from training.data import ImageDataset, load_image_dataset
from training.parsing import parse_recipe
from training.pretrained import class_names_of, load_classifier, load_processor

__all__ = ["changes_at_resume", "check_length", "check_same_data", "open_run", "reopen"]

logger = logging.getLogger(__name__)

Recipe = PretrainRecipe | FinetuneRecipe

# Fields that change no bit of the result.
HARMLESS_AT_RESUME = {
    "output_dir",
    "resume",
    "allow_changed",
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "dataloader_num_workers",
}

# What the checkpoint holds, or cannot take over: another value would be ignored, or meet a state that is not its own.
FIXED_AT_RESUME = {
    option.name for group in (NetworkArguments, StartArguments, PixelArguments) for option in fields(group)
} | {"optimizer"}

# Not fields of the recipe, but may be allowed to change by name all the same.
DATA, WORLD_SIZE = "data", "world_size"


def open_run(recipe: Recipe, verb: str) -> Path | None:
    """Returns the checkpoint to resume from, or None where a run can begin; changes nothing."""
    if recipe.run.output_dir is None:
        raise InputError("--output_dir is missing: name the folder of this run")
    folder, state = Path(recipe.run.output_dir), PartialState(cpu=not torch.cuda.is_available())
    recipe_file = folder / run_folder.RECIPE_FILE
    if recipe.run.resume:
        if not recipe_file.is_file():
            raise InputError(f"--resume: {folder} holds no run; leave the flag out to begin one")
        _refuse_changes(recipe, recipe_file, verb)
        checkpoint = checkpoints.newest_checkpoint(folder)
        if checkpoint is None and (folder / run_folder.METRICS_FILE).is_file():
            raise InputError(
                f"--resume: the run in {folder} has ended and its checkpoints are gone, so there is nothing to go on "
                f"from; fine-tune from the folder, or begin another run in another --output_dir"
            )
        if checkpoint is None:
            logger.warning("%s holds no checkpoint: the run begins at step 0", folder)
        _check_world_size(checkpoint, recipe, state.num_processes)
        return checkpoint
    with state.main_process_first():
        if state.is_main_process:
            run_folder.check_output_dir(folder)
    return None


def reopen(
    recipe: Recipe, checkpoint: Path
) -> tuple[ImageDataset, ViTScratchForImageClassification, ViTScratchImageProcessor]:
    """Returns data, model and processor of the run that is resumed; what it started from is not needed any more."""
    model, processor = load_classifier(str(checkpoint)), load_processor(str(checkpoint))
    return load_image_dataset(recipe.data, class_names=class_names_of(model.config)), model, processor


def changes_at_resume(recipe: Recipe, recipe_file: Path, verb: str) -> dict[str, str]:
    """Returns what differs from the run that is resumed and may change its result, by field."""
    old = flat(parse_recipe(type(recipe), ["--config", str(recipe_file)], prog=f"vit-scratch {verb}", description=""))
    return {
        name: f"{name}: {old[name]} -> {value}"
        for name, value in flat(recipe).items()
        if value != old[name] and name not in HARMLESS_AT_RESUME
    }


def _refuse_changes(recipe: Recipe, recipe_file: Path, verb: str) -> None:
    """Logs what differs from the run that is resumed, and refuses what would break exactness unless allowed."""
    allowed = recipe.run.allow_changed or []
    for name in allowed:
        if name not in {*flat(recipe), DATA, WORLD_SIZE}:
            raise InputError(f"--allow_changed {name}: no such field; allowed can be fields, {DATA} and {WORLD_SIZE}")
    changes = changes_at_resume(recipe, recipe_file, verb)
    fixed = [name for name in changes if name in FIXED_AT_RESUME]
    if fixed:
        raise InputError(
            f"--resume takes network, image processor and optimizer from the checkpoint in {recipe_file.parent}: "
            f"{'; '.join(changes[name] for name in fixed)} would be ignored; put it back, or begin another run in "
            f"another --output_dir"
        )
    for line in changes.values():
        logger.warning("changed at resume: %s", line)
    refused = [name for name in changes if name not in allowed]
    if refused:
        raise InputError(
            f"--resume with other settings would not continue the run in {recipe_file.parent}: "
            f"{'; '.join(changes[name] for name in refused)}; put them back, or accept the change with "
            f"--allow_changed {' '.join([*allowed, *refused])}"
        )


def _check_world_size(checkpoint: Path | None, recipe: Recipe, world_size: int) -> None:
    if checkpoint is None:
        return
    saved = len(list(checkpoint.glob("rng_state*.pth")))
    if saved != world_size and WORLD_SIZE not in (recipe.run.allow_changed or []):
        raise InputError(
            f"{checkpoint} was saved by {saved} processes and would be resumed by {world_size}: dropout and rounding "
            f"would differ; start {saved} processes, or accept the change with --allow_changed {WORLD_SIZE}"
        )


def check_length(checkpoint: Path, max_steps: int) -> None:
    """Raises where the checkpoint is longer than what the recipe asks for."""
    done = int(checkpoint.name.rpartition("-")[2])
    if done > max_steps:
        raise InputError(f"--resume: {checkpoint} is {done} steps long already, and this recipe asks for {max_steps}")


def check_same_data(recipe: Recipe, dataset: ImageDataset, folder: Path) -> None:
    """Raises where the splits are not those of data.json, unless that is allowed."""
    stored = run_folder.read_json(folder / run_folder.DATA_FILE)["splits"]
    found = dataset.description["splits"]
    differing = [name for name in {**stored, **found} if stored.get(name) != found.get(name)]
    if differing and DATA not in (recipe.run.allow_changed or []):
        raise InputError(
            f"--resume: the images of {dataset.description['dataset']} are not those the run in {folder} began with "
            f"({', '.join(differing)} differs from data.json); put them back, or accept the change with "
            f"--allow_changed {DATA}"
        )

"""`vit-scratch finetune`: a checkpoint on other images, classes or resolution (paper section 3.2)."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import set_seed

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch.errors_vit_scratch import InputError
from training.arguments import FinetuneRecipe
from training.data import ImageDataset, load_image_dataset
from training.evaluation import load_images_for
from training.fit import fit, given
from training.pretrained import (
    class_names_of,
    conversion_of,
    forget_converted,
    load_classifier,
    load_config,
    load_processor,
    with_new_head,
)
from training.resume import open_run, reopen

__all__ = ["finetune"]


def finetune(recipe: FinetuneRecipe) -> Path:
    """Returns the run folder of a checkpoint that was trained on, or resumed."""
    if recipe.start.model_name_or_path is None:
        raise InputError("--model_name_or_path is missing: name the folder, file or Hub repo to start from")
    checkpoint, conversion = open_run(recipe, "finetune"), None
    if checkpoint is None:
        dataset, model, processor = _start(recipe)
        conversion = conversion_of(str(recipe.start.model_name_or_path), recipe.start.revision)
        forget_converted()
    else:
        dataset, model, processor = reopen(recipe, checkpoint)
    return fit(
        recipe,
        verb="finetune",
        model=model,
        processor=processor,
        dataset=dataset,
        checkpoint=checkpoint,
        conversion=conversion,
    )


def _start(
    recipe: FinetuneRecipe,
) -> tuple[ImageDataset, ViTScratchForImageClassification, ViTScratchImageProcessor]:
    start = recipe.start
    source, revision = str(start.model_name_or_path), start.revision
    if start.new_head:
        stored_names = class_names_of(load_config(source, revision))
        dataset = load_image_dataset(recipe.data)
        # The checkpoint's order, for whoever compares.
        if dataset.class_names != stored_names and sorted(dataset.class_names) == sorted(stored_names):
            dataset = load_image_dataset(recipe.data, class_names=stored_names)
        set_seed(recipe.optimization.seed)
        model = with_new_head(source, revision, dataset.class_names, hidden_dropout_prob=start.hidden_dropout_prob)
    else:
        model = load_classifier(source, revision, hidden_dropout_prob=start.hidden_dropout_prob)
        dataset = load_images_for(model.config, recipe.data, source)
        set_seed(recipe.optimization.seed)
    processor = load_processor(source, revision)
    fields = {name: getattr(processor, name) for name in processor.valid_kwargs.__annotations__}
    if start.image_size is not None:
        model.resize_input(image_size=start.image_size)
        height, width = model.config.image_height_width
        fields["size"] = {"height": height, "width": width}
    fields |= given(recipe.pixels)
    return dataset, model, ViTScratchImageProcessor(**fields)


def main(recipe: FinetuneRecipe) -> int:
    finetune(recipe)
    return 0


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(["finetune", *sys.argv[1:]]))

"""`vit-scratch pretrain`: a network from its initialisation."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from transformers import set_seed

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchImageProcessor
from training.arguments import NetworkArguments, PretrainRecipe
from training.data import load_image_dataset
from training.fit import fit, given
from training.resume import open_run, reopen

__all__ = ["pretrain"]


def pretrain(recipe: PretrainRecipe) -> Path:
    """Returns the run folder of a network trained from its initialisation, or resumed."""
    checkpoint = open_run(recipe, "pretrain")
    if checkpoint is None:
        dataset = load_image_dataset(recipe.data)
        config = network_config(recipe.network, dataset.class_names)
        set_seed(recipe.optimization.seed)
        model = ViTScratchForImageClassification(config)
        processor = ViTScratchImageProcessor.from_config(config, **given(recipe.pixels))
    else:
        dataset, model, processor = reopen(recipe, checkpoint)
    return fit(recipe, verb="pretrain", model=model, processor=processor, dataset=dataset, checkpoint=checkpoint)


def network_config(network: NetworkArguments, class_names: list[str]) -> ViTScratchConfig:
    """Returns the configuration a recipe describes: the variant's, with the fields the recipe names."""
    fields = {name: value for name, value in asdict(network).items() if value is not None and name != "variant"}
    fields["id2label"] = dict(enumerate(class_names))
    if network.variant is None:
        return ViTScratchConfig(**fields)
    return ViTScratchConfig.from_variant(network.variant, **fields)


def main(recipe: PretrainRecipe) -> int:
    pretrain(recipe)
    return 0


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(["pretrain", *sys.argv[1:]]))

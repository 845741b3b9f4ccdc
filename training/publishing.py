"""`vit-scratch push` and `vit-scratch verify`: hub_upload's command line, with this package's evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from training.parsing import FlagParser

# The rest is imported where it is used, so that --help answers at once.

__all__ = ["accuracy_of"]


def main(argv: list[str], prog: str) -> int:
    return {"push": _push, "verify": _verify}[prog.split()[-1]](argv, prog)


def _push(argv: list[str], prog: str) -> int:
    description = "Publish a run folder on the Hub and verify what was published."
    parser = FlagParser(prog=prog, description=description)
    parser.add_argument("run_folder", help="what pretrain or finetune left")
    parser.add_argument("--repo_id", required=True, help="owner/name; a name alone goes to the token's owner")
    parser.add_argument("--private", action="store_true", help="create the repo as a private one")
    parser.add_argument("--license", help="of the weights, for a card that has none yet [apache-2.0]")
    parser.add_argument("--dry_run", action="store_true", help="stage, load in a fresh process and check; no upload")
    arguments = parser.parse_args(argv)
    from hub_upload.card import DEFAULT_LICENSE
    from hub_upload.push import push

    result = push(
        arguments.run_folder,
        arguments.repo_id,
        private=arguments.private,
        dry_run=arguments.dry_run,
        license=arguments.license or DEFAULT_LICENSE,
    )
    print(result.folder if result.commit is None else f"{result.commit}\n{result.url}")
    return 0


def _verify(argv: list[str], prog: str) -> int:
    description = "Load a published model as a stranger would and compare its answers."
    parser = FlagParser(prog=prog, description=description)
    parser.add_argument("source", help="Hub repo, or a staging folder")
    parser.add_argument("--revision", help="branch, tag or commit")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--dataset_name", help="evaluate again on this dataset: digits, or a Hub dataset id")
    data.add_argument("--data_dir", help="evaluate again on this folder")
    arguments = parser.parse_args(argv)
    from hub_upload.verify import verify

    evaluate = None
    if arguments.dataset_name or arguments.data_dir:
        evaluate = accuracy_of(dataset_name=arguments.dataset_name, data_dir=arguments.data_dir)
    found = verify(arguments.source, revision=arguments.revision, evaluate=evaluate)
    print(f"{found.source} {found.commit or ''}: {found.num_files} files as published, loads in a fresh process")
    print(f"largest difference of a logit: {found.fresh_load['max_logit_difference']:.2e}")
    if found.measured_accuracy is not None:
        print(f"accuracy measured {found.measured_accuracy:.4f}, on the card {found.card_accuracy:.4f}")
    return 0


def accuracy_of(*, dataset_name: str | None, data_dir: str | None) -> Callable[[Path], float]:
    """Returns a function that measures the accuracy of a published folder on the split its data.json names."""

    def measure(folder: Path) -> float:
        from modeling_vit_scratch.errors_vit_scratch import InputError
        from training import run_folder
        from training.arguments import FinetuneRecipe, PretrainRecipe
        from training.data import load_image_dataset
        from training.evaluation import num_decoding_processes, predict_logits
        from training.metrics import evaluate_predictions
        from training.parsing import parse_recipe, read_recipe_file
        from training.pretrained import class_names_of, load_classifier, load_processor

        config = str(folder / run_folder.RECIPE_FILE)
        verb = read_recipe_file(config)["verb"][0]
        kind = {"pretrain": PretrainRecipe, "finetune": FinetuneRecipe}[verb]
        recipe = parse_recipe(kind, ["--config", config], prog=f"vit-scratch {verb}", description="")
        data = replace(recipe.data, dataset_name=dataset_name, data_dir=data_dir)
        model, processor = load_classifier(str(folder)), load_processor(str(folder))
        class_names = class_names_of(model.config)
        dataset = load_image_dataset(data, class_names=class_names)
        split = run_folder.read_json(folder / run_folder.METRICS_FILE)["evaluation"]["split"]
        stored = run_folder.read_json(folder / run_folder.DATA_FILE)["splits"][split]
        images = dataset.split(split)
        if images is None or images.fingerprint != stored["sha256"]:
            raise InputError(
                f"{data_dir or dataset_name}: its {split} split is not the {stored['num_samples']} images the model "
                f"was evaluated on (sha256 {stored['sha256'][:12]} in data.json)"
            )
        logits = predict_logits(model, processor, images, batch_size=64, num_workers=num_decoding_processes(data))
        return evaluate_predictions(logits, images.labels, class_names)["accuracy"]["value"]

    return measure


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(sys.argv[1:]))  # push ... or verify ...

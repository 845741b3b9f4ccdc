"""`vit-scratch demo`: pretrain, fine-tune, evaluate, stage and load back, on real images in three minutes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training.arguments import FinetuneRecipe, PretrainRecipe
from training.parsing import FlagParser, parse_recipe

# The rest is imported where it is used, so that --help answers at once.

__all__ = ["demo"]

NUM_CLASSIFIED_IMAGES = 8

# What somebody who has only transformers writes; run in a process of its own, which does not see this package.
CLASSIFY = """
import json, sys
from transformers import pipeline
classify = pipeline("image-classification", model=sys.argv[1], trust_remote_code=True)
print(json.dumps([answers[0] for answers in classify(sys.argv[2:])]))
"""


def demo(output_dir: Path, *, seed: int) -> None:
    """Runs the main job into `output_dir` and prints what came out."""
    from hub_upload.stage import stage
    from hub_upload.verify import load_in_fresh_process
    from training import run_folder
    from training.evaluation import accuracy_line
    from training.finetune import finetune
    from training.pretrain import pretrain

    start = time.perf_counter()
    print("1/5 pretrain a small ViT on the digits 0 to 4 at 8 pixels")
    flags = ["--config", "demo_pretrain", "--output_dir", str(output_dir / "pretrained"), "--seed", str(seed)]
    pretrained = pretrain(parse_recipe(PretrainRecipe, flags, prog="vit-scratch pretrain", description=""))
    print("2/5 fine-tune it on all ten digits at 16 pixels, and evaluate")
    flags = ["--config", "demo_finetune", "--output_dir", str(output_dir / "vit-digits"), "--seed", str(seed)]
    flags += ["--model_name_or_path", str(pretrained)]
    recipe = parse_recipe(FinetuneRecipe, flags, prog="vit-scratch finetune", description="")
    finetuned = finetune(recipe)
    print("3/5 stage the Hub folder: weights, code, processor, card")
    staged = stage(finetuned, output_dir / "hub")
    print("4/5 load it back in a fresh process that knows only transformers, and replay its golden answers")
    report = load_in_fresh_process(staged, staged / "golden.safetensors")
    print(f"    largest difference of a logit: {report['max_logit_difference']:.1e}")
    print("5/5 classify test images with transformers' pipeline")
    _classify_test_images(recipe, staged, output_dir / "test_images")
    evaluation = run_folder.read_json(finetuned / run_folder.METRICS_FILE)["evaluation"]
    print(f"\n{accuracy_line(evaluation)}, in {time.perf_counter() - start:.0f} seconds")
    print(f"model     {staged}\ncard      {staged / 'README.md'}")
    for picture in sorted((staged / "figures").iterdir()):
        print(f"picture   {picture}")
    print(f"next      vit-scratch push {finetuned} --repo_id NAME/vit-digits")


def _classify_test_images(recipe: FinetuneRecipe, staged: Path, folder: Path) -> None:
    """Writes test digits as PNG files and prints what the staged model says about them."""
    import numpy as np
    from PIL import Image

    from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault
    from training.data import load_image_dataset

    images = load_image_dataset(recipe.data).test
    assert images is not None
    folder.mkdir()
    rows = range(0, len(images), len(images) // NUM_CLASSIFIED_IMAGES)[:NUM_CLASSIFIED_IMAGES]
    paths = []
    for row in rows:
        paths.append(folder / f"digit_{images.labels[row]}_{images.sample_ids[row].replace('/', '_')}.png")
        Image.fromarray(np.asarray(images.read(row))).save(paths[-1])
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-P", "-c", CLASSIFY, str(staged.resolve()), *(str(path.resolve()) for path in paths)],
            cwd=elsewhere,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise EnvironmentFault(f"the fresh process could not classify: {done.stderr.strip().splitlines()[-1]}")
    for path, answer in zip(paths, json.loads(done.stdout.splitlines()[-1]), strict=True):
        print(f"    {path.name:32} {answer['label']} ({answer['score']:.1%})")


def _free_folder() -> Path:
    """The first of runs/demo, runs/demo-2, ... that does not exist."""
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not (folder := Path("runs") / name).exists())


def main(argv: list[str], prog: str = "vit-scratch demo") -> int:
    parser = FlagParser(prog=prog, description="The whole main job on real images in three minutes, offline.")
    parser.add_argument("--output_dir", type=Path, help="default: runs/demo, or the next free number")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    arguments = parser.parse_args(argv)
    demo(arguments.output_dir or _free_folder(), seed=arguments.seed)
    return 0


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(["demo", *sys.argv[1:]]))

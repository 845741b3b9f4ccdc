"""What stochastic depth and patch dropout save of a training step on this machine, by computing less.

    python benchmarks/skipped_work.py

As benchmarks/fast_paths.py measures: one thread, thread CPU time, both sides in turn; the median of the rounds' ratios
with quartiles, of the time without over the time with. Beside it the same ratio of the tokens that the layers compute:
what there is to save, were a step nothing but its layers. At a rate r of stochastic depth, r / 2 of the images are
skipped in the mean over the layers.
"""

import argparse

import torch
from fast_paths import SHAPES, build, compare

SKIPPED = {
    "stochastic depth 0.4": ({"drop_path_rate": 0.4}, 1 / (1 - 0.2)),
    "patch dropout 0.5": ({"patch_dropout_rate": 0.5}, 1 / (1 - 0.5)),
    "both": ({"drop_path_rate": 0.4, "patch_dropout_rate": 0.5}, 1 / ((1 - 0.2) * (1 - 0.5))),
}
SHAPES_AND_BATCHES = {"28/4 d192 L6, batch 32": 32, "S/16 224, batch 4": 16}  # at a rate, whole images are skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, num_images in SHAPES_AND_BATCHES.items():
        # Not the class token: the last layer would be computed for it alone, on either side.
        fields = {**SHAPES[name][0], "pooling": "mean"}
        for label, (options, tokens) in SKIPPED.items():
            line = f"{name.partition(',')[0]}, batch {num_images}: {label} (tokens: {tokens:.2f})"
            how = {"rounds": rounds, "num_images": num_images, "bf16": False}
            compare(line, build(fields), build({**fields, **options}), **how)


if __name__ == "__main__":
    main()

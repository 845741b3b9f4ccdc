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
BATCH_SIZE_FACTOR = 4  # more images than there, so that whole images can be skipped at a rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name in ("28/4 d192 L6, batch 32", "S/16 224, batch 4"):
        fields, num_images = SHAPES[name]
        fields, num_images = {**fields, "pooling": "mean"}, num_images * (BATCH_SIZE_FACTOR if num_images < 10 else 1)
        for label, (options, tokens) in SKIPPED.items():
            how = {"rounds": rounds, "num_images": num_images, "bf16": False}
            shape = name.partition(",")[0]
            compare(
                f"{shape}, batch {num_images}: {label}, tokens {tokens:.2f}",
                build(fields),
                build({**fields, **options}),
                **how,
            )


if __name__ == "__main__":
    main()

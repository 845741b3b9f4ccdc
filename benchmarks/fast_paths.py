"""What the two fast paths of the model gain on this machine: the attention rule and the class-token-only last layer.

    python benchmarks/fast_paths.py

One thread, thread CPU time, both sides in turn with the order reversed each round; prints the median of the rounds'
ratios with quartiles. Above 1: the fast path is faster.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification

SHAPES = {
    "28/7 d192 L6, batch 64": (
        {"image_size": 28, "patch_size": 7, "num_channels": 1, "hidden_size": 192, "num_hidden_layers": 6,
         "num_attention_heads": 3, "intermediate_size": 768},
        64,
    ),
    "28/4 d192 L6, batch 32": (
        {"image_size": 28, "patch_size": 4, "num_channels": 1, "hidden_size": 192, "num_hidden_layers": 6,
         "num_attention_heads": 3, "intermediate_size": 768},
        32,
    ),
    "S/16 224, batch 4": (
        {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
        4,
    ),
}  # fmt: skip


def build(fields: dict, attention: str | None = None) -> ViTScratchForImageClassification:
    torch.manual_seed(0)
    model = ViTScratchForImageClassification(ViTScratchConfig(**fields, num_labels=10))
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def full_last_layer(model: ViTScratchForImageClassification) -> ViTScratchForImageClassification:
    """The same model with a hook that does nothing, before which the fast path steps aside."""
    model.vit.layers[-1].register_forward_hook(lambda *_: None)
    return model


def seconds_of_a_step(model: ViTScratchForImageClassification, batch: tuple, bf16: bool) -> float:
    start = time.thread_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(*batch).loss
    loss.backward()
    model.zero_grad()
    return time.thread_time() - start


def compare(name: str, slow: ViTScratchForImageClassification, fast: ViTScratchForImageClassification, **how) -> None:
    config, rounds, num_images, bf16 = fast.config, how["rounds"], how["num_images"], how["bf16"]
    batch = (torch.randn(num_images, config.num_channels, *config.image_height_width), torch.arange(num_images) % 10)
    ratios = []
    for number in range(rounds + 1):
        sides = [slow, fast] if number % 2 else [fast, slow]
        seconds = {id(model): seconds_of_a_step(model, batch, bf16) for model in sides}
        if number:  # the first round warms up
            ratios.append(seconds[id(slow)] / seconds[id(fast)])
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    print(f"{name:70} {median:.2f} [{low:.2f}, {high:.2f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, (fields, num_images) in SHAPES.items():
        for bf16 in (False, True):
            how = {"rounds": rounds, "num_images": num_images, "bf16": bf16}
            label = f"{name}, {'bf16' if bf16 else 'fp32'} training step"
            compare(f"{label}: rule over sdpa", build(fields, "sdpa"), build(fields), **how)
            compare(f"{label}: class token over full layer", full_last_layer(build(fields)), build(fields), **how)


if __name__ == "__main__":
    main()

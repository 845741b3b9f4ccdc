"""The golden: a few fixed images with what processor and model make of them, replayed wherever the model is loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from modeling_vit_scratch.errors_vit_scratch import InputError

__all__ = ["GOLDEN_NAME", "golden_problem", "write_golden"]

GOLDEN_NAME = "golden.safetensors"
SEED = 0

# float32 sums run in another order on another processor; relative to the largest logit, at least to 1.
LOGIT_TOLERANCE = 1e-4
# A resize of 8-bit images may round one level the other way; what a level is depends on the processor's std.
PIXEL_LEVELS = 1.5


def write_golden(path: Path, model: Any, processor: Any) -> None:
    """Writes images, pixel_values (N, C, H, W) and logits (N, num_labels) of `model`, in float32 on the CPU."""
    images = _draw_images(model.config.image_height_width, resized=processor.resize_mode != "none")
    pictures = [Image.fromarray(image) for image in images]
    with torch.no_grad():
        pixel_values = torch.cat([processor([picture], return_tensors="pt")["pixel_values"] for picture in pictures])
        logits = model.eval()(pixel_values).logits
    if not torch.isfinite(logits).all():
        raise InputError("model.safetensors: the logits are not finite; publish an earlier checkpoint")
    tensors = {f"image_{index}": torch.from_numpy(image) for index, image in enumerate(images)}
    save_file({**tensors, "pixel_values": pixel_values, "logits": logits}, path, metadata={"seed": str(SEED)})


def _draw_images(height_width: tuple[int, int], *, resized: bool) -> list[np.ndarray]:
    """Returns three uint8 images (height, width, 3): noise, a ramp, blocks; of three sizes where sizes are free."""
    rng = np.random.default_rng(SEED)
    height, width = height_width
    sizes = [(height, width), (height + 5, 2 * width + 3), (max(4, height // 2), max(4, width // 2) + 1)]
    sizes = sizes if resized else [height_width] * 3
    noise = rng.integers(0, 256, (*sizes[0], 3))
    rows, columns = np.mgrid[0 : sizes[1][0], 0 : sizes[1][1]]
    ramp = np.stack([255 * rows / rows.max(), 255 * columns / columns.max(), 255 - 255 * rows / rows.max()], axis=-1)
    colours = rng.integers(0, 256, (4, 4, 3))
    rows, columns = np.mgrid[0 : sizes[2][0], 0 : sizes[2][1]]
    blocks = colours[4 * rows // sizes[2][0], 4 * columns // sizes[2][1]]
    return [image.astype(np.uint8) for image in (noise, ramp, blocks)]


def golden_problem(report: dict[str, Any]) -> str | None:
    """Returns what is wrong in a report of `replay_golden`, naming the largest difference; None where nothing is."""
    allowed = LOGIT_TOLERANCE * max(1.0, report["max_logit"])
    if not report["max_logit_difference"] <= allowed:
        return (
            f"the logits differ from {GOLDEN_NAME} by up to {report['max_logit_difference']:.3g} "
            f"(allowed {allowed:.3g}), most at image {report['at_image']}, class {report['at_class']}"
        )
    allowed = PIXEL_LEVELS / 255 / report["min_std"]
    if not report["max_pixel_difference"] <= allowed:
        return (
            f"pixel_values differ from {GOLDEN_NAME} by up to {report['max_pixel_difference']:.3g} "
            f"(allowed {allowed:.3g})"
        )
    return None

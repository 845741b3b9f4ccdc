"""The pictures of a run folder: learning curves, confusion matrix, and where the class token looks.

matplotlib is imported by the functions that draw, so that a run without figures does not pay for it. Figures are drawn
on the Agg canvas: no display, no global state. Colours are those of Okabe and Ito, and maps run from light to
dark in one hue: colour-blind readers tell them apart. Right and wrong are also told by words.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from training.run_folder import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Caption",
    "attention_rollout",
    "choose_gallery_rows",
    "draw_attention_rollout",
    "draw_confusion_matrix",
    "draw_learning_curves",
]

MAX_FIGURE_BYTES = 400_000
NUM_GALLERY_IMAGES = 12

_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_DPI = 120
_THUMBNAIL_PIXELS = 160
_BORDER_PIXELS = 12
_MAX_CLASSES_WITH_COUNTS = 20
_GALLERY_COLUMNS = 4
_PAIR_INCHES = (3.4, 1.9)  # width and height of an image with its overlay and caption
_SIDE_INCHES = 1.55  # of the square that holds an image
_TINT, _MAX_TINT = (255, 128, 0), 0.85


class Caption(NamedTuple):
    """What stands below an image of the gallery; names of classes, and the probability of the prediction."""

    truth: str
    prediction: str
    probability: float

    @property
    def is_right(self) -> bool:
        return self.truth == self.prediction


def draw_learning_curves(log_history: list[dict[str, Any]], path: str | Path, title: str) -> None:
    """Draws loss, evaluation accuracy and learning rate over the steps of `trainer_state.json`'s log history."""
    panels: list[tuple[str, list[tuple[str, str | None, str, str]]]] = [
        ("loss", [("loss", "training", _BLUE, "-"), ("eval_loss", "evaluation", _ORANGE, "o-")]),
        ("accuracy", [("eval_accuracy", "evaluation", _ORANGE, "o-")]),
        ("learning rate", [("learning_rate", None, _GREEN, "-")]),
    ]
    drawn = [
        (label, curves) for label, curves in panels if any(_curve(log_history, curve[0])[0] for curve in curves)
    ] or panels[:1]
    last_step = max((entry["step"] for entry in log_history if "step" in entry), default=1)
    figure = _figure(4.2 * len(drawn), 3.6)
    figure.suptitle(_plain(title), fontsize=12)
    for index, (label, curves) in enumerate(drawn):
        axes = figure.add_subplot(1, len(drawn), index + 1)
        for key, name, color, style in curves:
            steps, values = _curve(log_history, key)
            if steps:
                legend = f"{name}, last {values[-1]:.3g}" if name else None
                axes.plot(steps, values, style, color=color, label=legend, markersize=4, linewidth=1.5)
        axes.set_xlim(0, last_step)
        _style_axes(axes, label)
    _save(figure, path)


def draw_confusion_matrix(matrix: Sequence[Sequence[int]], class_names: list[str], path: str | Path) -> None:
    """Draws counts (rows: truth), coloured by their share of the row; few classes also get the numbers."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import PercentFormatter

    counts = np.asarray(matrix)
    num_classes = len(class_names)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(4 + 0.28 * num_classes, 14)
    figure = _figure(side + 1.5, side)
    axes = figure.add_subplot()
    norm = PowerNorm(0.5, vmin=0, vmax=1)  # the square root: a few per cent of mistakes are what one looks for
    shown = axes.imshow(shares, cmap="Blues", norm=norm)
    bar = figure.colorbar(shown, ax=axes, aspect=30, pad=0.02, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1])
    bar.set_label("share of the true class", fontsize=9)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bar.ax.tick_params(labelsize=8)
    axes.set_title(f"{counts.sum()} images, {np.trace(counts) / max(counts.sum(), 1):.1%} right", fontsize=11)
    axes.set_xlabel("predicted", fontsize=10)
    axes.set_ylabel("truth", fontsize=10)
    _label_classes(axes, class_names)
    if num_classes <= _MAX_CLASSES_WITH_COUNTS:
        for row, column in np.argwhere(counts > 0):
            color = "white" if norm(shares[row, column]) > 0.6 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=8, color=color)
    _save(figure, path)


def attention_rollout(
    attentions: Sequence[torch.Tensor], *, num_prefix_tokens: int, grid_size: tuple[int, int], from_class_token: bool
) -> torch.Tensor:
    """The attention (B, rows, columns) that flows from each patch to what the head reads, through all layers.

    Per layer heads are averaged, the residual connection is added as the identity, rows are normalised, and layers are
    multiplied (paper D.8; Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928).

    Args:
        attentions: L tensors (B, A, T, T) after the softmax, first layer first.
        num_prefix_tokens: tokens in front of the patches; they are left out of the map.
        grid_size: rows and columns of patches.
        from_class_token: whether the head reads the class token, the first; else it reads the mean of the patches.
    """
    num_tokens = attentions[0].shape[-1]
    identity = torch.eye(num_tokens, device=attentions[0].device)
    rollout = identity
    for attention in attentions:
        # Paper: adds no identity. Here: adds it, since the author says the figure was made so (issues 18 and 27).
        layer = attention.detach().float().mean(dim=1) + identity  # (B, T, T)
        rollout = layer / layer.sum(dim=-1, keepdim=True) @ rollout
    pooled = rollout[:, 0] if from_class_token else rollout[:, num_prefix_tokens:].mean(dim=1)
    return pooled[:, num_prefix_tokens:].unflatten(1, grid_size)


def choose_gallery_rows(
    labels: np.ndarray, probabilities: np.ndarray, *, num_images: int = NUM_GALLERY_IMAGES
) -> list[int]:
    """Rows for the gallery: the surest mistakes, at most half of it, then right ones of as many classes as fit."""
    predictions = probabilities.argmax(axis=1)
    confidences = probabilities.max(axis=1)
    wrong = np.flatnonzero(predictions != labels)
    wrong = wrong[np.argsort(-confidences[wrong], kind="stable")]
    right = np.flatnonzero(predictions == labels)
    seen: dict[int, int] = {}
    rounds = []
    for row in right:  # the k-th right one of each class comes in round k
        rounds.append(seen.setdefault(int(labels[row]), 0))
        seen[int(labels[row])] += 1
    right = right[np.lexsort((labels[right], np.array(rounds, dtype=int)))]
    num_wrong = min(len(wrong), max(num_images // 2, num_images - len(right)))
    return [int(row) for row in (*wrong[:num_wrong], *right[: num_images - num_wrong])]


def draw_attention_rollout(
    images: Sequence[np.ndarray], maps: Sequence[Any], captions: Sequence[Caption], path: str | Path
) -> None:
    """Draws up to twelve images (H, W, 3) uint8 beside their attention (rows, columns), wrong ones first."""
    order = sorted(range(len(captions)), key=lambda index: captions[index].is_right)[:NUM_GALLERY_IMAGES]
    num_columns = min(_GALLERY_COLUMNS, len(order))
    num_rows = math.ceil(len(order) / num_columns)
    # Placed by hand: matplotlib's layouts make room for a caption that reaches over the overlay.
    width, height = max(_PAIR_INCHES[0] * num_columns, 5.5), _PAIR_INCHES[1] * num_rows + 0.35
    figure = _figure(width, height, layout=None)
    title = "left: test image; right: attention rollout, the more orange the more attended"
    figure.text(0, 1 - 0.2 / height, title, fontsize=9)
    for position, index in enumerate(order):
        row, column = divmod(position, num_columns)
        left, top = _PAIR_INCHES[0] * column, height - 0.35 - _PAIR_INCHES[1] * row
        text, style = _caption_text(captions[index])
        figure.text(left / width, (top - 0.17) / height, text, fontsize=8, **style)
        shown = _thumbnail(images[index])
        contents = (shown, _overlay(shown, np.asarray(maps[index], dtype=np.float64)))
        bottom = (top - 0.24 - _SIDE_INCHES) / height
        for side, content in enumerate(contents):
            start = (left + side * (_SIDE_INCHES + 0.08)) / width
            axes = figure.add_axes((start, bottom, _SIDE_INCHES / width, _SIDE_INCHES / height), anchor="NW")
            axes.imshow(content, interpolation="nearest")
            axes.set_axis_off()
    _save(figure, path)


def _caption_text(caption: Caption) -> tuple[str, dict[str, Any]]:
    text = f"{_shorten(caption.prediction, 12)} ({caption.probability:.0%})"
    if caption.is_right:
        return f"right: {text}", {}
    return f"wrong: {text}, truth: {_shorten(caption.truth, 12)}", {"color": _ORANGE, "fontweight": "bold"}


def _thumbnail(image: np.ndarray) -> np.ndarray:
    """The image with its longer side near the thumbnail's: small ones by whole pixels, so that they stay crisp."""
    height, width = image.shape[:2]
    longer = max(height, width)
    if longer * 2 <= _THUMBNAIL_PIXELS:
        factor = _THUMBNAIL_PIXELS // longer
        return image.repeat(factor, axis=0).repeat(factor, axis=1)
    scale = _THUMBNAIL_PIXELS / longer
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


def _overlay(image: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """The image in grey, and the more orange the more attention, smoothed, a place gets.

    Paper: multiplies the image by the attention. Here: tints it, since the black ground of digits would hide it.
    """
    height, width = image.shape[:2]
    relative = (attention / max(attention.max(), 1e-12)).astype(np.float32)
    heat = np.asarray(Image.fromarray(relative).resize((width, height), Image.Resampling.LANCZOS))
    # Paper: blurs by a patch, of 14 or 24 along a side. Here: by half of one, since 4 to 7 would become one spot.
    blur = ImageFilter.GaussianBlur(width / attention.shape[1] / 2)
    smooth = np.asarray(Image.fromarray((heat.clip(0, 1) * 255).astype(np.uint8)).filter(blur), dtype=np.float64)
    smooth = (smooth - smooth.min()) / max(np.ptp(smooth), 1e-12)
    opacity = _MAX_TINT * smooth[..., None]
    grey = image.mean(axis=2, keepdims=True)
    return ((1 - opacity) * grey + opacity * np.array(_TINT)).round().astype(np.uint8)


def _curve(log_history: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry and "step" in entry]
    points = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def _figure(width: float, height: float, *, layout: Literal["compressed"] | None = "compressed") -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _style_axes(axes: "Axes", label: str) -> None:
    axes.set_xlabel("step", fontsize=10)
    axes.set_ylabel(label, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    axes.yaxis.get_offset_text().set_fontsize(8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def _label_classes(axes: "Axes", class_names: list[str]) -> None:
    num_classes = len(class_names)
    if num_classes > 100:  # no font is small enough; the axes count
        axes.tick_params(labelsize=8)
        return
    size = 9 if num_classes <= 20 else max(5.0, 9.5 - 0.04 * num_classes)
    names = [_shorten(name) for name in class_names]
    is_long = max(map(len, names)) > 2
    axes.set_xticks(range(num_classes), names, fontsize=size, rotation=90 if is_long else 0)
    axes.set_yticks(range(num_classes), names, fontsize=size)


def _shorten(name: str, limit: int = 16) -> str:
    return _plain(name if len(name) <= limit else name[: limit - 1] + "…")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # else matplotlib reads a formula


def _save(figure: "Figure", path: str | Path) -> None:
    """Writes a PNG below the size that goes into a repository: with fewer colours, then fewer pixels, if need be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    picture = _trim(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    content = _png(picture)
    if len(content) > MAX_FIGURE_BYTES:
        content = _png(picture.quantize(256))
    while len(content) > MAX_FIGURE_BYTES:
        picture = picture.resize((picture.width * 4 // 5, picture.height * 4 // 5), Image.Resampling.LANCZOS)
        content = _png(picture.quantize(256))
    with replace_file(path) as incomplete:
        incomplete.write_bytes(content)


def _trim(picture: Image.Image) -> Image.Image:
    """The picture with an even white border: layouts of square axes leave uneven ones."""
    box = ImageOps.invert(picture).getbbox() or (0, 0, *picture.size)
    return ImageOps.expand(picture.crop(box), border=_BORDER_PIXELS, fill="white")


def _png(picture: Image.Image) -> bytes:
    content = io.BytesIO()
    picture.save(content, format="PNG", optimize=True)
    return content.getvalue()

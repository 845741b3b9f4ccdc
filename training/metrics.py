"""Metrics of image classification that work without a network, and the block of metrics.json they make.

Each metric is a function of class probabilities (N, K) and labels (N,), and an `evaluate.Metric` of the same numbers.
scikit-learn computes whatever it has.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
    recall_score,
    top_k_accuracy_score,
)

from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.modeling_vit_scratch import classification_loss

__all__ = [
    "BalancedAccuracy",
    "ConfusionMatrix",
    "ExpectedCalibrationError",
    "MacroF1",
    "PerClassScores",
    "Top1Accuracy",
    "Top5Accuracy",
    "class_probabilities",
    "evaluate_predictions",
    "expected_calibration_error",
    "wilson_interval",
]

NUM_CALIBRATION_BINS = 15
"""Bins of equal width over [0, 1], as in Guo et al. 2017, https://arxiv.org/abs/1706.04599."""

CONFIDENCE = 0.95


def evaluate_predictions(
    logits: np.ndarray,
    labels: np.ndarray,
    class_names: list[str],
    *,
    problem_type: str = "single_label_classification",
    split: str = "test",
) -> dict[str, Any]:
    """The "evaluation" block of metrics.json.

    Args:
        logits: (N, K).
        labels: (N,), class indices.
        problem_type: the objective of the model's config, which says what loss and probabilities are.
        split: the name of the split the samples are from.

    Raises:
        InputError: shapes, labels or values do not fit.
    """
    logits, labels = _checked(logits, labels, class_names)
    probabilities = class_probabilities(logits, problem_type)
    loss = classification_loss(torch.from_numpy(logits), torch.from_numpy(labels), problem_type)
    return {
        "split": split,
        "num_samples": len(labels),
        "loss": loss.item(),
        "accuracy": _accuracy_with_interval(probabilities, labels),
        "top_5_accuracy": _top_5_accuracy(probabilities, labels) if len(class_names) > 5 else None,
        "balanced_accuracy": _balanced_accuracy(probabilities, labels),
        "macro_f1": _macro_f1(probabilities, labels),
        "expected_calibration_error": expected_calibration_error(probabilities, labels),
        "per_class": _per_class(probabilities, labels, class_names),
        "confusion_matrix": _confusion_matrix(probabilities, labels),
    }


def wilson_interval(num_correct: int, num_samples: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The bounds of Wilson's score interval of a proportion; unlike the normal one it stays within [0, 1]."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    proportion = num_correct / num_samples
    scale = 1 + z**2 / num_samples
    centre = (proportion + z**2 / (2 * num_samples)) / scale
    half = z * math.sqrt(proportion * (1 - proportion) / num_samples + z**2 / (4 * num_samples**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean over samples of |accuracy - confidence| of the sample's bin.

    Confidence is the largest probability. A confidence on an edge belongs to the bin below it.
    """
    confidences = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, NUM_CALIBRATION_BINS + 1)
    bins = np.digitize(confidences, edges[1:-1], right=True)
    gaps = np.bincount(bins, weights=correct - confidences, minlength=NUM_CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(labels))


def class_probabilities(logits: np.ndarray, problem_type: str) -> np.ndarray:
    """Returns probabilities (N, K) of logits: softmax, or one sigmoid a class."""
    scores = torch.from_numpy(logits)
    multi_label = problem_type == "multi_label_classification"
    return (scores.sigmoid() if multi_label else scores.softmax(dim=1)).numpy()


def _checked(logits: np.ndarray, labels: np.ndarray, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits (N, K) in float64 and labels (N,) in int64, once they fit each other."""
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if logits.ndim != 2 or logits.shape != (len(labels), len(class_names)) or not len(labels):
        raise InputError(
            f"logits of shape {logits.shape} do not fit {len(labels)} labels and {len(class_names)} classes: both "
            f"must be of the same, non-empty split."
        )
    for row in np.flatnonzero((labels < 0) | (labels >= len(class_names))):
        raise InputError(f"label {labels[row]} at row {row} is outside 0..{len(class_names) - 1}.")
    for row in np.flatnonzero(~np.isfinite(logits).all(axis=1)):
        raise InputError(f"logits of row {row} hold NaN or infinity: the model's weights or its input are broken.")
    return logits, labels


def _accuracy_with_interval(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    num_correct = int((probabilities.argmax(axis=1) == labels).sum())
    low, high = wilson_interval(num_correct, len(labels))
    return {
        "value": num_correct / len(labels),
        "low": low,
        "high": high,
        "confidence": CONFIDENCE,
        "interval": "wilson",
        "num_correct": num_correct,
    }


def _top_1_accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float(accuracy_score(labels, probabilities.argmax(axis=1)))


def _top_5_accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    num_classes = probabilities.shape[1]
    if num_classes <= 5:
        raise InputError(f"top-5 accuracy needs more than 5 classes; got {num_classes}, where every answer is right.")
    return float(top_k_accuracy_score(labels, probabilities, k=5, labels=np.arange(num_classes)))


def _balanced_accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean recall of the classes that have samples."""
    # scikit-learn's balanced_accuracy_score is this, and warns where a class without samples is predicted.
    predictions = probabilities.argmax(axis=1)
    return float(recall_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0))


def _macro_f1(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean F1 of the classes that are either true or predicted somewhere."""
    return float(f1_score(labels, probabilities.argmax(axis=1), average="macro", zero_division=0))


def _per_class(
    probabilities: np.ndarray, labels: np.ndarray, class_names: list[str] | None = None
) -> list[dict[str, Any]]:
    """Precision, recall and F1 a class; None for a class without samples, since nothing was measured.

    Without names classes are called by their index. The precision of a class that is never predicted is 0, as in
    scikit-learn.
    """
    class_names = class_names or [str(label) for label in range(probabilities.shape[1])]
    columns = precision_recall_fscore_support(
        labels, probabilities.argmax(axis=1), labels=np.arange(len(class_names)), zero_division=0
    )
    rows = []
    for name, precision, recall, f1, num_samples in zip(class_names, *columns, strict=True):
        scores: dict[str, float | None] = {"precision": float(precision), "recall": float(recall), "f1": float(f1)}
        if num_samples == 0:
            scores = dict.fromkeys(scores)
        rows.append({"label": name, "num_samples": int(num_samples), **scores})
    return rows


def _confusion_matrix(probabilities: np.ndarray, labels: np.ndarray) -> list[list[int]]:
    """Counts; rows are the truth, columns the predictions."""
    classes = np.arange(probabilities.shape[1])
    return confusion_matrix(labels, probabilities.argmax(axis=1), labels=classes).tolist()


class _ProbabilityMetric(evaluate.Metric):
    """A metric of class probabilities (predictions) and class indices (references)."""

    result: str
    score: Callable[[np.ndarray, np.ndarray], Any]

    def __init__(self, **options: Any):
        # In memory, so that neither a lock nor a writable cache is needed.
        super().__init__(**{"keep_in_memory": True, **options})

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="predictions: class probabilities (N, K); references: class indices (N,)",
            features=datasets.Features(
                {
                    "predictions": datasets.List(datasets.Value("float64")),
                    "references": datasets.Value("int64"),
                }
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        probabilities, labels = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.int64)
        return {self.result: type(self).score(probabilities, labels)}


class Top1Accuracy(_ProbabilityMetric):
    """The fraction of samples whose most probable class is the true one."""

    result = "accuracy"
    score = staticmethod(_top_1_accuracy)


class Top5Accuracy(_ProbabilityMetric):
    """The fraction of samples whose true class is among the five most probable."""

    result = "top_5_accuracy"
    score = staticmethod(_top_5_accuracy)


class BalancedAccuracy(_ProbabilityMetric):
    """The mean recall of the classes that have samples."""

    result = "balanced_accuracy"
    score = staticmethod(_balanced_accuracy)


class MacroF1(_ProbabilityMetric):
    """The mean F1 of the classes that are either true or predicted somewhere."""

    result = "macro_f1"
    score = staticmethod(_macro_f1)


class ExpectedCalibrationError(_ProbabilityMetric):
    """The mean distance of confidence and accuracy over 15 bins of equal width."""

    result = "expected_calibration_error"
    score = staticmethod(expected_calibration_error)


class PerClassScores(_ProbabilityMetric):
    """Precision, recall and F1 of each class; classes are called by their index."""

    result = "per_class"
    score = staticmethod(_per_class)


class ConfusionMatrix(_ProbabilityMetric):
    """Counts of samples; rows are the truth, columns the predictions."""

    result = "confusion_matrix"
    score = staticmethod(_confusion_matrix)

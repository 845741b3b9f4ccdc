"""Metrics against scikit-learn, scipy, torch and closed forms."""

import warnings

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy.stats import binomtest

from modeling_vit_scratch.errors_vit_scratch import InputError
from training import metrics

NAMES = [f"class {label}" for label in range(8)]


@pytest.fixture
def predictions():
    """Logits (200, 8) that are right about half of the time, and labels."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 8, 200)
    return generator.normal(size=(200, 8)) * 1.5 + 2.0 * np.eye(8)[labels], labels


@pytest.fixture
def evaluation(predictions):
    return metrics.evaluate_predictions(*predictions, NAMES)


def test_accuracy_is_scikit_learns(predictions, evaluation):
    logits, labels = predictions
    assert evaluation["accuracy"]["value"] == sklearn.metrics.accuracy_score(labels, logits.argmax(1))
    assert evaluation["accuracy"]["num_correct"] == (labels == logits.argmax(1)).sum()


def test_loss_is_torchs_cross_entropy(predictions, evaluation):
    logits, labels = map(torch.from_numpy, predictions)
    assert evaluation["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-12)


def test_top_5_accuracy_is_torchs_topk(predictions, evaluation):
    logits, labels = map(torch.from_numpy, predictions)
    expected = (logits.topk(5).indices == labels[:, None]).any(dim=1).double().mean().item()
    assert evaluation["top_5_accuracy"] == expected


def test_top_5_accuracy_is_null_for_five_classes(predictions):
    logits, labels = predictions
    kept = labels < 5
    assert metrics.evaluate_predictions(logits[kept, :5], labels[kept], NAMES[:5])["top_5_accuracy"] is None


def test_balanced_accuracy_and_macro_f1_are_scikit_learns(predictions, evaluation):
    logits, labels = predictions
    answers = logits.argmax(1)
    assert evaluation["balanced_accuracy"] == sklearn.metrics.balanced_accuracy_score(labels, answers)
    assert evaluation["macro_f1"] == sklearn.metrics.f1_score(labels, answers, average="macro")


def test_the_confusion_matrix_has_the_truth_in_rows():
    evaluation = metrics.evaluate_predictions(np.eye(3)[[1, 1, 2]], np.array([0, 1, 2]), NAMES[:3])
    assert evaluation["confusion_matrix"] == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]


def test_scores_per_class_are_scikit_learns(predictions, evaluation):
    logits, labels = predictions
    report = sklearn.metrics.classification_report(labels, logits.argmax(1), target_names=NAMES, output_dict=True)
    for row in evaluation["per_class"]:
        expected = report[row["label"]]
        assert (row["precision"], row["recall"], row["f1"], row["num_samples"]) == (
            expected["precision"],
            expected["recall"],
            expected["f1-score"],
            expected["support"],
        )


def test_a_class_without_samples_has_null_scores_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = metrics.evaluate_predictions(np.eye(3)[[0, 2]], np.array([0, 0]), NAMES[:3])
    assert evaluation["per_class"][2] == {
        "label": "class 2",
        "num_samples": 0,
        "precision": None,
        "recall": None,
        "f1": None,
    }
    assert evaluation["balanced_accuracy"] == 0.5


@pytest.mark.parametrize(("num_correct", "num_samples"), [(349, 360), (0, 10), (10, 10), (1, 1), (5000, 10000)])
def test_the_wilson_interval_is_scipys(num_correct, num_samples):
    expected = binomtest(num_correct, num_samples).proportion_ci(confidence_level=0.95, method="wilson")
    assert metrics.wilson_interval(num_correct, num_samples) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_calibration_error_of_one_confidence_is_its_distance_from_accuracy():
    probabilities = np.tile([0.7, 0.3], (10, 1))
    labels = np.array([0] * 4 + [1] * 6)
    assert metrics.expected_calibration_error(probabilities, labels) == pytest.approx(0.3, abs=1e-12)


def test_calibration_error_does_not_cancel_between_bins():
    probabilities = np.array([[0.9, 0.1]] * 5 + [[0.6, 0.4]] * 5)
    labels = np.array([0] * 3 + [1] * 2 + [0] * 5)  # 0.6 right at confidence 0.9, all right at 0.6
    assert metrics.expected_calibration_error(probabilities, labels) == pytest.approx((0.3 + 0.4) / 2, abs=1e-12)


def test_calibration_error_equals_the_sum_over_its_definition(predictions):
    logits, labels = predictions
    probabilities = torch.from_numpy(logits).softmax(dim=1).numpy()
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    expected = 0.0
    for index in range(15):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_a_multi_label_model_is_measured_by_sigmoids(predictions):
    logits, labels = predictions
    found = metrics.evaluate_predictions(logits, labels, NAMES, problem_type="multi_label_classification")
    targets = torch.nn.functional.one_hot(torch.from_numpy(labels), len(NAMES)).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(logits), targets, reduction="none")
    assert found["loss"] == pytest.approx(loss.sum(dim=1).mean().item(), abs=1e-12)
    sigmoids = torch.from_numpy(logits).sigmoid().numpy()
    assert found["expected_calibration_error"] == metrics.expected_calibration_error(sigmoids, labels)


def test_top_5_accuracy_of_five_classes_is_refused():
    with pytest.raises(InputError, match="more than 5 classes; got 5"):
        metrics.Top5Accuracy().compute(predictions=np.full((2, 5), 0.2), references=[0, 1])


BAD_SCORES = {
    "other number of classes": (np.zeros((2, 4)), [0, 1], r"shape \(2, 4\)"),
    "other number of labels": (np.zeros((2, 3)), [0], "1 labels"),
    "no samples": (np.zeros((0, 3)), [], "non-empty"),
    "label too large": (np.zeros((2, 3)), [0, 3], "label 3 at row 1 is outside 0..2"),
    "negative label": (np.zeros((2, 3)), [-1, 1], "label -1 at row 0"),
    "NaN": (np.array([[0.0, 0, 0], [0, np.nan, 0]]), [0, 1], "row 1 hold NaN"),
}


@pytest.mark.parametrize(("scores", "labels", "message"), BAD_SCORES.values(), ids=BAD_SCORES)
def test_scores_that_do_not_fit_are_refused(scores, labels, message):
    with pytest.raises(InputError, match=message):
        metrics.evaluate_predictions(scores, np.array(labels, dtype=int), NAMES[:3])

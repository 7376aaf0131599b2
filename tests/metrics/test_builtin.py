"""The built-in metrics against scikit-learn and examples by hand; what they refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sklearn import metrics as sklearn

from nnorm_export import InputError
from nnorm_export.metrics.builtin import BUILTINS, builtin_of
from nnorm_export.metrics.words import edit_distance

RNG = np.random.default_rng(0)


def value(name: str, outputs: Any, labels: Any) -> float:
    metric = builtin_of(name)
    assert metric is not None
    return metric(outputs, labels)


@pytest.mark.parametrize(
    ("given", "name"),
    [("top-1", "top1"), ("TOP5", "top5"), ("mean-iou", "mean_iou"), ("mean_iou", "mean_iou"), ("wer", "wer")],
)
def test_names_are_taken_with_dashes(given: str, name: str) -> None:
    found = builtin_of(given)
    assert found is not None
    assert found.name == name
    assert builtin_of("accuracy") is None


def test_each_says_its_direction_and_whether_it_is_a_share() -> None:
    assert {name for name, metric in BUILTINS.items() if metric.lower_is_better} == {"rmse", "wer"}
    assert {name for name, metric in BUILTINS.items() if not metric.is_share} == {"rmse", "r2"}


@pytest.mark.parametrize("samples", [1, 7, 250])
@pytest.mark.parametrize(("name", "k"), [("top1", 1), ("top5", 5)])
def test_top_k(name: str, k: int, samples: int) -> None:
    scores, labels = RNG.normal(size=(samples, 9)), RNG.integers(0, 9, samples)
    expected = sklearn.top_k_accuracy_score(labels, scores, k=k, labels=range(9))
    assert value(name, scores, labels) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_top1_of_ties_and_nan(dtype: Any) -> None:
    scores = np.array([[1, 1, 0], [0, 1, 1], [np.nan, 2, 1], [3, 1, 2]], dtype)
    assert value("top1", scores, [0, 1, 1, 0]) == 0.75  # the least class of equal scores; NaN is wrong
    assert value("top1", scores, [1, 2, 0, 2]) == 0.0


@pytest.mark.parametrize("form", ["scores", "classes"])
def test_f1_is_the_mean_over_the_classes_of_the_labels(form: str) -> None:
    scores, labels = RNG.normal(size=(51, 6)), RNG.integers(0, 4, 51)  # classes 4 and 5 are not in the labels
    predictions = scores.argmax(1)
    expected = sklearn.f1_score(labels, predictions, labels=np.unique(labels), average="macro")
    assert value("f1", scores if form == "scores" else predictions, labels) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(40,), (40, 1)])
def test_binary_f1_is_that_of_class_1(shape: tuple[int, ...]) -> None:
    logits, labels = RNG.normal(size=shape), RNG.integers(0, 2, shape)
    expected = sklearn.f1_score(labels.reshape(-1), logits.reshape(-1) > 0)
    assert value("f1", logits, labels) == pytest.approx(expected)


def test_f1_by_hand() -> None:
    # Class 0: TP 1, FP 1, FN 1. Class 1: TP 2, FP 1, FN 1.
    assert value("f1", [0, 0, 1, 1, 1], [0, 1, 1, 1, 0]) == pytest.approx((2 / 4 + 4 / 6) / 2)


def test_mean_iou() -> None:
    scores, labels = RNG.normal(size=(3, 4, 5, 7)), RNG.integers(0, 4, (3, 5, 7))
    expected = sklearn.jaccard_score(labels.reshape(-1), scores.argmax(1).reshape(-1), average="macro")
    assert value("mean_iou", scores, labels) == pytest.approx(expected)
    assert value("mean_iou", scores.argmax(1), labels) == pytest.approx(expected)
    ignored = labels.copy()
    ignored[0, 0], ignored[1, 1] = 255, -1
    counted = (ignored >= 0) & (ignored != 255)
    expected = sklearn.jaccard_score(labels[counted], scores.argmax(1)[counted], average="macro")
    assert value("mean_iou", scores, ignored) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(1,), (31,), (31, 1), (9, 3, 2)])
def test_rmse(shape: tuple[int, ...]) -> None:
    outputs, labels = RNG.normal(size=shape), RNG.normal(size=shape)
    assert value("rmse", outputs, labels) == pytest.approx(np.sqrt(np.mean((outputs - labels) ** 2)))
    if shape == (31, 1):
        assert value("rmse", outputs, labels[:, 0]) == value("rmse", outputs, labels)


@pytest.mark.parametrize("shape", [(2,), (31,), (31, 3)])
def test_r2(shape: tuple[int, ...]) -> None:
    labels = RNG.normal(size=shape) + 1e5  # a mean far from 0 must not cost digits
    outputs = labels + 0.3 * RNG.normal(size=shape)
    assert value("r2", outputs, labels) == pytest.approx(sklearn.r2_score(labels, outputs), rel=1e-6)


def test_r2_of_equal_labels_is_not_a_number() -> None:
    assert np.isnan(value("r2", [1.0, 2.0, 3.0], [7.0, 7.0, 7.0]))


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("abcdef", "badcfe", 4), ("a", "a", 0)],
)
def test_edit_distance(one: str, other: str, distance: int) -> None:
    assert edit_distance(one, other) == distance == edit_distance(other, one)


def test_wer_of_texts_and_of_tokens() -> None:
    assert value("wer", ["the cat sat", "hello"], ["the cat sat down", "hello there"]) == pytest.approx(2 / 6)
    assert value("wer", np.array([[1, 2, 3, -1], [9, -1, -1, -1]]), [[1, 2, 3, 4], [9, 8]]) == pytest.approx(2 / 6)
    scores = np.eye(5)[[[1, 2, 3], [4, 0, 0]]].astype(np.float32)
    assert value("wer", scores, np.array([[1, 2, 2], [4, -1, -1]])) == pytest.approx(1 / 4)
    assert value("wer", np.array(["a b", "c"]), ["a b", "d"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["top1", "top5", "f1", "mean_iou", "rmse", "r2", "wer"])
def test_a_resample_by_weights_is_the_metric_of_the_drawn_samples(name: str) -> None:
    """The bootstrap never computes a metric of the drawn samples; it weights what was kept of each."""
    count = 33
    outputs: Any = RNG.normal(size=(count, 8))
    labels: Any = RNG.integers(0, 8, count)
    if name == "mean_iou":
        outputs, labels = RNG.normal(size=(count, 3, 6)), RNG.integers(0, 3, (count, 6))
    elif name in ("rmse", "r2"):
        labels = outputs + RNG.normal(size=outputs.shape)
    elif name == "wer":
        outputs, labels = RNG.integers(0, 3, (count, 5)), RNG.integers(0, 3, (count, 4))
    statistics = BUILTINS[name].statistics(outputs, labels)
    indices = RNG.integers(0, count, (4, count))
    weights = np.stack([np.bincount(row, minlength=count) for row in indices]).astype(float)
    expected = [value(name, outputs[row], labels[row]) for row in indices]
    assert statistics.count == count
    np.testing.assert_allclose(statistics.weighted(weights), expected, rtol=1e-9)


SCORES = RNG.normal(size=(4, 3))


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "message"),
    [
        ("top1", SCORES[:, 0], [0, 1, 1, 0], "shape [4], and it takes scores of two classes or more, [N, C]; f1 takes"),
        ("top1", SCORES[:, :1], [0, 0, 0, 0], "shape [4, 1], and it takes scores of two classes or more"),
        ("top1", SCORES, [0, 1, 2], "3 labels for 4 outputs; give the labels of the samples"),
        ("top1", SCORES[:0], np.zeros(0, int), "the outputs and labels are empty"),
        ("top1", SCORES, [0, 1, 2, 3], "a label is 3, and the outputs have 3 classes; labels are 0 to 2"),
        ("top1", SCORES, [0, 1, 2, -1], "a label is -1"),
        ("top1", SCORES, [0.0, 1.0, 2.0, 0.0], "the labels are float64, and it takes the number of each class"),
        ("top1", SCORES, np.eye(3, dtype=int)[[0, 1, 2, 0]], "the labels have shape [4, 3], and it takes one a sample"),
        ("top1", SCORES, ["a", "b", "c", "a"], "which are not numbers"),
        ("top1", SCORES, [[0], [1, 2], [0], [0]], "the labels are not an array"),
        ("top1", SCORES, {"y": [0], "z": [0]}, "a dict of y, z is given; name one"),
        ("top5", SCORES, [0, 1, 2, 0], "of 3 classes each is among the 5 greatest; choose top1"),
        ("f1", np.array([0.1, 0.9]), [0, 1], "each score is from 0 to 1, as probabilities are"),
        ("f1", np.zeros((2, 3, 4)), [0, 1], "the outputs have shape [2, 3, 4]"),
        ("f1", [0, -1], [0, 1], "a class is negative"),
        ("mean_iou", RNG.normal(size=(2, 3, 4, 4)), np.zeros((2, 4, 5), int), "the outputs have shape [2, 4, 4] and"),
        ("mean_iou", RNG.normal(size=(2, 3, 4)), np.full((2, 4), 3), "a label is 3"),
        ("rmse", SCORES, SCORES[:, :2], "shape [4, 3] and the labels [4, 2]; give labels of the shape"),
        ("rmse", np.zeros((2, 0)), np.zeros((2, 0)), "without elements"),
        ("rmse", np.float32(1), np.float32(1), "are one number"),
        ("r2", [1.0], [1.0], "it needs two samples or more"),
        ("wer", ["a"], [[1]], "one of the outputs and labels is text and the other token ids"),
        ("wer", ["a"], [""], "the labels have no word"),
        ("wer", SCORES, ["a"], "float64 of shape [4, 3], and it takes texts, token ids [N, T] or scores"),
        ("wer", ["a"], 3, "the labels are a int; give a list of texts"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, outputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        value(name, outputs, labels)
    assert message in str(caught.value)
    assert name in str(caught.value)

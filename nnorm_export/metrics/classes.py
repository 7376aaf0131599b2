"""Metrics of classes: top-1 and top-5 accuracy, F1, and the mean intersection over union."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.errors import InputError
from nnorm_export.metrics.shapes import (
    OWN,
    array_of,
    check_count,
    check_equal_shapes,
    check_range,
    check_vector,
    class_labels,
    rows_of,
)
from nnorm_export.metrics.statistics import ClassCounts, Outcomes, Statistics, Sums

IGNORED = 255  # the usual mark of pixels without a class in maps of 8 bits


def top1(outputs: Any, labels: Any) -> Statistics:
    """mean over samples of [argmax outputs = label]: the share of samples whose greatest score is the label's.

    Of equal scores, the one of the least class counts as the greatest. A row with NaN is wrong.

    Args:
        outputs: scores [N, C].
        labels: the number of each sample's class, [N].
    """
    return _among_greatest(outputs, labels, 1, "top1")


def top5(outputs: Any, labels: Any) -> Statistics:
    """mean over samples of [label's score is among the 5 greatest]; arguments and ties as for :func:`top1`."""
    return _among_greatest(outputs, labels, 5, "top5")


def _among_greatest(outputs: Any, labels: Any, k: int, metric: str) -> Statistics:
    scores, classes = array_of(outputs, metric, "outputs"), class_labels(labels, metric)
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise InputError(
            f"{metric}: the outputs have shape {list(scores.shape)}, and it takes scores of two classes or more, "
            f"[N, C]; {'f1 takes one score a sample, ' if scores.ndim == 1 or scores.shape[1:] == (1,) else ''}{OWN}"
        )
    if scores.shape[1] <= k:
        raise InputError(f"{metric}: of {scores.shape[1]} classes each is among the {k} greatest; choose top1")
    check_vector(classes, metric)
    check_count(metric, len(scores), len(classes))
    check_range(classes, scores.shape[1], metric)
    own = np.take_along_axis(scores, classes[:, None], 1)
    comes_before = (scores == own) & (np.arange(scores.shape[1]) < classes[:, None])
    rank = ((scores > own) | comes_before).sum(1)
    return Outcomes((rank < k) & ~np.isnan(scores).any(1))


def f1(outputs: Any, labels: Any) -> Statistics:
    """F1 of a class = 2·TP / (2·TP + FP + FN); the mean over the classes that occur in the labels.

    Binary, where a sample has one score: F1 of the class 1, which a score above 0 predicts.

    Args:
        outputs: scores [N, C], of which the greatest is predicted; classes as integers [N]; or one logit a sample,
            floating-point [N] or [N, 1].
        labels: the number of each sample's class, [N], or [N, 1] for one logit a sample.
    """
    scores, classes = array_of(outputs, "f1", "outputs"), class_labels(labels, "f1")
    if is_float(scores.dtype) and (scores.ndim == 1 or scores.shape[1:] == (1,)):
        return _binary_f1(scores.reshape(-1), classes.reshape(-1) if classes.shape[1:] == (1,) else classes)
    if scores.ndim not in (1, 2):
        raise InputError(
            f"f1: the outputs have shape {list(scores.shape)}, and it takes scores [N, C] or classes [N]; {OWN}"
        )
    check_vector(classes, "f1")
    check_count("f1", len(scores), len(classes))
    if scores.ndim == 2:
        check_range(classes, scores.shape[1], "f1")
        count, predictions = scores.shape[1], _greatest(scores)
    else:
        predictions = scores.astype(np.int64)
        if min(classes.min(), predictions.min()) < 0:
            raise InputError("f1: a class is negative; classes are integers from 0")
        count = int(max(classes.max(), predictions.max())) + 1
    return ClassCounts(classes, predictions, count, _macro_f1)


def _binary_f1(scores: Array, labels: Array) -> Statistics:
    check_vector(labels, "f1")
    check_count("f1", len(scores), len(labels))
    check_range(labels, 2, "f1")
    if ((scores >= 0) & (scores <= 1)).all():
        raise InputError(
            "f1: each score is from 0 to 1, as probabilities are, and f1 takes logits, positive above 0; give a "
            "function of your own, f(outputs, labels), with the threshold of your application"
        )
    return ClassCounts(labels, (scores > 0).astype(np.int64), 2, _f1_of_class_1)


def _macro_f1(correct: Array, predicted: Array, labeled: Array) -> float:
    # TP + FP are predicted, TP + FN are labeled.
    occurs = labeled > 0
    return float((2 * correct[occurs] / (predicted[occurs] + labeled[occurs])).mean())


def _f1_of_class_1(correct: Array, predicted: Array, labeled: Array) -> float:
    total = float(predicted[1] + labeled[1])
    return 2 * float(correct[1]) / total if total else float("nan")


def mean_iou(outputs: Any, labels: Any) -> Statistics:
    """IoU of a class = |prediction ∩ label| / |prediction ∪ label| over all pixels; the mean over the labels' classes.

    Pixels whose label is negative or 255 have no class and are left out. A pixel with NaN is wrong.

    Args:
        outputs: scores [N, C, …], of which the greatest along axis 1 is predicted, or maps of classes as integers.
        labels: maps of classes, [N, …].
    """
    scores, maps = array_of(outputs, "mean_iou", "outputs"), class_labels(labels, "mean_iou")
    if scores.ndim < 2:
        raise InputError(f"mean_iou: the outputs have shape {list(scores.shape)}, and it takes [N, C, …] or [N, …]")
    check_count("mean_iou", len(scores), len(maps) if maps.ndim else 0)
    counted = (maps >= 0) & (maps != IGNORED)
    if is_float(scores.dtype):
        predictions, classes = _greatest(scores), scores.shape[1]
        check_range(maps[counted], classes, "mean_iou")
    else:
        predictions = scores.astype(np.int64)
        classes = int(max(maps[counted].max(initial=0), predictions.max(initial=0))) + 1
    check_equal_shapes(predictions, maps, "mean_iou")
    return Sums(_areas(rows_of(predictions), rows_of(maps), rows_of(counted), classes), _mean_iou_of_areas)


def _areas(predictions: Array, labels: Array, counted: Array, classes: int) -> Array:
    """Of each sample, for every class: the pixels of the intersection, of the union, and of the label; [N, 3·C]."""
    rows = np.zeros((len(labels), 3, classes))
    for row, prediction, label, counts in zip(rows, predictions, labels, counted, strict=True):
        found, true = prediction[counts], label[counts]
        labeled = np.bincount(true, minlength=classes)
        intersection = np.bincount(true[found == true], minlength=classes)
        predicted = np.bincount(found[found >= 0], minlength=classes)
        row[:] = intersection, predicted + labeled - intersection, labeled
    return rows.reshape(len(labels), -1)


def _mean_iou_of_areas(sums: Array) -> Array:
    intersection, union, labeled = np.moveaxis(sums.reshape(len(sums), 3, -1), 1, 0)
    occurs = labeled > 0
    total: Array = np.where(occurs, intersection / union, 0.0).sum(1) / occurs.sum(1)
    return total


def _greatest(scores: Array) -> Array:
    """The class of the greatest score along axis 1; -1 where a score is NaN."""
    found: Array = np.where(np.isnan(scores).any(1), -1, scores.argmax(1))
    return found

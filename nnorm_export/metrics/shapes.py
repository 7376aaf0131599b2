"""Whether outputs and labels fit a built-in metric. Each error says what was given and what the metric takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, as_array, is_float
from nnorm_export.errors import InputError

BATCHES = "a list of batches (inputs, labels) is given as iter(batches)"
OWN = "or give a function of your own, f(outputs, labels)"


def array_of(value: Any, metric: str, what: str) -> Array:
    """``value``, ``what`` of ``metric``, as an array of numbers; bfloat16 becomes float32.

    Raises:
        InputError: it is a dict of several arrays, is ragged, or holds something other than numbers.
    """
    if isinstance(value, dict):
        if len(value) != 1:
            raise InputError(f"{metric} takes one array of {what}, and a dict of {', '.join(value)} is given; name one")
        (value,) = value.values()
    try:
        array = as_array(value)
    except ValueError as error:  # rows of several lengths
        raise InputError(
            f"{metric}: the {what} are not an array ({error}); give rows of one shape, {OWN}; {BATCHES}"
        ) from error
    if array.dtype == bool or np.issubdtype(array.dtype, np.integer):
        return array
    if is_float(array.dtype):
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    raise InputError(f"{metric}: the {what} are {array.dtype}, which are not numbers; give numbers, {OWN}")


def class_labels(value: Any, metric: str) -> Array:
    """Labels that are numbers of classes, as int64.

    Raises:
        InputError: they are not integers.
    """
    labels = array_of(value, metric, "labels")
    if is_float(labels.dtype):
        raise InputError(
            f"{metric}: the labels are {labels.dtype}, and it takes the number of each class: integers from 0, "
            "labels.astype('int64'), or of one-hot labels labels.argmax(1)"
        )
    return labels.astype(np.int64)


def check_count(metric: str, outputs: int, labels: int) -> None:
    """Raises an InputError unless there are samples, and as many labels as outputs."""
    if outputs != labels:
        raise InputError(
            f"{metric}: {labels} labels for {outputs} outputs; give the labels of the samples that the model runs on"
        )
    if outputs == 0:
        raise InputError(f"{metric}: the outputs and labels are empty; give inputs with their labels")


def check_vector(labels: Array, metric: str) -> None:
    """Raises an InputError unless ``labels`` are one number a sample."""
    if labels.ndim != 1:
        raise InputError(f"{metric}: the labels have shape {list(labels.shape)}, and it takes one a sample, [N]")


def check_range(labels: Array, classes: int, metric: str) -> None:
    """Raises an InputError unless ``labels`` are 0 to ``classes`` - 1."""
    least, greatest = int(labels.min(initial=0)), int(labels.max(initial=0))
    if least < 0 or greatest >= classes:
        wrong = least if least < 0 else greatest
        raise InputError(
            f"{metric}: a label is {wrong}, and the outputs have {classes} classes; labels are 0 to {classes - 1}"
        )


def check_equal_shapes(outputs: Array, labels: Array, metric: str) -> None:
    """Raises an InputError unless outputs and labels have one shape."""
    if outputs.shape != labels.shape:
        raise InputError(
            f"{metric}: the outputs have shape {list(outputs.shape)} and the labels {list(labels.shape)}; give labels "
            f"of the shape of the outputs, {OWN}"
        )


def rows_of(array: Array) -> Array:
    """``array`` as [N, elements of a sample]."""
    return array.reshape(len(array), math.prod(array.shape[1:]))

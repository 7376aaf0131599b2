"""Samples of examples that hold the same rows in batches of other sizes.

A model that computes each row by itself is as sensitive in a row of one batch as it is in that row of another. The
samples (:meth:`~nnorm_export.parity.reference.pytorch_model.PyTorchModel.samples`), which take most of the time of a
comparison, are then taken once. That the model is one is seen in its results in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnorm_export.dtypes import Array
from nnorm_export.models.arguments import tensors_in
from nnorm_export.parity.reference.pytorch_model import PyTorchModel, seeds_for

_SAME = 1e-9  # of the greatest element: sums in another order differ by 1e-13 in float64

Results = Sequence[Array]


def samples_of(
    pytorch: PyTorchModel,
    examples: Sequence[Mapping[str, Any]],
    expected: Sequence[Results],
    truths: Sequence[Results | None],
) -> list[list[list[Array]]]:
    """The samples of each example; those of the first serve the examples that hold rows of it.

    Args:
        expected, truths: what :meth:`PyTorchModel.run` and :meth:`PyTorchModel.run_in_float64` returned for them.
    """
    first = pytorch.samples(examples[0], expected[0])
    found = [first]
    for example, result, truth in zip(examples[1:], expected[1:], truths[1:], strict=True):
        rows = _rows_of(examples[0], example)
        is_enough = len(seeds_for(result)) <= len(first)
        if rows is not None and is_enough and _computes_rows(truths[0], truth, rows):
            found.append([[_taken(array, like, rows) for array, like in zip(s, result, strict=True)] for s in first])
        else:
            found.append(pytorch.samples(example, result))
    return found


def _rows_of(first: Mapping[str, Any], other: Mapping[str, Any]) -> Array | None:
    """The rows of ``first`` that ``other`` holds: the first ones, again and again; None if it holds something else."""
    pairs = list(zip(tensors_in(dict(first)), tensors_in(dict(other)), strict=True))
    resized = [(a, b) for a, b in pairs if a.shape != b.shape]
    if any(a.dim() == 0 or len(a) == 0 for a, _ in resized):
        return None
    length, size = (len(resized[0][0]), len(resized[0][1])) if resized else (1, 1)
    rows = torch.arange(size) % length
    held = all(len(a) == length and torch.equal(a[rows.to(a.device)], b) for a, b in resized)
    return rows.numpy() if held and all(torch.equal(a, b) for a, b in pairs if a.shape == b.shape) else None


def _computes_rows(first: Results | None, other: Results | None, rows: Array) -> bool:
    """Whether the results ``other`` are the rows of the results ``first``, or the same where they have no rows."""
    if first is None or other is None or len(first) != len(other):
        return False
    for a, b in zip(first, other, strict=True):
        if a.shape != b.shape and (a.ndim == 0 or int(rows.max()) >= len(a)):
            return False
        taken = _taken(a, b, rows)
        if taken.shape != b.shape or taken.dtype != b.dtype:
            return False
        greatest = np.abs(b[np.isfinite(b)]).max(initial=0) if b.dtype.kind == "f" else 0
        if not np.allclose(taken, b, rtol=0, atol=_SAME * float(greatest), equal_nan=b.dtype.kind == "f"):
            return False
    return True


def _taken(array: Array, like: Array, rows: Array) -> Array:
    return array if array.shape == like.shape else array[rows]

"""PyTorch's runs with random last bits, taken once for examples that hold the same rows in batches of other sizes.

A model that computes each row by itself is as sensitive in a row of one batch as in that row of another. These runs
(:meth:`~nnorm_export.parity.reference.pytorch_model.PyTorchModel.perturbed_runs`) take most of the time of a
comparison. That a model computes each row by itself is seen in its results in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnorm_export.dtypes import Array
from nnorm_export.models.arguments import tensors_in
from nnorm_export.parity.reference.pytorch_model import PyTorchModel, seeds_for
from nnorm_export.parity.verdict.case import Case
from nnorm_export.steps import counted

_TOLERANCE = 1e-9  # of the greatest element: sums in another order differ by 1e-13 in float64

Results = Sequence[Array]


def with_pytorchs_runs(
    pytorch: PyTorchModel, examples: Sequence[Mapping[str, Any]], cases: Sequence[Case]
) -> list[Case]:
    """The cases of ``examples`` with PyTorch's runs in float64 and those with random last bits.

    All runs in float64 come first: of a large model there is one copy at a time.
    """
    float64 = [pytorch.run_in_float64(example) for example in counted("PyTorch in float64", examples)]
    first = pytorch.perturbed_runs(examples[0], cases[0].expected)
    found = [cases[0].with_runs(float64[0], first)]
    for example, case, exact in zip(examples[1:], cases[1:], float64[1:], strict=True):
        rows = _rows_of(examples[0], example)
        is_enough = len(seeds_for(case.expected)) <= len(first)
        if rows is not None and is_enough and _computes_rows(float64[0], exact, rows):
            runs = [[_taken(a, like, rows) for a, like in zip(run, case.expected, strict=True)] for run in first]
        else:
            runs = pytorch.perturbed_runs(example, case.expected)
        found.append(case.with_runs(exact, runs))
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
        if not np.allclose(taken, b, rtol=0, atol=_TOLERANCE * float(greatest), equal_nan=b.dtype.kind == "f"):
            return False
    return True


def _taken(array: Array, like: Array, rows: Array) -> Array:
    return array if array.shape == like.shape else array[rows]

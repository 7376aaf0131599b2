"""The results in float64, where float64 computes the same thing as the file's dtype.

It does not where a model asks for its dtype: ``torch.finfo(x.dtype).min`` is another number in float64, autocast leaves
float64 alone, and a threshold may select other rows. There, PyTorch's results in the file's dtype are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES, distance


def usable_float64(
    expected: Sequence[Array], float64: Sequence[Array] | None, perturbed: Sequence[Sequence[Array]]
) -> list[Array] | None:
    """Returns ``float64``, with elements of ``expected`` where float64 changes them and random last bits do not.

    None if the model did not run in float64, or its results there have other shapes.

    Args:
        expected: PyTorch's results in the file's dtype.
        perturbed: those with random last bits.
    """
    if float64 is None or [array.shape for array in float64] != [array.shape for array in expected]:
        return None
    found = []
    for number, (result, exact) in enumerate(zip(expected, float64, strict=True)):
        if not perturbed or is_float(result.dtype) != is_float(exact.dtype):
            found.append(exact)
            continue
        is_constant = np.logical_and.reduce([results[number] == result for results in perturbed])
        if not is_float(result.dtype):
            found.append(np.where(is_constant, result, exact))
            continue
        wide = result.astype(np.float64)
        is_constant &= np.isfinite(wide)
        with np.errstate(invalid="ignore"):
            is_other = distance(wide, exact) > FLOAT_TYPES[result.dtype.name].stable * np.abs(wide)
        found.append(np.where(is_constant & is_other, wide, exact))
    return found

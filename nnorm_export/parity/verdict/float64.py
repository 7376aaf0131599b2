"""The results in float64, where they are those of the computation that is compared.

They are not where a model asks for a dtype: ``torch.finfo(x.dtype).min`` is another number in float64, autocast leaves
float64 alone, and a threshold may choose other rows. PyTorch's results in the file's dtype take their place there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES, distance


def usable_truth(
    expected: Sequence[Array], truth: Sequence[Array] | None, samples: Sequence[Sequence[Array]]
) -> list[Array] | None:
    """Returns ``truth``, with PyTorch's results where random last bits do not change them and float64 does.

    None if the model did not run in float64, or its results there have other shapes.

    Args:
        expected: PyTorch's results in the file's dtype.
        samples: those with random last bits.
    """
    if truth is None or [array.shape for array in truth] != [array.shape for array in expected]:
        return None
    found = []
    for number, (result, exact) in enumerate(zip(expected, truth, strict=True)):
        if not samples or is_float(result.dtype) != is_float(exact.dtype):
            found.append(exact)
            continue
        is_steady = np.logical_and.reduce([sample[number] == result for sample in samples])
        if not is_float(result.dtype):
            found.append(np.where(is_steady, result, exact))
            continue
        wide = result.astype(np.float64)
        is_steady &= np.isfinite(wide)
        with np.errstate(invalid="ignore"):
            is_other = distance(wide, exact) > FLOAT_TYPES[result.dtype.name].stable * np.abs(wide)
        found.append(np.where(is_steady & is_other, wide, exact))
    return found

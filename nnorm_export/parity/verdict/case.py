"""One set of inputs, what a file and PyTorch compute from it, and how far each element of the file may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES, allowed_errors, distance, unstable_results


@dataclass(frozen=True)
class Case:
    """One comparison. Every sequence but ``inputs`` has an entry for each output.

    Attributes:
        inputs: in the order of the file's inputs.
        expected: PyTorch's results in the file's dtype.
        actual: the file's results.
        float64: PyTorch's results in float64; None if the model does not run in float64.
        perturbed: PyTorch's results with random last bits, run by run.
        allowed_error: of each element; None for an output whose allowed error cannot be measured.
        is_changed: whether the inputs were made from the user's.
    """

    inputs: Sequence[Array]
    expected: Sequence[Array]
    actual: Sequence[Array]
    float64: Sequence[Array] | None = None
    perturbed: Sequence[Sequence[Array]] = ()
    allowed_error: Sequence[Array | None] | None = None
    is_changed: bool = False

    def with_runs(self, float64: Sequence[Array] | None, perturbed: Sequence[Sequence[Array]]) -> Case:
        """This case with PyTorch's other runs: ``float64`` as far as it is usable."""
        return replace(self, float64=usable_float64(self.expected, float64, perturbed), perturbed=perturbed)

    def is_stable(self, computed_in: str) -> bool:
        """Whether PyTorch's own results, computed in the dtype ``computed_in``, are near those in float64."""
        return not any(unstable_results(self.expected, self.float64, computed_in))

    def with_allowed_error(self) -> Case:
        return replace(self, allowed_error=allowed_errors(self.expected, self.perturbed, self.float64))


def usable_float64(
    expected: Sequence[Array], float64: Sequence[Array] | None, perturbed: Sequence[Sequence[Array]]
) -> list[Array] | None:
    """Returns ``float64``, with elements of ``expected`` where float64 changes them and random last bits do not.

    Such elements depend on the dtype: ``torch.finfo(x.dtype).min`` is another number in float64, autocast leaves
    float64 alone, and a threshold may select other rows. PyTorch's results in the file's dtype are the reference there.

    Returns:
        None if the model did not run in float64, or its results there have other shapes.
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

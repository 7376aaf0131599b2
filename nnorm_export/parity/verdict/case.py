"""One set of inputs, what a file and PyTorch compute from it, and how far each element of the file may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.parity.verdict.allowed_error import (
    BUDGET,
    FLOAT_TYPES,
    allowed_errors,
    distance,
    rounding_error,
    stable_runs,
    unstable_results,
)
from nnorm_export.parity.verdict.dependence import dependence


@dataclass(frozen=True)
class Case:
    """One comparison. Every sequence but ``inputs`` has an entry for each output.

    Attributes:
        inputs: in the order of the file's inputs.
        expected: PyTorch's results in the file's dtype.
        actual: the file's results.
        float64: PyTorch's results in float64, as far as they are usable (:func:`usable_float64`); None if the model
            does not run in float64.
        float64_unchanged: all that the model returns in float64. Those of another dtype are compared with these.
        perturbed: PyTorch's results with random last bits, run by run.
        allowed_error: of each element that counts; None for an output whose allowed error cannot be measured.
        counted: whether each index of an output's first axes counts; None if all do (:mod:`.where`).
        is_changed: whether the inputs were made from the user's.
    """

    inputs: Sequence[Array]
    expected: Sequence[Array]
    actual: Sequence[Array]
    _: KW_ONLY
    float64: Sequence[Array] | None = None
    float64_unchanged: Sequence[Array] | None = None
    perturbed: Sequence[Sequence[Array]] = ()
    allowed_error: Sequence[Array | None] | None = None
    counted: Sequence[Array | None] | None = None
    is_changed: bool = False

    def with_runs(self, float64: Sequence[Array] | None, perturbed: Sequence[Sequence[Array]]) -> Case:
        """This case with PyTorch's other runs: ``float64`` as far as it is usable."""
        usable = usable_float64(self.expected, float64, perturbed)
        return replace(self, float64=usable, float64_unchanged=float64, perturbed=perturbed)

    def is_stable(self, computed_in: str) -> bool:
        """Whether PyTorch's own results, computed in the dtype ``computed_in``, are near those in float64."""
        case = self.of_counted()
        return not any(unstable_results(case.expected, case.float64, computed_in))

    def with_allowed_error(self) -> Case:
        case = self.of_counted()
        return replace(self, allowed_error=allowed_errors(case.expected, case.perturbed, case.float64))

    def of_counted(self) -> Case:
        """This case with the elements that count alone: the axes that a mask has become one."""
        if self.counted is None:
            return self
        return replace(
            self,
            expected=self.take(self.expected),
            actual=self.take(self.actual),
            float64=None if self.float64 is None else self.take(self.float64),
            perturbed=[self.take(results) for results in self.perturbed],
            counted=None,
        )

    def dependence(self, changed: Sequence[Array] | None) -> list[bool | None]:
        """For each output, whether what counts depends on the input; ``changed`` are PyTorch's results on another."""
        return dependence(self.take(self.expected), None if changed is None else self.take(changed))

    def take(self, results: Sequence[Array]) -> Sequence[Array]:
        """The elements of ``results`` that count; all of a result of another shape, which no comparison takes."""
        if self.counted is None or len(results) != len(self.counted):
            return results
        pairs = zip(results, self.counted, strict=True)
        return [
            result if counts is None or result.shape[: counts.ndim] != counts.shape else result[counts]
            for result, counts in pairs
        ]


def usable_float64(
    expected: Sequence[Array], float64: Sequence[Array] | None, perturbed: Sequence[Sequence[Array]]
) -> list[Array] | None:
    """Returns ``float64``, with elements of ``expected`` where float64 changes them and random last bits do not.

    Such elements depend on the dtype: ``torch.finfo(x.dtype).min`` is another number in float64, autocast leaves
    float64 alone, and a threshold may select other rows. PyTorch's results in the file's dtype are the reference there.
    A small element may be far from float64 by a rounding, and keep its value in a few runs by chance: sin(4·x) near 0
    in half precision. It keeps float64 where that is as near as the roundings of its neighbors.

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
        wide, dtype = result.astype(np.float64), result.dtype.name
        is_constant &= np.isfinite(wide)
        with np.errstate(invalid="ignore"):
            is_other = distance(wide, exact) > FLOAT_TYPES[dtype].stable * np.abs(wide)
        if (is_constant & is_other).any():
            runs = stable_runs([results[number] for results in perturbed], wide, dtype)
            is_other &= distance(wide, exact) > BUDGET * rounding_error(runs, wide, dtype)
        found.append(np.where(is_constant & is_other, wide, exact))
    return found

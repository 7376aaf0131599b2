"""One set of inputs, what a file and PyTorch compute from it, and how far each element of the file may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nnorm_export.dtypes import Array
from nnorm_export.parity.verdict.allowed_error import allowed_errors, unstable_results
from nnorm_export.parity.verdict.float64 import usable_float64


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

"""A comparison's metrics, and whether an output passes: by the error budget, or by tolerances that the user gives.

- Budget: |file − float64| ≤ allowed error, in every element (:mod:`nnorm_export.parity.verdict.allowed_error`), where
  float64 is the user's own model run in float64. If PyTorch's own error is a large part of the result, the allowed
  error measures nothing, and the output fails with that reason.
- Tolerances: |file − PyTorch| ≤ atol + rtol·|PyTorch|.

Equal results show nothing if there is nothing to compare. Whatever the criterion, an output fails that has no
elements, no finite element, or NaN in PyTorch's own result. Infinite elements, of a mask for example, must be the same
in both, and the note counts them; by the budget, in float64 too. Outputs that do not depend on the input are noted, and
if no floating-point output depends on it, all of them fail (:mod:`nnorm_export.parity.verdict.dependence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.errors import NnormExportError
from nnorm_export.parity.verdict.allowed_error import (
    ALLOWED_OF_EQUAL_INTEGERS,
    BUDGET,
    distance,
    machine_epsilon,
    narrower,
    rounding_error,
    scale_about,
    unstable_result,
)
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.parity.verdict.outcome import OutputParity, errors_on_changed_inputs, on_changed_inputs, worst


@dataclass(frozen=True)
class Comparison:
    """A file, what it is compared with, and by which criteria.

    Attributes:
        file, reference: the two, for messages.
        outputs: the names of the file's outputs.
        criteria: one for each output.
        computed_in: as for :func:`compare_output`.
    """

    file: str
    reference: str
    outputs: Sequence[str]
    criteria: Sequence[Criterion]
    computed_in: str | None = None

    def worst_of(self, cases: Sequence[Case]) -> list[OutputParity]:
        """The worst comparison of each output in all of ``cases``."""
        return [worst(parts) for parts in zip(*map(self.compare_outputs, cases), strict=True)]

    def compare_outputs(self, case: Case) -> list[OutputParity]:
        """:func:`compare_output` for every output of ``case``.

        Raises:
            NnormExportError: the results differ in number or shape.
        """
        if not case.is_changed:
            return self._compare_outputs(case)
        with errors_on_changed_inputs():
            return on_changed_inputs(self._compare_outputs(case))

    def require_same_shapes(self, case: Case) -> None:
        """Raises a NnormExportError if the results differ in number or shape."""
        shapes, expected_shapes = ([list(array.shape) for array in arrays] for arrays in (case.actual, case.expected))
        if shapes != expected_shapes:
            raise NnormExportError(
                f"{self.file} returns {len(shapes)} outputs of shapes {shapes}, {self.reference} returns "
                f"{len(expected_shapes)} of shapes {expected_shapes}: the file was made from another model. Compare it "
                "with its own model, or export this model again"
            )

    def _compare_outputs(self, case: Case) -> list[OutputParity]:
        self.require_same_shapes(case)
        none: list[None] = [None] * len(case.expected)
        sizes = [result.size for result in case.expected]
        case = case.of_counted()
        float64, allowed_error = case.float64 or none, case.allowed_error or none
        rows = zip(self.outputs, case.actual, case.expected, float64, allowed_error, self.criteria, strict=True)
        compared = [
            compare_output(
                name,
                actual,
                expected,
                exact,
                criterion,
                allowed_error=allowed,
                reference=self.reference,
                computed_in=self.computed_in,
            )
            for name, actual, expected, exact, allowed, criterion in rows
        ]
        pairs = zip(compared, case.expected, sizes, strict=True)
        return [_counted(output, result.size, size) for output, result, size in pairs]


def compare_output(
    name: str,
    actual: Array,
    expected: Array,
    float64: Array | None,
    criterion: Criterion | None = None,
    *,
    allowed_error: Array | None = None,
    reference: str = "PyTorch",
    computed_in: str | None = None,
) -> OutputParity:
    """Compares ``actual`` of the file with PyTorch's ``expected``, and with ``float64``.

    If the output has a wider dtype than ``expected``, the dtype of ``expected`` decides what errors it may have. An
    output without elements, without a finite one, or with NaN in ``expected`` fails: nothing was compared.

    Args:
        float64: PyTorch's result in float64; if None, ``expected`` takes its place.
        criterion: None for the error budget.
        allowed_error: of each element, see :mod:`nnorm_export.parity.verdict.allowed_error`; if None, it is measured
            from ``expected`` alone.
        reference: what computed ``expected``, for the reasons.
        computed_in: the narrowest dtype that it was computed in; None for that of ``expected``.
    """
    if actual.shape != expected.shape:
        raise NnormExportError(
            f"{name} has shape {list(actual.shape)} in the file and {list(expected.shape)} in PyTorch: the file was "
            "made from another model. Compare it with its own model, or export this model again"
        )
    rows = actual.shape[0] if actual.ndim else 1
    dtype = actual.dtype.name
    if reason := _nothing_to_compare(expected, reference):
        return OutputParity(name, True, 0.0, 0.0, None, None, rows, dtype).not_compared(reason)
    if is_float(actual.dtype) != is_float(expected.dtype):
        parity = OutputParity(name, False, 0.0, 0.0, None, None, rows, dtype)
        return parity.failed(f"the file returns {dtype}, and {reference} {expected.dtype.name}; export the model again")
    criterion = criterion or Criterion()
    if not is_float(actual.dtype):
        return _compare_integers(name, actual, expected, allowed_error, criterion, reference)
    dtype = narrower(dtype, expected.dtype.name)
    wide, expected_wide = actual.astype(np.float64), expected.astype(np.float64)
    difference = distance(wide, expected_wide)
    nonzero = np.isfinite(expected_wide) & (expected_wide != 0)
    if allowed_error is None and float64 is not None:
        allowed_error = BUDGET * rounding_error([expected], float64, dtype)
    shares = None
    if allowed_error is not None:
        shares = distance(wide, expected_wide if float64 is None else float64) / allowed_error
    parity = OutputParity(
        name,
        passed=True,
        max_abs_diff=float(difference.max(initial=0.0)),
        max_rel_diff=float((difference[nonzero] / np.abs(expected_wide[nonzero])).max(initial=0.0)),
        budget_share=None if shares is None else criterion.of_elements(shares),
        top1_agreement=_top1_agreement(wide, expected_wide),
        rows=rows,
        dtype=dtype,
        note=_infinite_entries(expected_wide),
        greatest=float(_finite(expected_wide).max()),
    )
    has_float64 = float64 is not None or dtype == "float64"
    unknown = "" if has_float64 or not parity.note else f"{parity.note}: {_UNKNOWN_INFINITY}"
    if criterion.kind == "allclose" or (shares is None and not unknown):
        rtol, atol = criterion.tolerances(dtype)
        absolute: float | Array = atol
        if criterion.kind != "allclose":  # torch's atol is for results of scale 1
            sizes = _finite(expected_wide)
            rounding = min(machine_epsilon(dtype) * float(sizes.max()), atol)  # a row may be exactly 0 in PyTorch
            rtol, absolute = BUDGET * rtol, BUDGET * np.maximum(atol * np.minimum(scale_about(sizes), 1.0), rounding)
        share = criterion.of_elements(_shares(difference, expected_wide, rtol, absolute))
        return replace(parity, passed=share <= 1.0, allowed_share=share)
    unstable = unknown
    if float64 is not None:
        unstable = unstable_result(expected_wide, float64, narrower(dtype, computed_in or dtype))
    if unstable or shares is None:
        return parity.failed(unstable)
    share = criterion.of_elements(shares)
    return replace(parity, passed=share <= 1.0, allowed_share=share)


def _compare_integers(
    name: str, actual: Array, expected: Array, allowed_error: Array | None, criterion: Criterion, reference: str
) -> OutputParity:
    """Integers and booleans must be equal; where random last bits change PyTorch's, they may differ by as much.

    A statistic, and tolerances for all outputs, are meant for floating-point outputs: only those that name this output
    count.
    """
    differs = actual != expected
    difference = np.where(differs, np.maximum(distance(actual.astype(np.float64), expected.astype(np.float64)), 1), 0)
    allowed = np.full(difference.shape, ALLOWED_OF_EQUAL_INTEGERS) if allowed_error is None else allowed_error
    if not criterion.is_named:
        criterion = Criterion()
    if criterion.rtol is not None and criterion.atol is not None:
        allowed = np.maximum(allowed, criterion.atol + criterion.rtol * np.abs(expected.astype(np.float64)))
    of_zero = np.maximum(np.abs(expected.astype(np.float64)), 1)
    share = criterion.of_elements(difference / allowed)
    parity = OutputParity(
        name,
        passed=share <= 1,
        max_abs_diff=float(difference.max()),
        max_rel_diff=float((difference / of_zero).max()),
        budget_share=None,
        top1_agreement=None,
        rows=actual.shape[0] if actual.ndim else 1,
        dtype=actual.dtype.name,
        greatest=float(np.abs(expected.astype(np.float64)).max()),
        allowed_share=share,
    )
    count = int(differs.sum())
    if not count:
        return parity
    is_excused = parity.passed and allowed_error is not None
    where = f", where those of {reference} depend on the last bits" if is_excused else ""
    return parity.noted(f"{count} of {differs.size} elements differ{where}")


def criterion_text(
    outputs: Sequence[OutputParity], criteria: Sequence[Criterion], *, is_double: bool, has_float64: bool
) -> str:
    """Describes what decided over ``outputs``, whose criteria are ``criteria``."""
    reason = "the file is in float64" if is_double else "the model does not run in float64"
    has_budget = has_float64 or any(output.budget_share is not None for output in outputs)

    def text(criterion: Criterion) -> str:
        if criterion.kind == "allclose":
            return str(criterion)
        if not has_budget:
            return f"allclose at {BUDGET:g} times torch.testing's tolerances{criterion.of_what}, because {reason}"
        budget = f"budget: at most {BUDGET:g} times the error that roundings cause in PyTorch, in each element"
        against = "against float64" if has_float64 else f"against PyTorch in the same dtype, because {reason}"
        return f"{budget}{criterion.of_what}, {against}"

    if len(set(criteria)) == 1:
        return text(criteria[0])
    pairs = zip(outputs, criteria, strict=True)
    return "; ".join(f"{output.name}: {text(criterion)}" for output, criterion in pairs)


def _nothing_to_compare(expected: Array, reference: str) -> str:
    """Returns why a comparison with ``expected`` shows nothing; empty if it shows something."""
    if expected.size == 0:
        return "it is empty; give at least one row, or inputs for which it has elements"
    if not is_float(expected.dtype):
        return ""
    wide = expected.astype(np.float64)
    if nan := int(np.isnan(wide).sum()):
        return (
            f"{reference} itself gives NaN in {nan} of {wide.size} elements; look for NaN or infinity in the inputs "
            "and in the weights of the checkpoint"
        )
    if not np.isfinite(wide).any():
        return f"{reference} itself gives no finite element; give other inputs, or a checkpoint that has not diverged"
    return ""


def _counted(output: OutputParity, count: int, size: int) -> OutputParity:
    """``output`` with a note on how many of its ``size`` elements were compared, if these are not all."""
    if count == size:
        return output
    if count == 0:
        return output.not_compared("its mask (where) leaves no element; give inputs of which some count")
    return output.noted(f"{count:,} of {size:,} elements count")


def _infinite_entries(expected: Array) -> str:
    count = int(np.isinf(expected).sum())
    return f"{count} of {expected.size} elements are infinite, and must be so in both" if count else ""


_UNKNOWN_INFINITY = (
    "the model does not run in float64, which would show whether they are meant or overflow; let forward run in "
    "float64, or say that they are meant by tolerances (criterion='allclose', --criterion allclose)"
)


def _finite(values: Array) -> Array:
    """|values|, and 0 in the place of infinity."""
    return np.where(np.isfinite(values), np.abs(values), 0.0)


def _shares(difference: Array, expected: Array, rtol: float, atol: float | Array) -> Array:
    """Of each element, |file − PyTorch| / (atol + rtol·|PyTorch|); at most 1 where that is allowed."""
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 · infinity and 0 / 0 are NaN: the difference decides there
        allowed = atol + rtol * np.abs(expected)
        allowed = np.where(np.isfinite(allowed), allowed, atol)
        shares = difference / allowed
    result: Array = np.where(difference <= allowed, np.fmin(shares, 1.0), np.fmax(shares, np.nextafter(1.0, 2.0)))
    return np.where(difference == 0, 0.0, result)


def _top1_agreement(actual: Array, expected: Array) -> float | None:
    if actual.ndim != 2 or actual.shape[1] < 2 or actual.shape[0] == 0:
        return None
    return float((actual.argmax(1) == expected.argmax(1)).mean())

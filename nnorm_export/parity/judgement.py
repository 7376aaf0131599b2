"""Metrics of a comparison, and whether it passes: by an error budget, or by tolerances that the user gives.

The truth is the user's own model run in float64. PyTorch's own error against it, in the file's dtype, is the yardstick
of what that dtype can do on this model and these inputs: a file passes if its error is at most :data:`BUDGET` times
that. If PyTorch's own error is a large part of the result, it measures nothing, and the comparison fails with that
reason. With explicit tolerances the criterion is |file − PyTorch| ≤ atol + rtol·|PyTorch|.

Equal results show something only if there is something to compare. Whatever the criterion, an output fails that has no
elements, no finite element, or NaN in PyTorch's own result. Infinite elements, of a mask for example, must be the same
in both, and the note counts them. Outputs that do not depend on the input are noted, and if no floating-point output
depends on it, all of them fail (:func:`require_dependence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nnorm_export.errors import NnormExportError
from nnorm_export.files.tensors import TensorInfo

Array = NDArray[Any]

BUDGET = 10.0
CRITERIA = ("budget", "allclose")


@dataclass(frozen=True)
class FloatType:
    """What a comparison needs to know of a floating-point dtype.

    Attributes:
        rtol, atol: the tolerances of torch.testing.assert_close.
        stable: the largest error that PyTorch itself may have against float64, as a share of the greatest entry.
            Trained networks stay below a tenth of it; random or unstable models and overflow exceed it.
    """

    rtol: float
    atol: float
    stable: float


FLOAT_TYPES = {
    "float64": FloatType(rtol=1e-7, atol=1e-7, stable=1e-10),
    "float32": FloatType(rtol=1.3e-6, atol=1e-5, stable=2e-4),
    "float16": FloatType(rtol=1e-3, atol=1e-5, stable=0.1),
    "bfloat16": FloatType(rtol=1.6e-2, atol=1e-5, stable=0.3),
}


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in FLOAT_TYPES


def machine_epsilon(dtype: str) -> float:
    """The distance from 1 to the next greater number; 0 for a dtype that is not floating-point."""
    return float(ml_dtypes.finfo(dtype).eps) if dtype in FLOAT_TYPES else 0.0


@dataclass(frozen=True)
class Criterion:
    """What decides: the error budget, or |file − PyTorch| ≤ atol + rtol·|PyTorch|.

    Attributes:
        rtol, atol: tolerances of ``allclose``; None takes those of torch.testing for the output's dtype.
    """

    kind: Literal["budget", "allclose"] = "budget"
    rtol: float | None = None
    atol: float | None = None

    @classmethod
    def of(cls, kind: str | None, rtol: float | None, atol: float | None) -> Criterion:
        """Returns the criterion that a user asks for. Tolerances imply ``allclose``; if one is given, the other is 0.

        Raises:
            NnormExportError: an unknown kind, or tolerances for the budget.
        """
        if kind not in (None, *CRITERIA):
            raise NnormExportError(f"unknown criterion {kind!r}; choose {' or '.join(CRITERIA)}")
        if rtol is None and atol is None:
            return cls("allclose") if kind == "allclose" else cls()
        if kind == "budget":
            raise NnormExportError(
                "rtol and atol go with the criterion allclose; leave them out for the budget, which is measured"
            )
        return cls("allclose", rtol or 0.0, atol or 0.0)

    def tolerances(self, dtype: str) -> tuple[float, float]:
        """(rtol, atol) for an output of ``dtype``."""
        if self.rtol is None or self.atol is None:
            return FLOAT_TYPES[dtype].rtol, FLOAT_TYPES[dtype].atol
        return self.rtol, self.atol


@dataclass(frozen=True)
class OutputParity:
    """One output of the file against PyTorch.

    Attributes:
        max_abs_diff: max |file − PyTorch|.
        max_rel_diff: max |file − PyTorch| / |PyTorch|, over finite elements that are not 0.
        budget_share: the file's error against float64, divided by the error that it may have; at most 1 passes. None
            if the model does not run in float64.
        top1_agreement: share of rows with the same greatest entry, for a two-dimensional floating-point output.
        rows: the number of rows that were compared.
        note: why it failed, if the reason is not the difference alone; or what the comparison does not show.
        compared: False if it failed because there was nothing to compare, for the reason in ``note``.
    """

    name: str
    passed: bool
    max_abs_diff: float
    max_rel_diff: float
    budget_share: float | None
    top1_agreement: float | None
    rows: int
    dtype: str
    note: str = ""
    compared: bool = True

    @property
    def verdict(self) -> str:
        return "equal" if self.passed else "DIFFERENT" if self.compared else "NOT COMPARED"

    def failed(self, note: str) -> OutputParity:
        return replace(self, passed=False, note=note)

    def not_compared(self, reason: str) -> OutputParity:
        """This output, failed because the comparison shows nothing."""
        return replace(self, passed=False, compared=False, note=reason, budget_share=None, top1_agreement=None)

    def noted(self, note: str) -> OutputParity:
        return replace(self, note="; ".join(filter(None, (self.note, note))))

    def __str__(self) -> str:
        share = "" if self.budget_share is None else f", {self.budget_share:.0%} of the error budget"
        top1 = "" if self.top1_agreement is None else f", top-1 agreement {self.top1_agreement:.2%}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.name} max abs {self.max_abs_diff:.2e}, max rel {self.max_rel_diff:.2e}{share}{top1}{note}"


@dataclass(frozen=True)
class ParityReport:
    """The outcome of a comparison; true when it passes.

    Attributes:
        runtime: the runtime that ran the file, ``onnxruntime`` for example.
        criterion: ``budget`` or ``allclose``, with its numbers.
        implementations: node -> ``kernel``, ``body`` or ``plugin``.
        other_weights: says that the file was made from other weights, if that is why it fails; else empty.
        known_faults: those of the runtime that would hit the file, and how they are avoided.
        by_bodies: the outputs again, with the bodies of the file in place of the kernels; None if kernels did not run,
            or the file has no bodies.
    """

    runtime: str
    criterion: str
    outputs: list[OutputParity]
    implementations: dict[str, str]
    other_weights: str = ""
    known_faults: list[str] = field(default_factory=list)
    by_bodies: list[OutputParity] | None = None

    def __bool__(self) -> bool:
        return all(output.passed for output in (*self.outputs, *(self.by_bodies or ())))

    def __str__(self) -> str:
        judged = (f"{output.verdict} in {self.runtime}: {output}" for output in self.outputs)
        by_bodies = (f"{output.verdict} in {self.runtime}, by bodies: {output}" for output in self.by_bodies or ())
        return "\n".join(filter(None, (*judged, *by_bodies, self.other_weights)))

    @property
    def reason(self) -> str:
        """Says what failed: the outputs that differ, or why nothing was compared."""
        failed = [output for output in self.outputs if not output.passed]
        if empty := [output for output in failed if not output.compared]:
            return f"nothing was compared: {empty[0].name}: {empty[0].note}"
        if failed:
            return f"{', '.join(output.name for output in failed)} differs"
        by_bodies = ", ".join(output.name for output in self.by_bodies or () if not output.passed)
        return f"the kernels do, the bodies of the file do not: by bodies {by_bodies} differs"

    def to_json(self) -> dict[str, Any]:
        return {"passed": bool(self), **asdict(self)}


def judge_outputs(
    file: str,
    reference: str,
    infos: Sequence[TensorInfo],
    actual: Sequence[Array],
    expected: Sequence[Array],
    truth: Sequence[Array] | None = None,
    criteria: Criterion | Sequence[Criterion] | None = None,
) -> list[OutputParity]:
    """:func:`judge` for every output of a file.

    Args:
        file, reference: what is compared with what, for the error's text.
        infos: the outputs of the file.
        actual, expected, truth: the results of the file, of the reference, and those in float64 if there are any.
        criteria: one criterion for all outputs, or one for each; None for the error budget.

    Raises:
        NnormExportError: the results differ in number or shape.
    """
    shapes, expected_shapes = ([list(array.shape) for array in arrays] for arrays in (actual, expected))
    if shapes != expected_shapes:
        raise NnormExportError(
            f"{file} returns {len(shapes)} outputs of shapes {shapes}, {reference} returns {len(expected_shapes)} of "
            f"shapes {expected_shapes}: the file was made from another model. Compare it with its own model, or export "
            "this model again"
        )
    truths: Sequence[Array | None] = truth or [None] * len(expected)
    each = criteria if isinstance(criteria, Sequence) else [criteria] * len(expected)
    rows = zip(infos, actual, expected, truths, each, strict=True)
    return [
        judge(info.name, result, wanted, true, criterion, reference) for info, result, wanted, true, criterion in rows
    ]


def judge(
    name: str,
    actual: Array,
    expected: Array,
    truth: Array | None,
    criterion: Criterion | None = None,
    reference: str = "PyTorch",
) -> OutputParity:
    """Compares ``actual`` of the file with PyTorch's ``expected`` in the same dtype and the ``truth`` in float64.

    An output without elements, without a finite one, or with NaN in ``expected`` fails: nothing was compared.
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
    if not is_float(actual.dtype):
        differing = float((actual != expected).sum())
        return OutputParity(name, differing == 0, differing, differing, None, None, rows, dtype)
    wide, expected_wide = actual.astype(np.float64), expected.astype(np.float64)
    difference = _distance(wide, expected_wide)
    nonzero = np.isfinite(expected_wide) & (expected_wide != 0)
    parity = OutputParity(
        name,
        passed=True,
        max_abs_diff=float(difference.max(initial=0.0)),
        max_rel_diff=float((difference[nonzero] / np.abs(expected_wide[nonzero])).max(initial=0.0)),
        budget_share=None if truth is None else _budget_share(wide, expected_wide, truth, dtype),
        top1_agreement=_top1_agreement(wide, expected_wide),
        rows=rows,
        dtype=dtype,
        note=_infinite_entries(expected_wide),
    )
    if criterion is not None and criterion.kind == "allclose":
        return replace(parity, passed=_all_close(difference, expected_wide, *criterion.tolerances(dtype)))
    if truth is None:
        dtype_rtol, dtype_atol = (BUDGET * tolerance for tolerance in Criterion().tolerances(dtype))
        return replace(parity, passed=_all_close(difference, expected_wide, dtype_rtol, dtype_atol))
    if unstable := _unstable(expected_wide, truth, dtype):
        return parity.failed(unstable)
    assert parity.budget_share is not None
    return replace(parity, passed=parity.budget_share <= 1.0)


def rows_differ(result: Array) -> bool | None:
    """Whether the rows of a result differ; None if there are not two."""
    if result.ndim == 0 or len(result) < 2:
        return None
    return bool((result != result[:1]).any())


def dependence(expected: Sequence[Array], changed: Sequence[Array] | None) -> list[bool | None]:
    """For each output, whether it depends on the input.

    Args:
        expected, changed: the results on two inputs. If there are no others, rows that differ show a dependence, and
            one row shows nothing: None.
    """
    if changed is None:
        return [rows_differ(array) for array in expected]
    return [a.shape != b.shape or bool((a != b).any()) for a, b in zip(expected, changed, strict=True)]


def constant_over_rows(expected: Sequence[Array]) -> bool:
    """Whether no row of a decisive output differs from the others: then these results alone show no dependence."""
    decides = decisive(expected)
    return not any(rows_differ(array) for array, is_decisive in zip(expected, decides, strict=True) if is_decisive)


def decisive(results: Sequence[Array]) -> list[bool]:
    """For each result, whether its dependence on the input counts: floating-point ones if there are any, else all."""
    return _deciding([is_float(result.dtype) for result in results])


def _deciding(floats: list[bool]) -> list[bool]:
    return floats if any(floats) else [True] * len(floats)


def require_dependence(outputs: Sequence[OutputParity], depends: Sequence[bool | None]) -> list[OutputParity]:
    """Returns ``outputs`` with a note on each that does not depend on the input.

    Of a model, some outputs may be constant: a shape, a grid of anchors, a temperature. If no floating-point output
    depends on the input (of a model without any, no output), the comparison shows nothing about its layers: they fail.

    Args:
        depends: for each output, whether it depends on the input; None if that is not known.
    """
    deciding = _deciding([output.dtype in FLOAT_TYPES for output in outputs])
    shows_nothing = all(depend is False for depend, decides in zip(depends, deciding, strict=True) if decides)
    found = []
    for output, depend, decides in zip(outputs, depends, deciding, strict=True):
        if depend is not False:
            found.append(output)
        elif shows_nothing and decides and output.passed:
            found.append(output.not_compared(_CONSTANT))
        else:
            found.append(output.noted("it does not depend on the input"))
    return found


def worst(parts: Sequence[OutputParity]) -> OutputParity:
    """Combines the comparisons of one output on several inputs."""
    shares = [part.budget_share for part in parts if part.budget_share is not None]
    agreements = [(part.top1_agreement, part.rows) for part in parts if part.top1_agreement is not None]
    return OutputParity(
        name=parts[0].name,
        passed=all(part.passed for part in parts),
        max_abs_diff=max(part.max_abs_diff for part in parts),
        max_rel_diff=max(part.max_rel_diff for part in parts),
        budget_share=max(shares) if len(shares) == len(parts) else None,
        top1_agreement=sum(a * n for a, n in agreements) / sum(n for _, n in agreements) if agreements else None,
        rows=sum(part.rows for part in parts),
        dtype=parts[0].dtype,
        note=next((part.note for part in sorted(parts, key=lambda part: part.passed) if part.note), ""),
        compared=all(part.compared for part in parts),
    )


def criterion_text(outputs: Sequence[OutputParity], criterion: Criterion, *, is_double: bool) -> str:
    """Describes what decided over ``outputs``."""
    if criterion.rtol is not None:
        return f"allclose, rtol {criterion.rtol:g}, atol {criterion.atol:g}"
    if criterion.kind == "allclose":
        return "allclose at torch.testing's tolerances"
    if all(output.budget_share is not None for output in outputs):
        return f"budget: at most {BUDGET:g} times PyTorch's own error against float64"
    reason = "the file is in float64" if is_double else "the model does not run in float64"
    return f"allclose at {BUDGET:g} times torch.testing's tolerances, because {reason}"


def share_text(share: float | None) -> str:
    """Formats a share of the error budget: ``12.3%``, ``4.0e+03 ×``, or ``-`` for None."""
    if share is None:
        return "-"
    return f"{share:.1%}" if share < 10 else f"{share:.1e} ×"


_CONSTANT = (
    "it does not depend on the input, and no other output does, so that the comparison shows nothing about the layers "
    "before it. Give other inputs, or train the model: a head whose weights are 0 returns its bias"
)


def _nothing_to_compare(expected: Array, reference: str) -> str:
    """Returns why a comparison with ``expected`` shows nothing; empty if it shows something."""
    if expected.size == 0:
        return "it has no elements; give inputs for which it has some"
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


def _infinite_entries(expected: Array) -> str:
    count = int(np.isinf(expected).sum())
    return f"{count} of {expected.size} elements are infinite, and must be so in both" if count else ""


def _budget_share(actual: Array, expected: Array, truth: Array, dtype: str) -> float:
    """The file's error / (BUDGET · PyTorch's error), the latter at least one rounding of the greatest entry."""
    error = float(_distance(actual, truth).max(initial=0.0))
    if error == 0.0:
        return 0.0
    rounding = machine_epsilon(dtype) * _greatest(truth)
    yardstick = max(float(_distance(expected, truth).max(initial=0.0)), rounding)
    return error / (BUDGET * yardstick) if 0.0 < yardstick < np.inf else float("inf")


def _unstable(expected: Array, truth: Array, dtype: str) -> str:
    """Returns why PyTorch's own result cannot be the yardstick; empty if it can."""
    lost = int((np.isfinite(truth) & ~np.isfinite(expected)).sum())
    if lost:
        return f"PyTorch itself overflows in {dtype}, in {lost} of {truth.size} entries; choose a dtype with more range"
    off, greatest = float(_distance(expected, truth).max(initial=0.0)), _greatest(truth)
    if off > FLOAT_TYPES[dtype].stable * greatest:
        return (
            f"PyTorch's own result in {dtype} is {off:.2e} off the float64 one, whose greatest entry is "
            f"{greatest:.2e}: the model is random or unstable on these inputs. Train it, or give real inputs"
        )
    return ""


def _greatest(values: Array) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _distance(a: Array, b: Array) -> Array:
    """|a − b|; 0 where both are NaN or the same infinity, infinite where one is NaN and the other is not."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    result: Array = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
    return result


def _all_close(difference: Array, expected: Array, rtol: float, atol: float) -> bool:
    with np.errstate(invalid="ignore"):  # 0 · infinity is NaN: the difference decides there
        allowed = np.nan_to_num(atol + rtol * np.abs(expected), nan=atol, posinf=atol)
    return bool((difference <= allowed).all())


def _top1_agreement(actual: Array, expected: Array) -> float | None:
    if actual.ndim != 2 or actual.shape[1] < 2 or actual.shape[0] == 0:
        return None
    return float((actual.argmax(1) == expected.argmax(1)).mean())

"""Metrics of a comparison, and whether it passes: by an error budget, or by tolerances that the user gives.

The truth is the user's own model run in float64. How far roundings move each element of PyTorch's result from it, in
the file's dtype, is the yardstick of what that dtype can do on this model and these inputs
(:mod:`nnorm_export.parity.yardstick`): a file passes if its error is at most :data:`BUDGET` times that, in every
element. If PyTorch's own error is a large part of the result, it measures nothing, and the comparison fails with that
reason. With explicit tolerances the criterion is |file − PyTorch| ≤ atol + rtol·|PyTorch|.

Equal results show something only if there is something to compare. Whatever the criterion, an output fails that has no
elements, no finite element, or NaN in PyTorch's own result. Infinite elements, of a mask for example, must be the same
in both, and the note counts them. Outputs that do not depend on the input are noted, and if no floating-point output
depends on it, all of them fail (:func:`require_dependence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from nnorm_export.errors import NnormExportError
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.parity.criteria import Criterion
from nnorm_export.parity.yardstick import (
    FLOAT_TYPES,
    Array,
    distance,
    is_float,
    unstable_result,
    yardstick_of,
)

BUDGET = 10.0
UNSTEADY = "PyTorch returns another result each time; look for F.dropout without training=self.training"


@dataclass(frozen=True)
class OutputParity:
    """One output of the file against PyTorch.

    Attributes:
        name: the output's name in the file.
        passed: whether it is equal by the criterion.
        max_abs_diff: max |file − PyTorch|.
        max_rel_diff: max |file − PyTorch| / |PyTorch|, over finite elements that are not 0.
        budget_share: an element's error, divided by the error that it may have, the greatest over all elements; at most
            1 passes. None for a float64 output, or if the model runs neither in float64 nor with random last bits.
        top1_agreement: share of rows with the same greatest entry, for a two-dimensional floating-point output.
        rows: the number of rows that were compared.
        dtype: the output's dtype in the file.
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
        share = "" if self.budget_share is None else f", {share_text(self.budget_share)} the error budget"
        top1 = "" if self.top1_agreement is None else f", top-1 agreement {self.top1_agreement:.2%}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.name} max abs {self.max_abs_diff:.2e}, max rel {self.max_rel_diff:.2e}{share}{top1}{note}"


@dataclass(frozen=True)
class ParityReport:
    """The outcome of a comparison; true when it passes.

    Attributes:
        runtime: the runtime that ran the file, ``onnxruntime`` for example.
        criterion: ``budget`` or ``allclose``, with its numbers.
        outputs: the comparison of each output of the file, in order, the worst over all inputs.
        implementations: node -> ``kernel``, ``body`` or ``plugin``.
        other_weights: says that the file was made from other weights, if that is why it fails; else empty.
        known_faults: see :attr:`.Runner.known_faults`.
        by_bodies: the outputs again, with the bodies of the file in place of the kernels; None if kernels did not run,
            or the file has no bodies.
        signature: of the certificate that was replayed: ``checked``, ``not checked``, or empty if it has none.
    """

    runtime: str
    criterion: str
    outputs: list[OutputParity]
    implementations: dict[str, str]
    other_weights: str = ""
    known_faults: list[str] = field(default_factory=list)
    by_bodies: list[OutputParity] | None = None
    signature: str = ""

    def __bool__(self) -> bool:
        return all(output.passed for output in (*self.outputs, *(self.by_bodies or ())))

    def __str__(self) -> str:
        judged = (f"{output.verdict} in {self.runtime}: {output}" for output in self.outputs)
        by_bodies = (f"{output.verdict} in {self.runtime}, by bodies: {output}" for output in self.by_bodies or ())
        signature = f"signature of the certificate: {self.signature}" if self.signature else ""
        return "\n".join(filter(None, (*judged, *by_bodies, self.other_weights, signature)))

    @property
    def is_unsteady(self) -> bool:
        """Whether it fails because the model is random: then no layer of the file is to blame."""
        return any(output.note == UNSTEADY for output in self.outputs)

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
    yardsticks: Sequence[Array | None] | None = None,
    criteria: Criterion | Sequence[Criterion] | None = None,
) -> list[OutputParity]:
    """:func:`judge` for every output of a file.

    Args:
        file, reference: what is compared with what, for the error's text.
        infos: the outputs of the file.
        actual, expected, truth, yardsticks: as for :func:`judge`, for each output.
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
    none: list[None] = [None] * len(expected)
    each = criteria if isinstance(criteria, Sequence) else [criteria] * len(expected)
    rows = zip(infos, actual, expected, truth or none, yardsticks or none, each, strict=True)
    return [
        judge(info.name, result, wanted, true, criterion, yardstick=yardstick, reference=reference)
        for info, result, wanted, true, yardstick, criterion in rows
    ]


def judge(
    name: str,
    actual: Array,
    expected: Array,
    truth: Array | None,
    criterion: Criterion | None = None,
    *,
    yardstick: Array | None = None,
    reference: str = "PyTorch",
) -> OutputParity:
    """Compares ``actual`` of the file with PyTorch's ``expected`` in the same dtype and the ``truth`` in float64.

    An output without elements, without a finite one, or with NaN in ``expected`` fails: nothing was compared.

    Args:
        truth: None if there is none; ``expected`` takes its place.
        yardstick: of each element, see :mod:`nnorm_export.parity.yardstick`; None takes that of ``expected`` alone.
        reference: what computed ``expected``, for the reasons.
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
    criterion = criterion or Criterion()
    wide, expected_wide = actual.astype(np.float64), expected.astype(np.float64)
    difference = distance(wide, expected_wide)
    nonzero = np.isfinite(expected_wide) & (expected_wide != 0)
    if yardstick is None and truth is not None:
        yardstick = yardstick_of([expected], truth, dtype)
    shares = None if yardstick is None else _budget_shares(wide, expected_wide if truth is None else truth, yardstick)
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
    )
    if criterion.kind == "allclose" or shares is None:
        factor = 1.0 if criterion.kind == "allclose" else BUDGET
        rtol, atol = (factor * tolerance for tolerance in criterion.tolerances(dtype))
        return replace(parity, passed=criterion.of_elements(_shares(difference, expected_wide, rtol, atol)) <= 1.0)
    if truth is not None and (unstable := unstable_result(expected_wide, truth, dtype)):
        return parity.failed(unstable)
    return replace(parity, passed=criterion.of_elements(shares) <= 1.0)


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
        if depend is None and decides:
            found.append(output.noted(_UNDECIDED))
        elif depend is not False:
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


def criterion_text(
    outputs: Sequence[OutputParity], criteria: Sequence[Criterion], *, is_double: bool, has_truth: bool
) -> str:
    """Describes what decided over ``outputs``, whose criteria are ``criteria``."""
    reason = "the file is in float64" if is_double else "the model does not run in float64"
    has_budget = has_truth or any(output.budget_share is not None for output in outputs)

    def text(criterion: Criterion) -> str:
        if criterion.kind == "allclose":
            return str(criterion)
        if not has_budget:
            return f"allclose at {BUDGET:g} times torch.testing's tolerances{criterion.of_what}, because {reason}"
        budget = f"budget: at most {BUDGET:g} times the error that roundings cause in PyTorch, in each element"
        against = "against float64" if has_truth else f"against PyTorch in the same dtype, because {reason}"
        return f"{budget}{criterion.of_what}, {against}"

    if len(set(criteria)) == 1:
        return text(criteria[0])
    pairs = zip(outputs, criteria, strict=True)
    return "; ".join(f"{output.name}: {text(criterion)}" for output, criterion in pairs)


def share_text(share: float | None) -> str:
    """Formats an error as a multiple of the error budget: ``0.123 ×``, ``4.02e+03 ×``, or ``-`` for None.

    It has more digits where three would hide that the error is above the budget.
    """
    if share is None:
        return "-"
    texts = (f"{share:.{digits}g}" for digits in range(3, 18))
    return f"{next(text for text in texts if (float(text) > 1) == (share > 1))} ×"


_CONSTANT = (
    "it does not depend on the input, and no other output does, so that the comparison shows nothing about the layers "
    "before it. Give other inputs, or train the model: a head whose weights are 0 returns its bias"
)

_UNDECIDED = "of one row, without other inputs that the model takes: it may be constant; give more rows"


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


def _infinite_entries(expected: Array) -> str:
    count = int(np.isinf(expected).sum())
    return f"{count} of {expected.size} elements are infinite, and must be so in both" if count else ""


def _budget_shares(actual: Array, truth: Array, yardstick: Array) -> Array:
    """Of each element, the file's error / (BUDGET · yardstick)."""
    shares: Array = distance(actual, truth) / (BUDGET * yardstick)
    return shares


def _shares(difference: Array, expected: Array, rtol: float, atol: float) -> Array:
    """Of each element, |file − PyTorch| / (atol + rtol·|PyTorch|); at most 1 where that is allowed."""
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 · infinity and 0 / 0 are NaN: the difference decides there
        allowed = np.nan_to_num(atol + rtol * np.abs(expected), nan=atol, posinf=atol)
        shares = difference / allowed
    result: Array = np.where(difference <= allowed, np.fmin(shares, 1.0), np.fmax(shares, np.nextafter(1.0, 2.0)))
    return np.where(difference == 0, 0.0, result)


def _top1_agreement(actual: Array, expected: Array) -> float | None:
    if actual.ndim != 2 or actual.shape[1] < 2 or actual.shape[0] == 0:
        return None
    return float((actual.argmax(1) == expected.argmax(1)).mean())

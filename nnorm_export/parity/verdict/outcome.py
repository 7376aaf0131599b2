"""The outcome of a comparison: a verdict for each output, with what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from nnorm_export.errors import NnormExportError
from nnorm_export.files.ignored_inputs import about_ignored_inputs
from nnorm_export.float16_range import about_float16
from nnorm_export.metrics.gate import MetricReport
from nnorm_export.reports import ComparisonReport

NONDETERMINISTIC = "PyTorch returns another result each time; look for F.dropout without training=self.training"


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
        rows: the number of rows that were compared; with a mask of [N, S], the number of positions.
        dtype: the output's dtype in the file.
        note: why it failed, if the reason is not the difference alone; or what the comparison does not show.
        compared: False if it failed because there was nothing to compare, for the reason in ``note``.
        greatest: max |PyTorch|, over finite elements.
        allowed_share: what decides: an element's error, divided by the error that the criterion allows, by the
            criterion's statistic over all elements; at most 1 passes. None if it failed for the reason in ``note``.
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
    greatest: float = 0.0
    allowed_share: float | None = None

    @property
    def verdict(self) -> str:
        return "equal" if self.passed else "DIFFERENT" if self.compared else "NOT COMPARED"

    def failed(self, note: str) -> OutputParity:
        return replace(self, passed=False, note=note)

    def not_compared(self, reason: str) -> OutputParity:
        """This output, failed because the comparison shows nothing."""
        return replace(
            self, passed=False, compared=False, note=reason, budget_share=None, allowed_share=None, top1_agreement=None
        )

    def noted(self, note: str) -> OutputParity:
        return replace(self, note="; ".join(filter(None, (self.note, note))))

    def __str__(self) -> str:
        share = "" if self.allowed_share is None else f"{share_text(self.allowed_share)} the allowed error, "
        top1 = "" if self.top1_agreement is None else f", top-1 agreement {self.top1_agreement:.2%}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.name} {share}max abs {self.max_abs_diff:.2e}{top1}{note}"


@dataclass(frozen=True)
class ParityReport(ComparisonReport):
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
        given_only: says that the given inputs were not scaled and permuted, and why; empty if they were.
        least_batch: the least batch that the file takes, and why; empty if it is 1.
        ignored_inputs: those on whose values no output of the file depends (:mod:`nnorm_export.files.ignored_inputs`).
        suspects: what may be to blame if an output differs (:mod:`nnorm_export.parity.suspects`).
        beyond_float16: of a float16 file, the inputs that are infinite in float16; if it fails, the weights and the
            numbers in forward too.
        metric: the metric of the user; None without one.
        by_metric_alone: whether the metric alone decides, and the outputs are only reported.
    """

    runtime: str
    criterion: str
    outputs: list[OutputParity]
    implementations: dict[str, str]
    other_weights: str = ""
    known_faults: list[str] = field(default_factory=list)
    by_bodies: list[OutputParity] | None = None
    signature: str = ""
    given_only: str = ""
    least_batch: str = ""
    ignored_inputs: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    beyond_float16: list[str] = field(default_factory=list)
    metric: MetricReport | None = None
    by_metric_alone: bool = False

    def __bool__(self) -> bool:
        return self.outputs_pass and (self.metric is None or self.metric.passed)

    @property
    def outputs_pass(self) -> bool:
        """Whether the outputs are equal by the criterion, or do not decide."""
        return self.by_metric_alone or all(output.passed for output in (*self.outputs, *(self.by_bodies or ())))

    def __str__(self) -> str:
        compared = (f"{output.verdict} in {self.runtime}: {output}" for output in self.outputs)
        by_bodies = (f"{output.verdict} in {self.runtime}, by bodies: {output}" for output in self.by_bodies or ())
        signature = f"signature of the certificate: {self.signature}" if self.signature else ""
        batch = f"batch: {self.least_batch}" if self.least_batch else ""
        blamed = (f"suspect: {suspect}" for suspect in self.suspects)
        lost = about_float16(self.beyond_float16, fails=not self)
        notes = (*blamed, lost, self.given_only, batch, self.ignored, self.other_weights, signature)
        metric = "" if self.metric is None else str(self.metric)
        return "\n".join(filter(None, (*compared, *by_bodies, metric, *notes)))

    @property
    def ignored(self) -> str:
        """Says which inputs the file ignores; empty if it fails, because the suspects say so then."""
        return about_ignored_inputs(self.ignored_inputs if self else [])

    @property
    def differs(self) -> bool:
        """Whether an output was compared, and differs, and that decides."""
        return not self.by_metric_alone and any(output.compared and not output.passed for output in self.outputs)

    @property
    def is_nondeterministic(self) -> bool:
        """Whether it fails because the model is random: then no layer of the file is to blame."""
        return any(output.note == NONDETERMINISTIC for output in self.outputs)

    @property
    def reason(self) -> str:
        """Says what failed: the outputs that differ, why nothing was compared, or the metric."""
        of_metric = self.metric.reason if self.metric is not None else ""
        return "; ".join(filter(None, ("" if self.outputs_pass else self._reason_of_outputs, of_metric)))

    @property
    def _reason_of_outputs(self) -> str:
        failed = [output for output in self.outputs if not output.passed]
        if empty := [output for output in failed if not output.compared]:
            return f"nothing was compared: {empty[0].name}: {empty[0].note}"
        if failed:
            return f"{', '.join(output.name for output in failed)} differs"
        by_bodies = ", ".join(output.name for output in self.by_bodies or () if not output.passed)
        return f"the kernels do, the bodies of the file do not: by bodies {by_bodies} differs"


def are_finite(outputs: Sequence[OutputParity]) -> bool:
    """Whether something was compared in each output, and no difference is infinite."""
    return all(output.compared and math.isfinite(output.max_abs_diff) for output in outputs)


ON_CHANGED_INPUTS = "on changed inputs: the given ones, scaled down, in another order, or with other masks or integers"


UNSTABLE = "PyTorch is unstable on others"


def given_only(reason: str, *, others: bool) -> str:
    """Says that the given inputs were not scaled and permuted, for ``reason``; empty for none.

    Args:
        others: whether other masks or integers were compared.
    """
    if not reason:
        return ""
    also = ", and with other masks or integers," if others else ""
    return (
        f"compared on the given inputs{also} only, because {reason}: a number that the file keeps of them does not "
        "show. Verify the file on more data (nnorm_export.verify, nnorm-export verify --input)"
    )


def on_changed_inputs(parts: Sequence[OutputParity]) -> list[OutputParity]:
    """Comparisons on changed inputs. They must pass too; their rows do not count, because the user gave others."""
    changed = (replace(part, rows=0, top1_agreement=None) for part in parts)
    return [part if part.passed else part.noted(ON_CHANGED_INPUTS) for part in changed]


@contextmanager
def errors_on_changed_inputs() -> Iterator[None]:
    """Inside the block, errors say that they are about changed inputs."""
    try:
        yield
    except NnormExportError as error:
        raise type(error)(f"{ON_CHANGED_INPUTS}: {error}") from error


def worst(parts: Sequence[OutputParity]) -> OutputParity:
    """Combines the comparisons of one output on several inputs.

    A model may return no rows for changed inputs: if such a comparison had nothing to compare, the others decide. The
    note is that of a failure on the given inputs, or else the first of a failure.
    """
    parts = [part for part in parts if part.compared or part.rows > 0] or parts
    noted = [part for part in parts if not part.passed and part.rows > 0] or parts
    shares = [part.budget_share for part in parts if part.budget_share is not None]
    allowed = [part.allowed_share for part in parts if part.allowed_share is not None]
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
        note=next((part.note for part in sorted(noted, key=lambda part: part.passed) if part.note), ""),
        compared=all(part.compared for part in parts),
        greatest=max(part.greatest for part in parts),
        allowed_share=max(allowed) if len(allowed) == len(parts) else None,
    )


def share_text(share: float | None) -> str:
    """Formats an error as a multiple of the allowed error: ``0.123 ×``, ``4.02e+03 ×``, or ``-`` for None.

    It has more digits where three would hide that the error is above the allowed one.
    """
    if share is None:
        return "-"
    texts = (f"{share:.{digits}g}" for digits in range(3, 18))
    return f"{next(text for text in texts if (float(text) > 1) == (share > 1))} ×"

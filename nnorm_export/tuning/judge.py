"""Whether a file that is to be measured is right: compared with PyTorch or with the given file, and by the metric."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nnorm_export.dtypes import Array
from nnorm_export.errors import NnormExportError, first_line
from nnorm_export.metrics.gate import Gate, MetricReport
from nnorm_export.parity.compare_files import compare
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.quantizing.calibration_data import batches_of
from nnorm_export.quantizing.judging import concatenated
from nnorm_export.runtimes import DEFAULT_RUNTIME, Runner, load
from nnorm_export.tuning.candidates import Way
from nnorm_export.tuning.variants import Variant, Work

_REFERENCE = "the given file"
_BATCH = 32  # rows of a call that the metric is computed from


@dataclass(frozen=True)
class Verdict:
    """Whether a file in a runtime is right.

    Attributes:
        reason: why it is not; empty if it is.
        share: the greatest error, divided by the allowed one; None if only the metric decides.
        metric: what the metric says; None without a metric.
        implementations: what runs its normalizations, in words.
    """

    reason: str = ""
    share: float | None = None
    metric: MetricReport | None = None
    implementations: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass
class Judge:
    """Compares files with PyTorch, if there is a model, or else with the given file, and by the metric ``gate``."""

    work: Work
    gate: Gate | None

    @cached_property
    def _given(self) -> Runner:
        return load(self.work.source)

    @cached_property
    def _expected(self) -> list[Array]:
        return self._outputs(self._given)

    @cached_property
    def _metric_of_given(self) -> MetricReport | None:
        return self._metric(self._given)

    def judge(self, path: Path, variant: Variant, way: Way) -> Verdict:
        """The verdict on the file ``path``; an error of this package is a reason too."""
        try:
            runner = load(path, way.runtime, **way.options)
            ran = ", ".join(f"{count} {how}" for how, count in runner.counts.items())
            share = None
            is_original = path == self.work.source and way == Way(DEFAULT_RUNTIME)
            if not variant.changes_results and not is_original:
                report = self._compared(path, variant, runner, way)
                if not report:
                    return Verdict(f"its results are wrong: {report.reason}", share_of(report))
                share = share_of(report)
            metric = self._metric_of_given if is_original else self._metric(runner)
        except NnormExportError as error:
            return Verdict(self.work.without_folder(first_line(error)))
        reason = "" if metric is None or metric else f"the metric refuses it: {metric.reason}"
        return Verdict(reason, share, metric, ran)

    def check_source(self) -> None:
        """Compares the given file with the model, if there is one, and computes its metric, if there is one.

        Raises:
            NnormExportError: it does not compute what the model computes, or the metric refuses it.
            InputError: the labels do not fit.
        """
        if (metric := self._metric_of_given) is not None and not metric:
            raise NnormExportError(f"{self.work.source} itself fails the metric: {metric.reason}")
        original = self.work.original
        if original is not None and not (report := original.verify(self.work.source, None)):
            raise NnormExportError(
                f"{self.work.source} does not compute what the model computes, so that nothing is tuned: "
                f"{report.reason}. nnorm-export verify says more"
            )

    def _compared(self, path: Path, variant: Variant, runner: Runner, way: Way) -> ParityReport:
        """The comparison with the given file, or with PyTorch, whose budget decides where there is a model.

        PyTorch runs a dozen times for its budget. What is within roundings of the given file, which PyTorch has been
        compared with, needs no budget of its own.
        """
        original = None if way.options else self.work.original
        if original is not None and variant.in_half:
            return original.verify(path, way.runtime)
        name = f"the file {path.name} in {way}"
        report = compare(runner, self._given, self.work.rows, name=name, other_roundings=True)
        return report if report or original is None else original.verify(path, way.runtime)

    def _metric(self, runner: Runner) -> MetricReport | None:
        if self.gate is None:
            return None
        if self.gate.takes_loader:
            return self.gate.judge_calls(runner, self._given, reference_name=_REFERENCE)
        return self.gate.judge(self._outputs(runner), self._expected, reference_name=_REFERENCE)

    def _outputs(self, runner: Runner) -> list[Array]:
        batches = [runner(**feed) for feed in batches_of(self.work.data, runner.inputs, _BATCH, "inputs")]
        return concatenated(batches, "given")


def share_of(report: ParityReport) -> float | None:
    """The greatest error of all outputs, divided by the allowed one."""
    shares = [output.allowed_share for output in (*report.outputs, *(report.by_bodies or ()))]
    known = [share for share in shares if share is not None]
    return max(known, default=None)

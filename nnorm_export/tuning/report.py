"""What tune() found: a row for each configuration, and the fastest one that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nnorm_export.errors import NnormExportError
from nnorm_export.metrics.gate import MetricReport
from nnorm_export.parity.verdict.outcome import share_text
from nnorm_export.reports import Report
from nnorm_export.tuning.candidates import Candidate, options_text
from nnorm_export.tuning.service_plan import ServicePlan

OBJECTIVES = ("latency", "throughput")


@dataclass(frozen=True, kw_only=True)
class Row(Report):
    """A configuration, or a file that was not measured.

    Attributes:
        candidate: the configuration; None for a file that was not measured.
        runtime: of ``candidate``, or in which the file is out; empty if no file was made.
        name: of the file: ``given``, ``optimized``, ``int8`` and others, see :data:`.variants.VARIANTS`.
        out: why it was not measured, or cannot win: it is wrong, loses too much, or could not be made.
        dropped: why it was measured no longer; empty for finalists.
        milliseconds, p99: the median and the 99th percentile of a call.
        runs: the number of measured calls.
        ratio: its time for a row, divided by that of the given file as ``load`` opens it, in turns.
        per_second: rows in a second, in calls one after the other.
        size: of the file in bytes, with external data.
        start: the seconds of a new process until its first answer; None if it was not measured.
        memory: the greatest memory of that process in bytes.
        error_share: its greatest error, divided by the allowed one; None for the given file, or if the metric alone
            decides.
        metric: what the metric says of the file.
        implementations: what runs the normalizations: ``20 kernel``.
    """

    name: str
    candidate: Candidate | None = None
    runtime: str = ""
    out: str = ""
    dropped: str = ""
    milliseconds: float | None = None
    p99: float | None = None
    runs: int = 0
    ratio: float | None = None
    per_second: float | None = None
    size: int = 0
    start: float | None = None
    memory: int | None = None
    error_share: float | None = None
    metric: MetricReport | None = None
    implementations: str = ""

    @property
    def measured_as(self) -> Candidate:
        """The configuration of a row that was measured."""
        if self.candidate is None:
            raise NnormExportError(f"{self.name} was not measured: {self.out}")
        return self.candidate

    @property
    def settings(self) -> str:
        return "" if self.candidate is None else options_text(self.candidate.options)

    @property
    def state(self) -> str:
        """What became of it, in words."""
        return self.out or self.dropped

    @property
    def accuracy(self) -> str:
        """The metric, or the share of the allowed error, in words."""
        if self.metric is not None:
            return f"{self.metric.value:.4g} ({self.metric.difference:+.2g})"
        return "" if self.error_share is None else share_text(self.error_share)

    def __str__(self) -> str:
        in_runtime = f" in {self.runtime}" if self.runtime else ""
        what = f"{self.name}{in_runtime}" if self.candidate is None else str(self.candidate)
        if self.milliseconds is None:
            return f"{what}: {self.state}"
        speed = "" if self.ratio is None else f", {self.ratio:.2f} × the time of the given file"
        return f"{what}: {self.milliseconds:.3g} ms{speed}{f'; {self.state}' if self.state else ''}"


@dataclass(frozen=True, kw_only=True)
class TuneReport(Report):
    """The fastest right configuration on this machine, and all others that were tried.

    Attributes:
        path: the settings, for :func:`nnorm_export.load`.
        file: the file beside them.
        objective: ``latency``, the time of a call, or ``throughput``, rows in a second.
        winner: the row of ``file``.
        base: the row that ratios are of: the given file as ``load`` opens it.
        rows: all rows, the fastest first, and then those that are out.
        compared_with: what decides whether a file is right.
        processor, cores: of this machine.
        seconds: how long it took.
        service: the cheapest configuration for a target; None if none was asked for.
        notices: what else the user should know.
        repeated: with ``replay``, what is different now; None without.
    """

    path: Path
    file: Path
    objective: str
    winner: Row
    base: Row
    rows: Sequence[Row]
    compared_with: str
    processor: str
    cores: int
    seconds: float
    service: ServicePlan | None = None
    notices: Sequence[str] = field(default_factory=list)
    repeated: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.winner} ({self.processor}, {self.cores} cores)"

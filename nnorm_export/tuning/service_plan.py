"""What a plan of a service says: the target, the configurations, what was measured of each, and the chosen one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from nnorm_export.errors import NnormExportError
from nnorm_export.reports import Report

_UNITS = {"": 1.0, "ms": 1.0, "s": 1000.0, "us": 0.001, "µs": 0.001}
_ABOUT = 0.95  # of the greatest capacity: times of equal batches differ by a few percent


@dataclass(frozen=True)
class ServiceTarget(Report):
    """``qps`` requests per second, of which 99 % are answered within ``p99_ms`` milliseconds.

    >>> ServiceTarget.parse("200", "20ms")
    ServiceTarget(qps=200.0, p99_ms=20.0)

    Raises:
        NnormExportError: a number is not finite, or not greater than 0.
    """

    qps: float
    p99_ms: float

    def __post_init__(self) -> None:
        for name, value, remedy in (
            ("qps", self.qps, "the requests of a second, as 200"),
            ("p99", self.p99_ms, "a time, as 20ms or 0.02s"),
        ):
            if not (math.isfinite(value) and value > 0):
                raise NnormExportError(f"{name} is {value:g}; give {remedy}, greater than 0")

    @classmethod
    def parse(cls, qps: str, p99: str) -> ServiceTarget:
        """The target of two texts: a number, and a time in ``ms`` (also without a unit), ``s`` or ``us``.

        Raises:
            NnormExportError: a text is not of this form.
        """
        try:
            rate = float(qps)
        except ValueError:
            raise NnormExportError(f"qps is {qps!r}; give the requests of a second, as 200") from None
        found = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-zµ]*)\s*", p99, re.IGNORECASE)
        if found is None or found[2].lower() not in _UNITS:
            raise NnormExportError(f"p99 is {p99!r}; give a time, as 20ms or 0.02s")
        return cls(rate, float(found[1]) * _UNITS[found[2].lower()])

    def __str__(self) -> str:
        return f"{self.qps:g} requests per second with a p99 of {self.p99_ms:g} ms"


@dataclass(frozen=True)
class ServiceConfig(Report):
    """How a server runs a model.

    Attributes:
        instances: of the model, each with a session of its own.
        threads: of each session.
        max_batch: the most requests that are combined; 1 combines none.
        max_delay_us: microseconds that a free instance waits for more requests.
    """

    instances: int
    threads: int
    max_batch: int
    max_delay_us: int

    @property
    def cores(self) -> int:
        """``instances * threads``."""
        return self.instances * self.threads

    def __str__(self) -> str:
        batch = (
            f"batches of up to {self.max_batch}, delay {self.max_delay_us} µs" if self.max_batch > 1 else "no batches"
        )
        return f"{_counted(self.instances, 'instance')} of {_counted(self.threads, 'thread')}, {batch}"


@dataclass(frozen=True)
class ServiceTrial(Report):
    """A configuration, and what was measured of it.

    Attributes:
        requests: the answered requests of all runs; 0 if the configuration was refused without a run.
        seconds: of all runs.
        p50_ms, p99_ms: latencies, counted from the time at which a request was to arrive, of the run with the greater
            p99; None without a run.
        achieved_qps: requests answered per second in that run.
        capacity_qps: the most requests per second that the instances can answer, from the time of a batch alone.
        stopped: whether the run was stopped early, because more than a tenth of its requests were late.
        met: whether all runs have met the target.
        reason: why not; empty if ``met``.
    """

    config: ServiceConfig
    requests: int
    seconds: float
    p50_ms: float | None
    p99_ms: float | None
    achieved_qps: float | None
    capacity_qps: float
    stopped: bool
    met: bool
    reason: str

    def __str__(self) -> str:
        measured = "" if self.p99_ms is None else f": p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms"
        return f"{self.config}{measured}{'' if self.met else f': {self.reason}'}"


@dataclass(frozen=True)
class ServicePlan(Report):
    """The cheapest configuration that meets a target.

    Attributes:
        chosen: None if no configuration has met the target.
        trials: in the order of their cost, up to the chosen one.
        processor: of this machine, for which the plan holds.
        cores: the most that a configuration could have.
        not_combined: why requests are not combined; empty if they are.
        untried: the number of configurations that the time limit left out.
        possible_qps: a rate that the nearest configuration answers within the time, if the target's rate is not met;
            None if no such rate was found, or none was looked for.
        notes: what a reader should know besides the numbers.
    """

    target: ServiceTarget
    chosen: ServiceTrial | None
    trials: list[ServiceTrial]
    processor: str
    cores: int
    not_combined: str = ""
    untried: int = 0
    possible_qps: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def nearest(self) -> ServiceTrial | None:
        """The trial with the least p99; without any run, the cheapest of about the greatest capacity."""
        run = [trial for trial in self.trials if trial.p99_ms is not None]
        if run:
            return min(run, key=lambda trial: (trial.stopped, trial.p99_ms))  # a stopped run knows no p99 of all
        greatest = max((trial.capacity_qps for trial in self.trials), default=0.0)
        return next((trial for trial in self.trials if trial.capacity_qps >= _ABOUT * greatest), None)

    @property
    def failure(self) -> str:
        """That none was found; empty if one was."""
        if self.chosen is not None:
            return ""
        if self.untried:
            return f"no configuration was found in the time for {self.target}: {self.untried} were not tried"
        return f"no configuration answers {self.target}"

    def __str__(self) -> str:
        where = f"{self.processor}, up to {_counted(self.cores, 'core')}"
        if self.chosen is not None:
            lines = [f"{self.target} ({where}): {self.chosen}"]
            if cheaper := len(self.trials) - 1:
                lines += [f"{_counted(cheaper, 'cheaper configuration')} did not meet it"]
        else:
            lines = [f"{self.failure} ({where})"]
            lines += [f"the nearest: {self.nearest}"] if self.nearest else []
        if self.possible_qps is not None:
            lines += [f"it answers {self.possible_qps:g} requests per second within {self.target.p99_ms:g} ms"]
        return "\n".join([*lines, *self.notes])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

"""What tune() tries, in which order, and until when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nnorm_export import library
from nnorm_export.errors import InputError
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned, is_tuned
from nnorm_export.metrics.gate import Gate
from nnorm_export.names import listed
from nnorm_export.runtimes import DEFAULT_RUNTIME
from nnorm_export.runtimes.processor import cores_here
from nnorm_export.tuning.candidates import Candidate, Way, candidates_of, threads_for
from nnorm_export.tuning.judge import Judge
from nnorm_export.tuning.report import OBJECTIVES
from nnorm_export.tuning.rows import whole_rows
from nnorm_export.tuning.service_plan import ServiceTarget
from nnorm_export.tuning.variants import NAMES, VARIANTS, Variant, Work, installed_runtimes

_THROUGHPUT_BATCHES = (1, 2, 4, 8, 16, 32)
_BUSY = 0.5  # of the cores, at the beginning

Progress = Callable[[str, float], None]


def check_options(
    objective: str,
    batches: Sequence[int] | None,
    threads: Sequence[int] | None,
    only: Sequence[str] | None,
    minutes: float,
) -> None:
    """Raises InputError for an option that is wrong whatever the model is."""
    if objective not in OBJECTIVES:
        raise InputError(f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    for name, numbers in (("batches", batches), ("threads", threads)):
        if numbers is not None and (not numbers or any(not _is_whole(number) for number in numbers)):
            raise InputError(f"{name} is {numbers!r}; give whole numbers of at least 1")
    if objective == "latency" and batches is not None and len(batches) > 1:
        raise InputError(f"batches is {list(batches)}: the latency is that of calls of one size; give one number")
    if unknown := [name for name in listed(only or (), "only", InputError) if name not in NAMES]:
        raise InputError(f"unknown file {unknown[0]!r}; choose among {', '.join(NAMES)}")
    if not isinstance(minutes, (int, float)) or not minutes > 0:
        raise InputError(f"minutes is {minutes!r}; give a number above 0")


def refuse_beside_replay(options: Mapping[str, object]) -> None:
    """Raises InputError for the first of ``options`` that is given beside ``replay``."""
    for name, value in options.items():
        if value is not None:
            raise InputError(
                f"{name} does not go with replay, which takes what to measure from the settings; leave it out"
            )


def refuse_settings(source: Path) -> None:
    """Raises InputError if settings are given in the place of a model."""
    if is_tuned(source):
        raise InputError(f"{source} are settings; tune the model that they were made of, or measure again with replay")


def target_of(qps: float | None, p99: float | str | None) -> ServiceTarget | None:
    """The target of a service; None without one.

    Raises:
        InputError: one of the two is missing.
        NnormExportError: one is not a number, or not a time.
    """
    if qps is None and p99 is None:
        return None
    if qps is None or p99 is None:
        raise InputError("a target has both: qps, the requests in a second, and p99, the time for 99 % of them")
    return ServiceTarget.parse(str(qps), str(p99))


def _is_whole(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool) and int(number) >= 1


@dataclass
class Clock:
    """The time that has passed of the limit, and the progress that is shown.

    Attributes:
        serves: whether a service is to be planned too, which needs a part of the time.
    """

    minutes: float
    progress: Progress
    serves: bool = False
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def show(self, text: str) -> None:
        self.progress(text, min(1.0, self.seconds / (60 * self.minutes)))

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - self.seconds

    def has_time_to_make(self, seconds: float) -> bool:
        """Whether a file may be made, which takes ``seconds``: the measurements need the rest of the time."""
        return self.seconds + seconds <= (0.45 if self.serves else 0.75) * 60 * self.minutes

    @property
    def end_of_race(self) -> float:
        """It has a fifth of the time, even if a file took longer than expected."""
        whole = 60 * self.minutes
        share = 0.6 if self.serves else 0.9
        return max(self.start + share * whole, time.perf_counter() + 0.2 * whole)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is tried.

    Attributes:
        listed: the configurations of earlier settings, and those alone; None for all.
    """

    work: Work
    judge: Judge
    variants: Sequence[Variant]
    installed: Sequence[str]
    threads: Sequence[int]
    batches: Sequence[int]
    objective: str
    notices: Sequence[str]
    target: ServiceTarget | None
    earlier: Tuned | None
    listed: Sequence[Candidate] | None

    @classmethod
    def of(
        cls,
        work: Work,
        gate: Gate | None,
        earlier: Tuned | None,
        objective: str,
        batches: Sequence[int] | None,
        threads: Sequence[int] | None,
        only: Sequence[str] | None,
        target: ServiceTarget | None,
    ) -> Plan:
        installed, missing = installed_runtimes()
        _refuse_untried(only, work, installed, gate)
        listed_before = None
        if earlier is not None:
            listed_before = _candidates_in(earlier, work.source, gate)
            only = list(dict.fromkeys(candidate.variant for candidate in listed_before))
            batches = list(dict.fromkeys(candidate.batch for candidate in listed_before))
            objective = earlier.objective
        return cls(
            work=work,
            judge=Judge(work, gate),
            variants=[each for each in VARIANTS if _is_tried(each, work, installed, only, target)],
            installed=installed if target is None else [DEFAULT_RUNTIME],
            threads=threads or threads_for(cores_here()),
            batches=_batches(work, objective, batches),
            objective=objective,
            notices=[
                *(
                    []
                    if target is None
                    else ["with a target, files for ONNX Runtime alone are tried, which servers have"]
                ),
                *_notices(work, gate, missing),
            ],
            target=target,
            earlier=earlier,
            listed=listed_before,
        )

    @property
    def base(self) -> Candidate:
        """The given file as ``load`` opens it."""
        return Candidate("given", DEFAULT_RUNTIME, {}, self.batches[0])

    def candidates(self, variant: str, way: Way) -> list[Candidate]:
        """The configurations of a file in a runtime: those of earlier settings, if they are measured again."""
        if self.listed is None:
            return list(candidates_of(variant, way, self.threads, self.batches))
        kernels = way.options.get("kernels")
        return [
            each
            for each in self.listed
            if (each.variant, each.runtime, each.options.get("kernels")) == (variant, way.runtime, kernels)
            and each != self.base
        ]

    @property
    def compared_with(self) -> str:
        """What decides whether a file is right."""
        other = "the given file" if self.work.original is None else "PyTorch"
        gate = self.judge.gate
        return f"the error budget against {other}{'' if gate is None else f', and the metric {gate.name}'}"


def _refuse_untried(only: Sequence[str] | None, work: Work, installed: Sequence[str], gate: Gate | None) -> None:
    """Raises InputError for a file that the user names and that cannot be tried."""
    for variant in VARIANTS:
        if variant.name in (only or ()):
            if variant.changes_results and gate is None:
                raise InputError(f"{variant.name}: only a metric can accept its results; give one (metric=, --metric)")
            if variant.of_model and work.original is None:
                raise InputError(f"{variant.name} is made of the PyTorch model; give it (model=, --model)")
            if variant.needs and variant.needs not in installed:
                raise InputError(f"{variant.name} needs the runtime {variant.needs}: nnorm-export doctor says how")


def _is_tried(
    variant: Variant, work: Work, installed: Sequence[str], only: Sequence[str] | None, target: ServiceTarget | None
) -> bool:
    if target is not None and not variant.is_for(DEFAULT_RUNTIME):
        return False
    if (variant.needs and variant.needs not in installed) or (variant.of_model and work.original is None):
        return False
    return only is None or variant.name == "given" or variant.name in only


def _batches(work: Work, objective: str, given: Sequence[int] | None) -> list[int]:
    if not work.batched:
        rows = whole_rows(work.data)
        if given is not None and list(given) != [rows]:
            raise InputError(
                f"batches is {list(given)}, and calls have the {rows} rows of the inputs: the first axes of the file's "
                "inputs are not one dynamic batch"
            )
        return [rows]
    return list(given or (_THROUGHPUT_BATCHES if objective == "throughput" else (1,)))


def _notices(work: Work, gate: Gate | None, missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield f"not installed here: {', '.join(missing)} (nnorm-export doctor says what they need)"
    if gate is not None and gate.labels is not None:
        yield "int8 files are calibrated on the rows that the metric judges; verify the winner on others"
    if gate is None:
        yield "int8 was not tried: its results are others, and only a metric can accept it (metric=, --metric)"
    if work.original is None:
        yield "float16, bfloat16, TorchScript and AOTInductor were not tried: they are made of the model (--model)"
    if library.find_library() is None:
        yield "the kernels are not installed, so that bodies run the normalizations: install nnorm_export with them"
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load_average > _BUSY * cores_here():
        yield (
            f"other programs use this machine (a load of {load_average:.1f} on {cores_here()} cores): ratios hold "
            "better than milliseconds, and a quiet machine gives both"
        )


def _candidates_in(earlier: Tuned, source: Path, gate: Gate | None) -> list[Candidate]:
    if earlier.source_sha256 != file_sha256(source):
        raise InputError(f"{earlier.path} was written for another file than {source}; tune it without replay")
    try:
        rows = [row["candidate"] for row in earlier.measured["rows"] if row["candidate"]]
        found = [Candidate(row["variant"], row["runtime"], row["options"], row["batch"]) for row in rows]
        by_metric = any(row["metric"] for row in earlier.measured["rows"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{earlier.path}: the list of what was measured is damaged; tune the model again") from error
    if by_metric and gate is None:
        raise InputError(f"{earlier.path} was measured with a metric; give it again (metric=, --metric)")
    return found

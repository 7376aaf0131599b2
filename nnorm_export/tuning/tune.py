"""tune(): the fastest right file, runtime and settings on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnorm_export import library
from nnorm_export.dtypes import as_array
from nnorm_export.errors import InputError, NnormExportError, first_line
from nnorm_export.files.onnx_file import companions
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.staging import check_output
from nnorm_export.files.tuned import Tuned, read_settings
from nnorm_export.metrics.functions import Metric
from nnorm_export.metrics.gate import Gate
from nnorm_export.names import listed
from nnorm_export.pytorch_missing import is_tensor
from nnorm_export.runtimes import DEFAULT_RUNTIME, Runner, load
from nnorm_export.runtimes.processor import processor
from nnorm_export.tuning.candidates import Candidate, candidates_of, cores_here, threads_for
from nnorm_export.tuning.fresh_process import start_of
from nnorm_export.tuning.judge import Judge, Verdict
from nnorm_export.tuning.page import check_page, write_page
from nnorm_export.tuning.race import Entrant, Race
from nnorm_export.tuning.report import OBJECTIVES, Row, TuneReport
from nnorm_export.tuning.rows import Feed, batched_names, check_data, fixed_rows, take_rows
from nnorm_export.tuning.settings import file_beside, settings_path, write_settings
from nnorm_export.tuning.variants import NAMES, VARIANTS, Variant, Work, installed_runtimes, ways_of

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.reference.pytorch_model import Passthrough

_COMPARED_ROWS = 8
_MAKING = 0.75  # of the time, for making files and comparing them
_STARTS = 20.0  # seconds for the starts of finalists
_THROUGHPUT_BATCHES = (1, 2, 4, 8, 16, 32)
_EQUAL = 0.99  # a configuration is faster only below this part of the time of a simpler one
_BUSY = 0.5  # of the cores, at the beginning

Progress = Callable[[str, float], None]


def tune(
    source: str | Path | nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Any,
    output: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    objective: str = "latency",
    batches: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    minutes: float = 5.0,
    metric: Metric | None = None,
    reference: Any = None,
    at_least: float | str | None = None,
    within: float | str | None = None,
    lower_is_better: bool | None = None,
    confident: bool = False,
    replay: str | Path | None = None,
    page: str | Path | None = None,
    passthrough: Passthrough = (),
    progress: Progress | None = None,
) -> TuneReport:
    """Finds the file, runtime and settings that are the fastest on this machine and still right: argmin time / row.

    It makes files of the given one (``optimize``, the form ``primitives``, int8) and of its PyTorch model (float16,
    bfloat16, TorchScript, AOTInductor, engines where there is a GPU), and compares each of them first. What is right is
    measured in every installed runtime with several numbers of threads. Candidates take turns, and slow ones drop out
    early (:mod:`.race`). The winner is written beside its settings, which :func:`nnorm_export.load` opens.

    >>> report = nnorm_export.tune("model.onnx", images.numpy(), metric="top1", reference=labels, within="0.3%")
    >>> (logits,) = nnorm_export.load(report.path)(images.numpy())  # model.tuned.json

    Args:
        source: an ONNX file, or a trained model, which is exported first.
        inputs: data as in service, many rows if there is a metric: by position or by name; as :func:`verify` takes them
            if ``source`` is a model.
        output: the settings to write, ``NAME.tuned.json``; by default beside ``source``.
        model: the PyTorch model of the file ``source``, whose forward takes the inputs in the order of the file. With
            it, files are compared with PyTorch, and not with ``source``, and the formats of PyTorch are tried too.
        objective: ``latency``, the time of a call, or ``throughput``, the rows in a second.
        batches: the rows of a call: one number for the latency, 1 by default; several for the throughput, 1 to 32 by
            default.
        threads: the numbers of threads to try; by default 1, 2, 4, … and all cores.
        only: the names of the files to try (:data:`.variants.NAMES`), besides the given one; None tries all.
        minutes: the time limit. Files are made in the first three quarters of it; what was not tried is said.
        metric, reference, at_least, within, lower_is_better, confident: a metric that must not suffer, as for
            :meth:`.Gate.of`; the given file is its reference. Without a metric no int8 file is tried, because its
            results are others.
        replay: settings that ``tune`` wrote: what they list is measured again, and nothing is written.
        page: an ``.html`` file for a report with a picture of time against accuracy (the extra ``report``).
        passthrough: as for :func:`nnorm_export.verify`.
        progress: called with what is done at present, and the part of the time that has passed.

    Raises:
        InputError: the inputs do not fit, an option is wrong, or the metric cannot be computed.
        ModelFileError: ``source`` is not a model, or ``replay`` are settings of another one.
        NnormExportError: ``source`` does not compute what ``model`` computes.
        ExportError: a file cannot be written. After an error older settings and their file are unchanged.
    """
    check_options(objective, batches, threads, only, minutes)
    clock = _Clock(minutes, progress or (lambda _, __: None))
    gate = _gate(metric, reference, at_least, within, lower_is_better, confident)
    path = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) else None
    settings = settings_path(path, output or replay)
    check_output(settings)
    if page is not None:
        check_page(page)
    earlier = None if replay is None else read_settings(replay)
    with tempfile.TemporaryDirectory() as folder:
        if path is not None:
            work = _work_of_file(path, Path(folder), inputs, model, passthrough)
        else:
            work = _work_of_model(source, Path(folder), inputs, passthrough)
        plan = _Plan.of(work, gate, earlier, objective, batches, threads, only)
        report = _tuned(plan, clock, settings, source_name="" if path is None else path.name)
    if page is not None:
        write_page(report, page)
    return report


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


def _is_whole(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool) and int(number) >= 1


def _gate(metric: Metric | None, reference: Any, *rest: Any) -> Gate | None:
    names = ("at_least", "within", "lower_is_better", "confident")
    if metric is None:
        given = {"reference": reference is not None, **{n: bool(value) for n, value in zip(names, rest, strict=True)}}
        if unused := [name for name, is_given in given.items() if is_given]:
            raise InputError(f"{unused[0]} goes with a metric; give metric= too, or leave it out")
        return None
    return Gate.of(metric, reference, **dict(zip(names, rest, strict=True)))


def _work_of_file(path: Path, folder: Path, inputs: Any, model: nn.Module | None, passthrough: Passthrough) -> Work:
    runner = load(path, DEFAULT_RUNTIME)
    data = _by_name(runner, inputs)
    check_data(runner.inputs, data)
    batched = batched_names(runner.inputs, data)
    rows = take_rows(data, batched, min(_COMPARED_ROWS, _rows_of(data, batched)))
    work = Work(path, folder, rows, data, batched)
    if model is None:
        return work
    from nnorm_export.models.arguments import to_tensor  # noqa: PLC0415 - needs PyTorch
    from nnorm_export.models.modules import require_module  # noqa: PLC0415 - needs PyTorch

    require_module("tune", model)
    example = tuple(to_tensor(array) for array in rows.values())
    return replace(work, model=model, example=(example, {}), passthrough=passthrough)


def _work_of_model(model: Any, folder: Path, inputs: Any, passthrough: Passthrough) -> Work:
    from nnorm_export.exporting.export import export  # noqa: PLC0415 - needs PyTorch
    from nnorm_export.models.arguments import batch_length, resize_batch, tensors_in, unbind  # noqa: PLC0415 - the same
    from nnorm_export.models.modules import require_module  # noqa: PLC0415 - needs PyTorch
    from nnorm_export.parity.reference.pytorch_model import bound  # noqa: PLC0415 - needs PyTorch

    require_module("tune", model)
    given = bound(model, inputs)
    few = resize_batch(given, min(_COMPARED_ROWS, batch_length(given) or 1))
    args, kwargs = unbind(model, few)
    path = export(model, args, folder / "model.onnx", kwargs=kwargs, passthrough=passthrough).path
    runner = load(path, DEFAULT_RUNTIME)
    names = [info.name for info in runner.inputs]
    data, rows = (dict(zip(names, map(as_array, tensors_in(each)), strict=True)) for each in (given, few))
    check_data(runner.inputs, data)
    return Work(
        path, folder, rows, data, batched_names(runner.inputs, data), model, (args, kwargs), passthrough=passthrough
    )


def _by_name(runner: Runner, inputs: Any) -> Feed:
    if isinstance(inputs, Mapping):
        return {str(name): as_array(value) for name, value in inputs.items()}
    values = [inputs] if isinstance(inputs, np.ndarray) or is_tensor(inputs) else list(inputs)
    return {info.name: as_array(value) for info, value in zip(runner.inputs, values, strict=False)}


def _rows_of(data: Feed, batched: Sequence[str]) -> int:
    return len(data[batched[0]]) if batched else 1


@dataclass
class _Clock:
    """The time that has passed of the limit, and the progress that is shown."""

    minutes: float
    progress: Progress
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def show(self, text: str) -> None:
        self.progress(text, min(1.0, self.seconds / (60 * self.minutes)))

    def is_over(self, share: float, needed: float = 0.0) -> bool:
        return self.seconds + needed > share * 60 * self.minutes

    @property
    def end_of_race(self) -> float:
        return self.start + max(0.5 * 60 * self.minutes, 60 * self.minutes - _STARTS)


@dataclass(frozen=True, kw_only=True)
class _Plan:
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
    ) -> _Plan:
        installed, missing = installed_runtimes()
        listed_before = None
        if earlier is not None:
            listed_before = _candidates_in(earlier, work.source)
            only = list(dict.fromkeys(candidate.variant for candidate in listed_before))
            batches = list(dict.fromkeys(candidate.batch for candidate in listed_before))
            objective = earlier.objective
        return cls(
            work=work,
            judge=Judge(work, gate),
            variants=[variant for variant in VARIANTS if _is_tried(variant, work, installed, only)],
            installed=installed,
            threads=threads or threads_for(cores_here()),
            batches=_batches(work, objective, batches),
            objective=objective,
            notices=list(_notices(work, gate, missing)),
            earlier=earlier,
            listed=listed_before,
        )

    @property
    def base(self) -> Candidate:
        """The given file as ``load`` opens it."""
        return Candidate("given", DEFAULT_RUNTIME, {}, self.batches[0])


def _is_tried(variant: Variant, work: Work, installed: Sequence[str], only: Sequence[str] | None) -> bool:
    if (variant.needs and variant.needs not in installed) or (variant.of_model and work.model is None):
        return False
    return only is None or variant.name == "given" or variant.name in only


def _batches(work: Work, objective: str, given: Sequence[int] | None) -> list[int]:
    if not work.batched:
        rows = fixed_rows(load(work.source, DEFAULT_RUNTIME).inputs)
        if given is not None and list(given) != [rows]:
            raise InputError(f"batches is {list(given)}, and the file takes {rows} rows at a time: its batch is fixed")
        return [rows]
    return list(given or (_THROUGHPUT_BATCHES if objective == "throughput" else (1,)))


def _notices(work: Work, gate: Gate | None, missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield f"not installed here: {', '.join(missing)} (nnorm-export doctor says what they need)"
    if gate is None:
        yield "int8 was not tried: its results are others, and only a metric can accept it (metric=, --metric)"
    if work.model is None:
        yield "float16, bfloat16, TorchScript and AOTInductor were not tried: they are made of the model (--model)"
    if library.find_library() is None:
        yield "the kernels are not installed, so that bodies run the normalizations: install nnorm_export with them"
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load_average > _BUSY * cores_here():
        yield (
            f"other programs use this machine (a load of {load_average:.1f} on {cores_here()} cores): ratios hold "
            "better than milliseconds, and a quiet machine gives both"
        )


def _candidates_in(earlier: Tuned, source: Path) -> list[Candidate]:
    if earlier.source_sha256 and earlier.source_sha256 != file_sha256(source):
        raise InputError(f"{earlier.path} was written for another file than {source}; tune it without replay")
    rows = [row["candidate"] for row in earlier.measured.get("rows", ()) if row.get("candidate")]
    if not rows:
        raise InputError(f"{earlier.path} lists nothing that was measured; tune the model again")
    return [Candidate(row["variant"], row["runtime"], row["options"], row["batch"]) for row in rows]


@dataclass
class _Files:
    """The files that were made, and the configurations that are to be measured."""

    paths: dict[str, Path] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    out: list[Row] = field(default_factory=list)


def _tuned(plan: _Plan, clock: _Clock, settings: Path, *, source_name: str) -> TuneReport:
    clock.show("comparing the given file")
    plan.judge.check_source()
    files = _make(plan, clock)
    entrants = _race(plan, files, clock)
    rows = [_row(key, files, entrants, plan) for key in files.candidates]
    rows.sort(key=lambda row: (row.ratio is None, bool(row.dropped), row.ratio or 0.0))
    base = next(row for row in rows if row.candidate == plan.base)
    winner = _winner([row for row in rows if not row.state], files)
    finalists = [row for row in rows if not row.state]
    rows = [_started(row, files, plan, clock) if row in (*finalists, base) else row for row in rows]
    winner, base = (next(row for row in rows if row.candidate == each.candidate) for each in (winner, base))
    if winner.candidate is None:
        raise NnormExportError("no configuration was measured")
    made = files.paths[winner.name]
    file = file_beside(settings, made)
    report = TuneReport(
        path=settings,
        file=file,
        objective=plan.objective,
        winner=winner,
        base=base,
        rows=[*rows, *files.out],
        compared_with=_compared_with(plan),
        processor=processor(),
        cores=cores_here(),
        seconds=clock.seconds,
        notices=[*plan.notices, *(["the given file, as load opens it, is the fastest"] if winner == base else [])],
        repeated=None if plan.earlier is None else _repeated(plan.earlier, rows, winner),
    )
    if plan.earlier is not None:
        return replace(report, file=plan.earlier.file)
    tuned = Tuned(
        path=settings,
        file=file,
        sha256="",
        runtime=winner.candidate.runtime,
        options=winner.candidate.options,
        batch=winner.candidate.batch,
        objective=plan.objective,
        source=source_name,
        source_sha256=file_sha256(plan.work.source) if source_name else "",
        processor=report.processor,
        cores=report.cores,
        measured={name: value for name, value in report.to_json().items() if name not in ("path", "file")},
    )
    clock.show("writing")
    write_settings(tuned, made)
    return report


def _make(plan: _Plan, clock: _Clock) -> _Files:
    """Makes the files, and compares each in every runtime that is to run it."""
    files = _Files()
    files.candidates[str(plan.base)] = plan.base
    kernels = library.find_library() is not None
    for variant in plan.variants:
        if variant.name != "given" and clock.is_over(_MAKING, variant.seconds):
            files.out.append(Row(name=variant.name, out="not tried: the time limit; give more minutes (--minutes)"))
            continue
        clock.show(f"making {variant.name}")
        if variant.changes_results and plan.judge.gate is None:
            continue
        try:
            path = variant.make(plan.work)
            ways = list(ways_of(path, variant, plan.installed, kernels=kernels))
        except NnormExportError as error:
            files.out.append(Row(name=variant.name, out=f"not made: {plan.work.without_folder(first_line(error))}"))
            continue
        files.paths[variant.name] = path
        for way in ways:
            clock.show(f"comparing {variant.name} in {way}")
            verdict = plan.judge.judge(path, variant, way)
            if not verdict:
                row = Row(name=variant.name, runtime=str(way), out=verdict.reason, error_share=verdict.share)
                files.out.append(replace(row, metric=verdict.metric))
                continue
            found = candidates_of(variant.name, way, plan.threads, plan.batches)
            wanted = [each for each in found if plan.listed is None or each in plan.listed]
            if variant.name == "given" and not way.options and way.runtime == DEFAULT_RUNTIME:
                wanted = [plan.base, *wanted]
            for candidate in wanted:
                files.candidates[str(candidate)] = candidate
                files.verdicts[str(candidate)] = verdict
    return files


def _race(plan: _Plan, files: _Files, clock: _Clock) -> dict[str, Entrant]:
    race = Race(
        {key: partial(_opened, plan, files, candidate) for key, candidate in files.candidates.items()},
        {key: candidate.batch for key, candidate in files.candidates.items()},
        str(plan.base),
        clock.end_of_race,
        lambda text: clock.show(f"measuring {text}"),
    )
    return race.run()


def _opened(plan: _Plan, files: _Files, candidate: Candidate) -> Callable[[], object]:
    runner = load(files.paths[candidate.variant], candidate.runtime, **candidate.options)
    return partial(runner, *_call(plan, candidate).values())


def _call(plan: _Plan, candidate: Candidate) -> Feed:
    return take_rows(plan.work.data, plan.work.batched, candidate.batch)


def _row(key: str, files: _Files, entrants: Mapping[str, Entrant], plan: _Plan) -> Row:
    candidate, entrant, verdict = files.candidates[key], entrants[key], files.verdicts.get(key, Verdict())
    path = files.paths[candidate.variant]
    row = Row(
        name=candidate.variant,
        candidate=candidate,
        runtime=candidate.runtime,
        out=entrant.failure,
        dropped=entrant.dropped,
        size=sum(each.stat().st_size for each in (path, *companions(path))),
        error_share=verdict.share,
        metric=verdict.metric,
        implementations=verdict.implementations,
    )
    if not entrant.runs:
        return row
    return replace(
        row,
        milliseconds=1000 * entrant.percentile(50),
        p99=1000 * entrant.percentile(99),
        runs=len(entrant.runs),
        ratio=entrant.ratio(entrants[str(plan.base)]),
        per_second=1 / entrant.per_row,
    )


def _winner(finalists: Sequence[Row], files: _Files) -> Row:
    """The fastest; the simplest of those that are as fast, which is the first in the order of the candidates."""
    fastest = min(row.ratio for row in finalists if row.ratio is not None)
    simple = {key: place for place, key in enumerate(files.candidates)}
    near = [row for row in finalists if row.ratio is not None and row.ratio * _EQUAL <= fastest]
    return min(near, key=lambda row: simple[str(row.candidate)])


def _started(row: Row, files: _Files, plan: _Plan, clock: _Clock) -> Row:
    """``row`` with the start and the memory of a new process."""
    if row.candidate is None:
        return row
    clock.show(f"starting {row.candidate}")
    inputs = plan.work.folder / "inputs.npz"
    np.savez(inputs, allow_pickle=False, **_call(plan, row.candidate))
    start = start_of(files.paths[row.name], row.candidate.runtime, row.candidate.options, inputs)
    return row if start is None else replace(row, start=start.seconds, memory=start.memory)


def _compared_with(plan: _Plan) -> str:
    other = "the given file" if plan.work.model is None else "PyTorch"
    gate = plan.judge.gate
    return f"the error budget against {other}{'' if gate is None else f', and the metric {gate.name}'}"


def _repeated(earlier: Tuned, rows: Sequence[Row], winner: Row) -> str:
    """What is different from ``earlier``; empty if its winner is still as fast as any other."""
    before = earlier.measured["winner"]
    name = before["candidate"]
    same = next((row for row in rows if row.candidate is not None and row.candidate.to_json() == name), None)
    if same is None or same.ratio is None or winner.ratio is None:
        return f"{before['name']} won then, and cannot be measured now"
    if same.candidate == winner.candidate or same.ratio * _EQUAL <= winner.ratio:
        return ""
    return f"{same.candidate} won then, and takes {same.ratio / winner.ratio:.2f} times the time of the winner now"

"""tune(): the fastest right file, runtime and settings on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnorm_export.errors import InputError
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.staging import check_output
from nnorm_export.files.tuned import Tuned, read_settings
from nnorm_export.metrics.asked import gate_of
from nnorm_export.metrics.functions import Metric
from nnorm_export.runtimes import load
from nnorm_export.runtimes.processor import cores_here, processor
from nnorm_export.tuning.measure import Files, make_files, race, row_of, started, winner_of
from nnorm_export.tuning.page import check_page, write_page
from nnorm_export.tuning.plan import (
    Clock,
    Plan,
    Progress,
    check_options,
    refuse_beside_replay,
    refuse_settings,
    target_of,
)
from nnorm_export.tuning.report import Row, TuneReport
from nnorm_export.tuning.service import plan_service
from nnorm_export.tuning.service_plan import ServicePlan, ServiceTarget
from nnorm_export.tuning.settings import file_beside, refuse_source, settings_path, write_settings
from nnorm_export.tuning.work import work_of_file

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.reference.pytorch_model import Passthrough


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
    qps: float | None = None,
    p99: float | str | None = None,
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
        qps, p99: a target for a service: requests of one row in a second, 99 % of them answered in this time
            (milliseconds, or ``"20ms"``). The cheapest configuration that meets it under load
            (:func:`.service.plan_service`) is written into the settings, for ``serve-repo`` and the sample for Ray.
        progress: called with what is done at present, and the part of the time that has passed.

    Raises:
        InputError: the inputs do not fit, an option is wrong, or the metric cannot be computed.
        ModelFileError: ``source`` is not a model, or ``replay`` are settings of another one.
        NnormExportError: ``source`` does not compute what ``model`` computes.
        ExportError: a file cannot be written. After an error older settings and their file are unchanged.
    """
    check_options(objective, batches, threads, only, minutes)
    target = target_of(qps, p99)
    if replay is not None:
        given = {
            "output": output,
            "objective": None if objective == "latency" else objective,
            "batches": batches,
            "threads": threads,
            "only": only,
            "qps": qps,
        }
        refuse_beside_replay(given)
    if metric is not None and at_least is None and within is None:
        raise InputError("a metric needs a limit: within (--within), the greatest loss, or at_least (--at-least)")
    clock = Clock(minutes, progress or (lambda _, __: None), serves=target is not None)
    gate = gate_of(
        metric,
        reference,
        at_least=at_least,
        within=within,
        lower_is_better=lower_is_better,
        confident=confident,
    )
    path = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) else None
    settings = settings_path(path, output or replay)
    if replay is None:
        check_output(settings)
        if path is not None:
            refuse_settings(path)
            refuse_source(settings, path)
    if page is not None:
        check_page(page)
    earlier = None if replay is None else read_settings(replay)
    with tempfile.TemporaryDirectory() as folder:
        work = None if path is None else work_of_file(path, Path(folder), inputs)
        if work is None or model is not None:
            from nnorm_export.tuning import pytorch  # noqa: PLC0415 - a file alone is tuned where PyTorch is missing

            if work is None:
                work = pytorch.work_of_model(source, Path(folder), inputs, passthrough)
            else:
                work = pytorch.with_model(work, model, passthrough)
        plan = Plan.of(work, gate, earlier, objective, batches, threads, only, target)
        report = _tuned(plan, clock, settings, source_name="" if path is None else path.name)
    if page is not None:
        write_page(report, page)
    return report


def _tuned(plan: Plan, clock: Clock, settings: Path, *, source_name: str) -> TuneReport:
    files = make_files(plan, clock)
    entrants = race(plan, files, clock)
    rows = [row_of(key, files, entrants, plan) for key in files.candidates]
    rows.sort(key=lambda row: (row.ratio is None, bool(row.dropped), row.ratio or 0.0))
    winner = winner_of([row for row in rows if not row.state], files)
    rows = [_with_start(row, winner, files, plan, clock) for row in rows]
    winner, base = (next(row for row in rows if row.candidate == each) for each in (winner.candidate, plan.base))
    service = None if plan.target is None else _service(plan, plan.target, files, winner, clock)
    report = TuneReport(
        path=settings,
        file=file_beside(settings, files.paths[winner.name]),
        objective=plan.objective,
        winner=winner,
        base=base,
        rows=[*rows, *files.out],
        compared_with=plan.compared_with,
        processor=processor(),
        cores=cores_here(),
        seconds=clock.seconds,
        notices=[*plan.notices, *(["the given file, as load opens it, is the fastest"] if winner == base else [])],
        service=service,
        repeated=None if plan.earlier is None else _repeated(plan.earlier, rows, winner),
    )
    if plan.earlier is not None:
        return replace(report, file=plan.earlier.file)
    clock.show("writing")
    source = (source_name, file_sha256(plan.work.source)) if source_name else ("", "")
    write_settings(_settings(report, *source), files.paths[winner.name])
    return report


def _with_start(row: Row, winner: Row, files: Files, plan: Plan, clock: Clock) -> Row:
    """``row``, if it is a finalist, with its start; the winner has one in any case, the others while there is time."""
    is_measured = row == winner or (not row.state and clock.seconds_left > 0)
    return started(row, files, plan, clock) if is_measured else row


def _settings(report: TuneReport, source: str, source_sha256: str) -> Tuned:
    candidate = report.winner.measured_as
    chosen = report.service.chosen if report.service is not None else None
    service = None if chosen is None else chosen.config.to_json()
    measured = {name: value for name, value in report.to_json().items() if name not in ("path", "file")}
    return Tuned(
        path=report.path,
        file=report.file,
        sha256="",  # of the copy that is to be written
        runtime=candidate.runtime,
        options=candidate.options,
        batch=candidate.batch,
        objective=report.objective,
        source=source,
        source_sha256=source_sha256,
        processor=report.processor,
        cores=report.cores,
        service=service,
        measured=measured,
    )


def _service(plan: Plan, target: ServiceTarget, files: Files, winner: Row, clock: Clock) -> ServicePlan:
    candidate = winner.measured_as
    path = files.paths[candidate.variant]
    options = {name: value for name, value in candidate.options.items() if name != "intra_op_num_threads"}
    return plan_service(
        lambda threads: load(path, candidate.runtime, **options, intra_op_num_threads=threads),
        plan.work.data,
        target,
        coarse=winner.error_share is None and winner.name != "given",
        progress=clock.show,
        deadline=time.monotonic() + max(0.0, clock.seconds_left),
    )


def _repeated(earlier: Tuned, rows: Sequence[Row], winner: Row) -> str:
    """What is different from ``earlier``; empty if its winner is still as fast as any other."""
    before = earlier.measured["winner"]
    name = before["candidate"]
    same = next((row for row in rows if row.candidate is not None and row.candidate.to_json() == name), None)
    if same is None or same.ratio is None or winner.ratio is None:
        return f"{before['name']} won then, and cannot be measured now"
    if same.candidate == winner.candidate or same.ratio * 0.99 <= winner.ratio:
        return ""
    return f"{same.candidate} won then, and takes {same.ratio / winner.ratio:.2f} times the time of the winner now"

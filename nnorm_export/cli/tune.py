"""``nnorm-export tune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli.file_options import TuneOptions
from nnorm_export.cli.metric_options import GateOptions
from nnorm_export.cli.options import ReferenceOptions
from nnorm_export.cli.output import Output, print_facts, print_table, shown, size_text
from nnorm_export.errors import NnormExportError

if TYPE_CHECKING:
    from nnorm_export.tuning.report import Row, TuneReport


def tune(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="The file that export wrote.")],
    model: ReferenceOptions,
    options: TuneOptions,
    metric: GateOptions,
    output: Output,
) -> None:
    """Find the fastest file, runtime and settings on this machine.

    Makes other files of the given one, compares each with it, and measures
    those that are right in all runtimes that are installed, with several
    numbers of threads, in turns. With the PyTorch model (--model), the files
    are compared with PyTorch, and float16, TorchScript and AOTInductor are
    tried too. With a metric and its labels, int8 files are tried, which must
    not lose more than you say.

    The winner is written beside its settings: load("model.tuned.json") opens
    it so, serve-repo takes it, and doctor explains it. It is the fastest on
    this kind of machine: tune where you serve.

    Examples:

      nnorm-export tune net.onnx -i data.npz

      nnorm-export tune net.onnx -i images:val.npz:x --metric top1 \\
        --data val.npz:y --within 0.3% --minutes 10

      nnorm-export tune net.onnx -i data.npz -m nets:build -c best.pth \\
        --for throughput --batch 8 --batch 32 --report tuned.html

      nnorm-export tune net.onnx -i data.npz --qps 200 --p99 20ms

      nnorm-export tune net.onnx -i data.npz --replay net.tuned.json
    """
    from nnorm_export.cli.arrays import read_inputs_of_file
    from nnorm_export.cli.metrics import metric_arguments
    from nnorm_export.files.inspection import describe
    from nnorm_export.tuning.plan import check_options, target_of
    from nnorm_export.tuning.tune import tune as find

    check_options(options.objective, options.batches, options.threads, options.only, options.minutes)
    target_of(options.qps, options.p99)
    judged = metric_arguments(metric, options.input_specs)
    with output.working(f"Reading {path}"):
        dtypes = {info.name: info.dtype for info in describe(path).inputs}
        inputs, notices = read_inputs_of_file(options.input_specs or (), dtypes)
        source = _source(model) if model.model else None
    output.notices([*(source.notices if source else ()), *notices])
    if not inputs:
        raise NnormExportError("give the inputs that calls have in service, --input data.npz or --input 1,3,224,224")
    with output.progressing(f"Tuning {path}") as progress:
        report = find(
            path,
            inputs,
            options.output,
            model=source.module if source else None,
            objective=options.objective,
            batches=options.batches,
            threads=options.threads,
            only=options.only,
            minutes=options.minutes,
            **judged,
            qps=options.qps,
            p99=options.p99,
            replay=options.replay,
            page=options.page,
            passthrough=model.passthrough or (),
            progress=progress,
        )
    output.notices(report.notices)
    output.show(
        report.to_json() | {"notices": [*notices, *report.notices]}, lambda: _print(report, options, output.verbose)
    )
    if report.service is not None and report.service.chosen is None:
        output.fail(f"{path}: {report.service.failure}")


def _source(model: ReferenceOptions) -> Any:
    from nnorm_export.cli.source import load_source  # needs PyTorch

    return load_source(model)


def _print(report: TuneReport, options: TuneOptions, verbose: bool) -> None:
    measured = [row for row in report.rows if row.milliseconds is not None]
    accuracy = next((row.metric.name for row in measured if row.metric is not None), "error / allowed")
    more = ("p99", "rows/s", "runs", "left") if verbose else ()
    headings = ("configuration", "ms", "ratio", accuracy, *more)
    print_table(headings, (_cells(row)[: len(headings)] for row in measured), numbers=True)
    typer.echo()
    winner = report.winner
    print_facts(
        [
            ("fastest", str(winner)),
            ("start", "" if winner.start is None else f"{winner.start:.2f} s until the first answer"),
            ("memory", "" if winner.memory is None else size_text(winner.memory)),
            ("size", size_text(winner.size)),
            ("right by", report.compared_with),
            ("machine", f"{report.processor}, {report.cores} cores"),
            ("changed", report.repeated or ""),
            *(("out", str(row)) for row in report.rows if row.out),
        ]
    )
    print_facts(("service", line) for line in str(report.service or "").splitlines())
    if report.repeated is None:
        typer.echo(f"wrote {shown(str(report.file))} and {shown(str(report.path))}")
    elif not report.repeated:
        typer.echo(f"{shown(str(report.path))} is still the fastest")
    if options.page is not None:
        typer.echo(f"wrote {shown(options.page)}")


def _cells(row: Row) -> tuple[str, ...]:
    numbers = [
        "-" if number is None else f"{number:{form}}"
        for number, form in ((row.milliseconds, ".3g"), (row.ratio, ".2f"), (row.p99, ".3g"), (row.per_second, ".4g"))
    ]
    milliseconds, ratio, *more = numbers
    return (str(row.candidate), milliseconds, ratio, row.accuracy or "-", *more, str(row.runs), row.dropped)

"""``nnorm-export verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli.metric_options import GateOptions
from nnorm_export.cli.options import OptionalModelOptions, VerifyOptions
from nnorm_export.cli.output import (
    COMMAND_LINE,
    Output,
    print_facts,
    print_parity,
    print_table,
    shown,
)
from nnorm_export.cli.replay import replay, write_bom_if_asked
from nnorm_export.errors import NnormExportError
from nnorm_export.names import layer_name

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.layer_by_layer.float16_risks import HalfRisk
    from nnorm_export.parity.layer_by_layer.probe import ProbeReport
    from nnorm_export.parity.verdict.outcome import ParityReport


def verify(
    ctx: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The file to verify, of any format that export or engine writes."),
    ] = None,
    *,
    model: OptionalModelOptions,
    options: VerifyOptions,
    metric: GateOptions,
    output: Output,
) -> None:
    """Compare a file with the PyTorch model that it was made from.

    The reference is the model in float64. The file passes if its error in every
    element is at most ten times the error that roundings cause in PyTorch, in
    the file's own precision, or, if given, within --rtol and --atol. Otherwise
    the exit code is 1.
    With --metric, the file must also lose no more of the metric than --within;
    with --criterion metric, for int8, that alone decides.
    Without --input, the inputs are random and have the file's shapes; real
    data is a better test. Verifying TorchScript or a package of AOTInductor runs
    its code: verify only files that you trust. A .pt2 program that would run
    code while it loads is refused without --trust-pickle.

    Examples:

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz

      nnorm-export verify net.onnx -m nets:build -c best.pth \\
        -i 64,3,32,32 --rtol 1e-3 --atol 1e-5 --rtol boxes:1e-2

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz \\
        --metric top1 --data labels.npz:y --within 0.3%

      nnorm-export verify net.onnx -m program.pt2 --runtime reference --json

      nnorm-export verify net.onnx -m nets:build -c best.pth --record net.parity

      nnorm-export verify net.onnx --replay net.parity --exact

      nnorm-export verify net.onnx -m nets:build -c best.pth \\
        --record net.parity --sign-with key.pem

      nnorm-export verify net.onnx --replay net.parity --public-key pub.pem

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz \\
        --record net.parity --bom net.cdx.json

      nnorm-export verify net.onnx --replay net.cdx.json

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz \\
        --probes --report parity.html

      nnorm-export verify --url grpc://localhost:8001/net -m nets:build \\
        -c best.pth
    """
    path = _path(file, options)
    _check_combinations(options, model)
    if options.replay is not None:
        replay(path, options.replay, model, options, metric, output)
        return
    from nnorm_export.cli.metrics import metric_arguments
    from nnorm_export.cli.source import inputs_for, load_source, sources_of
    from nnorm_export.parity.layer_by_layer.float16_risks import float16_risks
    from nnorm_export.parity.layer_by_layer.probe import probe
    from nnorm_export.parity.report.write_report import write_report
    from nnorm_export.parity.verify import verify as compare

    _check_outputs(path, options)
    with output.working("Loading the model"):
        judged = metric_arguments(metric, model.input_specs)
        sources = sources_of(model, metric.data) if options.record else None  # as they are before they are loaded
        source = load_source(model)
        inputs, notices = inputs_for(source, model, path, options.runtime, timeout=options.timeout)
    notices = [*source.notices, *notices]
    output.notices(notices)
    criteria, shared = _criteria(options, model)
    probed = risks = None
    with output.working(f"Comparing {path} with PyTorch"):
        report = compare(
            path,
            source.module,
            inputs,
            certificate=options.record,
            private_key=options.sign_with,
            sources=sources,
            trust_pickle=model.trust_pickle,
            timeout=options.timeout,
            **criteria,
            **shared,
            **judged,
        )
        write_bom_if_asked(path, options.record, options, passed=bool(report))
        if options.probes:
            probed = probe(path, runtime=options.runtime)
        if options.float16:
            risks = float16_risks(source.module, inputs, passthrough=model.passthrough or ())
        if options.page is not None:
            write_report(
                options.page, path, source.module, inputs, report, probes=probed, about=_about(model, ctx), **shared
            )
    output.notices(report.known_faults)
    asked = {
        "float16_risks": None if risks is None else [risk.to_json() for risk in risks],
        "probes": None if probed is None else probed.to_json(),
        "report": options.page,
        "bom": options.bom if report else None,
    }
    as_json: dict[str, Any] = {"path": path, **report.to_json(), "notices": [*notices, *report.known_faults]}
    as_json |= {name: value for name, value in asked.items() if value is not None}

    def print_text() -> None:
        print_parity(report, verbose=output.verbose)
        if output.verbose and report.implementations:
            print_table(("node", "ran by"), report.implementations.items(), apart=True)
        if probed is not None:
            _print_probes(probed)
        if risks is not None:
            _print_risks(risks, source.module)
        for name in filter(None, (*((options.record, options.bom) if report else ()), options.page)):
            typer.echo(f"wrote {shown(name)}")

    output.show(as_json, print_text)
    if not report:
        _fail(path, report, model, options, output)
    if probed is not None and not probed:
        different = ", ".join(layer.name for layer in probed.layers if not layer.parity.passed)
        output.fail(f"{path}: on probes of their branches {different} differ from their formula")


def _fail(path: str, report: ParityReport, model: OptionalModelOptions, options: VerifyOptions, output: Output) -> None:
    from nnorm_export.cli.source import bisect_command
    from nnorm_export.parity.layer_by_layer.advice import bisect_advice

    if any(not parity.compared for parity in report.outputs):
        output.fail(f"{path} is not shown to compute what {model.model} computes: {report.reason}")
    if report.outputs_pass:
        output.fail(f"{path} fails by the metric, {report.reason}{_about_metric(report)}")
    advice = f". {report.other_weights}" if report.other_weights else ""
    if not advice and not report.is_nondeterministic:
        advice = bisect_advice(path, bisect_command(path, model, options.runtime, options.where))
    output.fail(f"{path} does not compute what {model.model} computes: {report.reason}{advice}")


def _about_metric(report: ParityReport) -> str:
    metric = report.metric
    if report.by_metric_alone or metric is None or metric.within is None or metric.loss <= metric.within:
        return ""
    return ". The errors of the outputs are allowed by the criterion, but they decide near ties and thresholds"


def _about(model: OptionalModelOptions, ctx: typer.Context) -> dict[str, str]:
    """The sources of the model and the inputs, and the command, for the report."""
    given = {
        "model": model.model,
        "checkpoint": model.checkpoint,
        "data": ", ".join(model.input_specs or ()),
        "command": ctx.meta[COMMAND_LINE],
    }
    return {name: text for name, text in given.items() if text}


def _check_combinations(options: VerifyOptions, model: OptionalModelOptions) -> None:
    if options.exact and options.replay is None:
        raise NnormExportError("--exact goes with --replay; bisect --exact compares two runtimes")
    if options.public_key is not None and options.replay is None:
        raise NnormExportError("--public-key checks the signature of a certificate; it goes with --replay DIR")
    if options.sign_with is not None and options.record is None and options.replay is None:
        raise NnormExportError("--sign-with signs a certificate; it goes with --record DIR")
    if options.bom is not None and options.record is None and options.replay is None:
        raise NnormExportError("--bom refers to a certificate; it goes with --record DIR or --replay DIR")
    if options.replay is None and not model.model:
        raise NnormExportError("give the model to compare with, --model MODULE:FACTORY, or a certificate, --replay DIR")


def _check_outputs(path: str, options: VerifyOptions) -> None:
    """Raises the errors of paths to write before the comparison, which may take minutes."""
    from nnorm_export.parity.certificates.bom import check_output
    from nnorm_export.parity.certificates.signatures import check_private_key
    from nnorm_export.parity.certificates.write import check_folder
    from nnorm_export.parity.report.pages import check_page

    if options.page is not None:
        check_page(options.page)
    if options.record is not None:
        check_folder(Path(options.record))
        if options.bom is not None:
            check_output(Path(path), Path(options.record), Path(options.bom))
    if options.sign_with is not None:
        check_private_key(Path(options.sign_with))


def _criteria(options: VerifyOptions, model: OptionalModelOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of verify() that say how outputs are compared, and those that write_report() takes too."""
    from nnorm_export.cli.source import by_output

    criteria = {
        "criterion": options.criterion,
        "rtol": by_output("--rtol", options.rtol, float),
        "atol": by_output("--atol", options.atol, float),
        "statistic": by_output("--statistic", options.statistic, str),
    }
    shared = {
        "runtime": options.runtime,
        "where": by_output("--where", options.where, str),
        "passthrough": model.passthrough or (),
    }
    return criteria, shared


def _path(file: str | None, options: VerifyOptions) -> str:
    if (file is None) == (options.url is None):
        raise NnormExportError("give either a file or, with --url, a server")
    if options.url is not None and (options.record or options.replay) is not None:
        raise NnormExportError("a certificate names a file, which a server does not show; leave out --url")
    if options.timeout is not None and options.url is None:
        raise NnormExportError("--timeout goes with --url; leave it out")
    return str(file or options.url)


def _print_probes(probed: ProbeReport) -> None:
    from nnorm_export.parity.verdict.outcome import share_text

    rows = []
    for layer in probed.layers:
        count = len(layer.reached)
        missed = f"; not {', '.join(layer.missed)}" if layer.missed else ""
        verdict = "equal" if layer.parity.passed else "DIFFERENT"
        branches = f"{count} of {count + len(layer.missed)}{missed}"
        rows.append((layer.name, layer.implementation, branches, share_text(layer.parity.allowed_share), verdict))
    print_table(("node", "ran by", "branches", "error / allowed", ""), rows, apart=True)


def _print_risks(risks: list[HalfRisk], module: nn.Module) -> None:
    from nnorm_export.parity.layer_by_layer.float16_risks import normalizations

    typer.echo()
    if not risks and not normalizations(module):
        typer.echo("--float16 examines layers, and an exported program has none; give the model as MODULE:FACTORY")
    elif not risks:
        typer.echo("float16 puts no normalization at risk on these inputs")
    else:
        print_facts((layer_name(risk.path), "; ".join((*risk.unsafe, *risk.sums))) for risk in risks)
        if not any(risk.unsafe for risk in risks):
            typer.echo("Files of nnorm_export in float16 compute this in float32: the layers are safe there.")

"""``nnorm-export verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli._common import (
    CheckpointKeyOption,
    CheckpointOption,
    InputOption,
    JsonOption,
    ModelArgOption,
    OptionalModelOption,
    PassthroughOption,
    QuietOption,
    RuntimeOption,
    TrustPickleOption,
    VerboseOption,
    completing,
    print_facts,
    print_json,
    print_notices,
    print_table,
    working,
)
from nnorm_export.errors import NnormExportError, ParityError

if TYPE_CHECKING:
    from nnorm_export.parity.half_safety import HalfRisk
    from nnorm_export.parity.judgement import ParityReport
    from nnorm_export.parity.probing import ProbeReport


def verify(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The file to verify, of any format that export or engine writes."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Instead of a file a running server that speaks the KServe v2 protocol, such as Triton: "
            "http://HOST:8000/MODEL or grpc://HOST:8001/MODEL.",
        ),
    ] = None,
    model: OptionalModelOption = None,
    model_arg: ModelArgOption = None,
    checkpoint: CheckpointOption = None,
    checkpoint_key: CheckpointKeyOption = None,
    trust_pickle: TrustPickleOption = False,
    passthrough: PassthroughOption = None,
    input_specs: InputOption = None,
    runtime: RuntimeOption = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completing("nnorm_export.parity.judgement:CRITERIA"),
            help="budget (default), or allclose: torch.testing's tolerances for the dtype, or --rtol and --atol.",
            rich_help_panel="Comparison",
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Relative tolerance, in place of the error budget.", rich_help_panel="Comparison"
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Absolute tolerance, in place of the error budget.", rich_help_panel="Comparison"
        ),
    ] = None,
    float16: Annotated[
        bool,
        typer.Option(
            "--float16",
            help="List the normalizations that float16 puts at risk on these inputs, and why.",
            rich_help_panel="Comparison",
        ),
    ] = False,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes",
            help="Also run every normalization on inputs and λ that reach all its branches.",
            rich_help_panel="Comparison",
        ),
    ] = False,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="If it passes, write a certificate: inputs, PyTorch's outputs, hashes, tolerances and versions.",
            rich_help_panel="Certificate",
        ),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Compare with a certificate instead of a model: needs neither PyTorch nor the model's code.",
            rich_help_panel="Certificate",
        ),
    ] = None,
    report_page: Annotated[
        str | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write one page to look at: the error of each layer, λ, what ran where, the environment.",
            rich_help_panel="Output",
        ),
    ] = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare a file with the PyTorch model that it was made from.

    The model run in float64 is the truth. The file passes if its error is at
    most ten times that of PyTorch in the file's own precision, or, if they are
    given, within --rtol and --atol. The exit code is 1 if it does not.
    Without --input, random inputs of the file's shapes are taken; real data
    says more. A package of AOTInductor is machine code, which runs: verify
    only what you trust.

    Examples:

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz

      nnorm-export verify net.onnx -m nets:build -c best.pth \\
        -i 64,3,32,32 --rtol 1e-3 --atol 1e-5

      nnorm-export verify net.onnx -m program.pt2 --runtime reference --json

      nnorm-export verify net.onnx -m nets:build -c best.pth --record net.parity

      nnorm-export verify net.onnx --replay net.parity

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz \\
        --probes --report parity.html

      nnorm-export verify --url grpc://localhost:8001/net -m nets:build -c best.pth
    """
    path = _path(file, url, about_certificates=record is not None or replay is not None)
    if replay is not None:
        if (
            model is not None
            or record is not None
            or input_specs
            or float16
            or probes
            or report_page is not None
            or any(given is not None for given in (criterion, rtol, atol))
        ):
            raise NnormExportError(
                "--replay takes model, inputs and tolerances from the certificate and makes no report; leave them out"
            )
        _replay(path, replay, runtime, json_output=json_output, quiet=quiet)
        return
    if model is None:
        raise NnormExportError("give the model to compare with, --model MODULE:FACTORY, or a certificate, --replay DIR")
    from nnorm_export.cli._file_inputs import inputs_of
    from nnorm_export.cli._parity import print_parity
    from nnorm_export.cli._source import load_source
    from nnorm_export.parity import comparison
    from nnorm_export.parity.half_safety import float16_risks, normalizations
    from nnorm_export.parity.probing import probe
    from nnorm_export.parity.report.page import check_page, write_report

    if report_page is not None:
        check_page(report_page)  # before minutes are spent on what it would show
    with working("Loading the model", quiet=quiet):
        source = load_source(model, model_arg, checkpoint, checkpoint_key, trust_pickle)
        inputs, notices = inputs_of(source, input_specs, path, runtime)
    print_notices([*source.notices, *notices], quiet=quiet)
    with working(f"Comparing {path} with PyTorch", quiet=quiet):
        options: dict[str, Any] = {
            "runtime": runtime,
            "criterion": criterion,
            "rtol": rtol,
            "atol": atol,
            "certificate": record,
            "passthrough": passthrough or (),
        }
        report = comparison.verify(path, source.module, inputs, **options)
        probed = probe(path, runtime=runtime) if probes else None
        risks = float16_risks(source.module, inputs, passthrough=passthrough or ()) if float16 else []
        if report_page is not None:
            write_report(
                report_page,
                path,
                source.module,
                inputs,
                report,
                probes=probed,
                runtime=runtime,
                passthrough=passthrough or (),
            )
    if json_output:
        listed: dict[str, Any] = {"float16_risks": [risk.to_json() for risk in risks]} if float16 else {}
        listed |= {"probes": probed.to_json()} if probed is not None else {}
        listed |= {"report": report_page} if report_page is not None else {}
        print_json({"path": path, **report.to_json(), **listed, "notices": [*source.notices, *notices]})
    elif not quiet:
        print_parity(report)
        if verbose and report.implementations:
            typer.echo()
            print_table(("node", "ran by"), report.implementations.items())
        if probed is not None:
            typer.echo()
            _print_probes(probed)
        if float16:
            typer.echo()
            _print_risks(risks, count=len(normalizations(source.module)))
        written = [record if report else None, report_page]
        for name in filter(None, written):
            typer.echo(f"wrote {name}")
    _fail_unless(report, f"{path} does not compute what {model} computes", json_output=json_output)
    different = [] if probed is None else [layer.name for layer in probed.layers if not layer.parity.passed]
    if different:
        _fail(f"{path}: on probes of their branches {', '.join(different)} differ from their formula", json_output)


def _path(file: str | None, url: str | None, *, about_certificates: bool) -> str:
    if (file is None) == (url is None):
        raise NnormExportError("give either a file or, with --url, a server")
    if url is not None and about_certificates:
        raise NnormExportError("a certificate is of a file, and a server does not show its own; leave out --url")
    return str(file or url)


def _print_probes(probed: ProbeReport) -> None:
    from nnorm_export.parity.judgement import share_text

    rows = []
    for layer in probed.layers:
        count = len(layer.reached)
        missed = f"; not {', '.join(layer.missed)}" if layer.missed else ""
        verdict = "equal" if layer.parity.passed else "DIFFERENT"
        branches = f"{count} of {count + len(layer.missed)}{missed}"
        rows.append((layer.name, layer.implementation, branches, share_text(layer.parity.budget_share), verdict))
    print_table(("node", "ran by", "branches", "of budget", ""), rows)


def _print_risks(risks: list[HalfRisk], *, count: int) -> None:
    if not count:
        typer.echo("there is no layer to look into for float16; an exported program has none")
        return
    if not risks:
        typer.echo("float16 puts no normalization at risk on these inputs")
        return
    rows = [(risk.path or "(the model itself)", "; ".join((*risk.unsafe, *risk.sums))) for risk in risks]
    print_facts(rows)
    if not any(risk.unsafe for risk in risks):
        typer.echo("Files of nnorm_export sum in float32, in float16 too: these layers are safe in them.")


def _replay(path: str, folder: str, runtime: str | None, *, json_output: bool, quiet: bool) -> None:
    from nnorm_export.cli._parity import print_parity
    from nnorm_export.parity import certificates

    with working(f"Replaying {folder}", quiet=quiet):
        report = certificates.replay(path, folder, runtime=runtime)
    if json_output:
        print_json({"path": path, "certificate": folder, **report.to_json()})
    elif not quiet:
        print_parity(report)
    _fail_unless(report, f"{path} does not compute what {folder} certifies", json_output=json_output)


def _fail_unless(report: ParityReport, failure: str, *, json_output: bool) -> None:
    different = ", ".join(output.name for output in report.outputs if not output.passed)
    if not report:
        _fail(f"{failure}: {different} differs", json_output)


def _fail(message: str, json_output: bool) -> None:
    if json_output:
        typer.echo(f"error: {message}", err=True)  # stdout has its one object already
        raise typer.Exit(ParityError.exit_code)
    raise ParityError(message)

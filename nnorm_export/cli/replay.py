"""``nnorm-export verify --replay``, and the BOM of ``--bom``."""

from __future__ import annotations

from pathlib import Path

import typer

from nnorm_export.cli.metric_options import GateOptions
from nnorm_export.cli.options import OptionalModelOptions, VerifyOptions
from nnorm_export.cli.output import Essential, Output, print_bits, print_parity, shown
from nnorm_export.errors import NnormExportError


def write_bom_if_asked(path: str, certificate: str | Path | None, options: VerifyOptions, *, passed: bool) -> None:
    """Writes the BOM of ``--bom`` for a file that has passed."""
    if options.bom is None or certificate is None or not passed:
        return
    from nnorm_export.parity.certificates.bom import write_bom

    write_bom(path, certificate, options.bom)


def _tolerances(options: VerifyOptions) -> tuple[object, ...]:
    return options.criterion, options.rtol, options.atol, options.statistic, options.where


def replay(
    path: str,
    folder: str,
    model: OptionalModelOptions,
    options: VerifyOptions,
    metric: GateOptions,
    output: Output,
) -> None:
    """Compares ``path`` with the certificate ``folder``, or with the one that a statement or a BOM stands for."""
    from nnorm_export.cli.metrics import given_of

    given = (model.model, model.input_specs, model.decoder, options.float16, options.probes, given_of(metric))
    fixed = (*given, options.record, options.sign_with, options.page)
    if any(fixed) or any(given is not None for given in _tolerances(options)):
        raise NnormExportError(
            "--replay takes model, inputs and tolerances from the certificate and makes no report; leave them out"
        )
    from nnorm_export.parity.certificates.bom_reading import folder_of
    from nnorm_export.parity.certificates.compare_bits import compare_bits
    from nnorm_export.parity.certificates.replay import replay as compare

    with output.working(f"Replaying {folder}"):
        report = compare(
            path, folder, runtime=options.runtime, trust_pickle=model.trust_pickle, public_key=options.public_key
        )
        bits = None
        if options.exact:
            bits = compare_bits(path, against=folder, runtime=options.runtime, trust_pickle=model.trust_pickle)
        passed = bool(report) and (bits is None or bool(bits))
        write_bom_if_asked(path, folder_of(Path(path), Path(folder)), options, passed=passed)
    as_json = {"path": path, "certificate": folder, **report.to_json()}
    as_json |= {"bom": options.bom} if options.bom is not None and passed else {}

    if report.signature == "not checked":
        unchecked = f"{folder} is signed, and the signature was not checked: --public-key PUB.pem checks it"
        output.notices([Essential(unchecked)])

    def print_text() -> None:
        print_parity(report, verbose=output.verbose)
        if bits is not None:
            typer.echo()
            print_bits(bits)
        if options.bom is not None and passed:
            typer.echo(f"wrote {shown(options.bom)}")

    output.show(as_json if bits is None else as_json | {"bits": bits.to_json()}, print_text)
    if report.outputs_pass and not report:
        output.fail(f"{path} fails by the metric of {folder}, {report.reason}")
    if not report:
        output.fail(
            f"{path} does not compute what {folder} certifies: {report.reason}. To find the layer that differs, "
            "run nnorm-export bisect with the model"
        )
    if bits is not None and not bits:
        output.fail(f"{path}: {bits.verdict}")

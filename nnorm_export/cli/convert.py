"""``nnorm-export convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.file_options import ConvertOptions
from nnorm_export.cli.output import Output, counted, print_facts, print_parity, size_text

if TYPE_CHECKING:
    from nnorm_export.converting.change_form import FormReport


def convert(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="A file that nnorm_export wrote.")],
    options: ConvertOptions,
    output: Output,
) -> None:
    """Write an exported file in another form or an older opset, without the model.

    The form primitives has standard operators only, for runtimes that read no
    functions: OpenVINO, OpenCV, tract and others. The form portable also
    repairs files whose functions another tool has dropped or renamed, such as
    onnx.version_converter and onnx.compose. An older opset, from 11 on, is for
    older runtimes; before opset 18 the form is primitives.

    With --keep-io-types the half-precision inputs and outputs of the file
    become float32, with a Cast at each, in the form that the file has.

    The new file is written only if both files agree, on random inputs or on
    those of --input.

    Examples:

      nnorm-export convert net.onnx --form primitives

      nnorm-export convert converted.onnx --form portable -o net.onnx

      nnorm-export convert net.onnx --opset 13

      nnorm-export convert half.onnx --keep-io-types -o served.onnx
    """
    from nnorm_export.cli.arrays import read_inputs_of_file
    from nnorm_export.converting.change_form import change_form
    from nnorm_export.files.inspection import describe

    form = options.form or (None if options.keep_io_types or options.opset is not None else "primitives")
    kind = form or ("float32-io" if options.opset is None else f"opset{options.opset}")
    destination = options.output or str(Path(path).with_suffix(f".{kind}.onnx"))
    with output.working(f"Reading {path}"):
        dtypes = {info.name: info.dtype for info in describe(path).inputs}
        inputs, notices = read_inputs_of_file(options.input_specs or (), dtypes)
    output.notices(notices)
    with output.working(f"Writing {destination}: form, compare"):
        report = change_form(
            path,
            destination,
            form,
            opset_version=options.opset,
            keep_io_types=options.keep_io_types,
            inputs=inputs or None,
            verify=not options.no_verify,
            external_data=options.external_data,
        )
        files = describe(destination).files
    output.show(report.to_json() | {"files": files, "notices": notices}, lambda: _print(report, output.verbose))


def _print(report: FormReport, verbose: bool) -> None:
    print_facts(
        [
            ("file", str(report.path)),
            ("size", size_text(report.size)),
            ("form", f"{report.form}, opset {report.opset}"),
            ("normalizations", counted(report.normalizations)),
            *((name, f"float32, {dtype} inside") for name, dtype in report.kept_io_types.items()),
        ]
    )
    typer.echo()
    print_parity(report.parity, other="the original", verbose=verbose)

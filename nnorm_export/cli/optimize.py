"""``nnorm-export optimize``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli._common import (
    ExternalDataOption,
    InputOption,
    JsonOption,
    NoVerifyOption,
    QuietOption,
    VerboseOption,
    print_facts,
    print_json,
    print_notices,
    print_table,
    size_text,
    working,
)

if TYPE_CHECKING:
    from nnorm_export.files.inspection import ModelDescription
    from nnorm_export.optimizing.optimize import OptimizeReport


def optimize(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="A file in the form portable.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write; by default MODEL.cpu.onnx beside the other.",
            rich_help_panel="File",
        ),
    ] = None,
    input_specs: InputOption = None,
    external_data: ExternalDataOption = None,
    no_verify: NoVerifyOption = False,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Make a file faster on the processors of this machine, and on no others.

    ONNX Runtime's convolutions work on blocks of channels, and it reorders
    every tensor before and after a normalization. The new file holds ONNX
    Runtime's own graph with normalizations that work in blocks too, so that
    most reorders go away. It needs ONNX Runtime with our kernels and a
    processor with blocks of the same size; load() refuses it elsewhere. Keep
    the portable file, and do this on the machine that serves.

    Both files are run and compared before the new one takes its place:
    random inputs do, as they must agree to the last bits.

    Examples:

      nnorm-export optimize net.onnx -o net.cpu.onnx

      nnorm-export optimize net.onnx -i data.npz --json
    """
    from nnorm_export.cli._inputs import read_inputs_of_file
    from nnorm_export.files.inspection import describe
    from nnorm_export.models.arrays import to_numpy
    from nnorm_export.optimizing.optimize import optimize as write

    target = str(Path(path).with_suffix(".cpu.onnx")) if output is None else output
    inputs: Any = None
    notices: list[str] = []
    with working(f"Reading {path}", quiet=quiet):
        infos = describe(path, run=False).inputs
        if input_specs:
            given = read_inputs_of_file(input_specs, infos)
            notices = given.notices
            names = (info.name for info in infos)
            inputs = {name: to_numpy(value) for name, value in zip(names, given.args, strict=False)}
            inputs |= {name: to_numpy(value) for name, value in given.kwargs.items()}
    print_notices(notices, quiet=quiet)
    with working(f"Optimising into {target}: ONNX Runtime's graph, layout, verify", quiet=quiet):
        report = write(path, target, verify=not no_verify, inputs=inputs, external_data=external_data)
        description = describe(target, run=False)
    if json_output:
        print_json(_json(report, description, [*notices, *report.notices]))
    elif not quiet:
        print_notices(report.notices, quiet=quiet)
        _print(report, verbose)


def _json(report: OptimizeReport, description: ModelDescription, notices: list[str]) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "files": description.files,
        "machine": asdict(report.machine),
        "nodes": report.nodes,
        "reorders_before": report.reorders_before,
        "reorders_after": report.reorders_after,
        "layers": [asdict(layer) for layer in report.layers],
        "parity": None if report.parity is None else report.parity.to_json(),
        "notices": notices,
    }


def _print(report: OptimizeReport, verbose: bool) -> None:
    from nnorm_export.cli._parity import print_parity

    facts = [
        ("file", str(report.path)),
        ("size", size_text(report.size)),
        ("for", f"{report.machine}, with ONNX Runtime (this is {report.machine.onnxruntime}) and our kernels"),
        ("nodes", str(report.nodes)),
        ("reorders", f"{report.reorders_after}, where ONNX Runtime alone has {report.reorders_before}"),
        ("normalizations", f"{len(report.in_blocks)} of {len(report.layers)} in blocks"),
        *(("not in blocks", f"{count}: {reason}") for reason, count in report.left.items()),
    ]
    print_facts(facts)
    if verbose:
        typer.echo()
        rows = [(layer.path, layer.op_type, layer.left or "in blocks") for layer in report.layers]
        print_table(("layer", "op", ""), rows)
    typer.echo()
    if report.parity is not None:
        print_parity(report.parity)
    else:
        typer.echo("not compared with the original (--no-verify)")

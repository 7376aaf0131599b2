"""``nnorm-export optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.file_options import OptimizeOptions
from nnorm_export.cli.output import Output, print_facts, print_parity, print_table, size_text

if TYPE_CHECKING:
    from nnorm_export.optimizing.optimize import OptimizeReport
    from nnorm_export.optimizing.speed import Speed


def optimize(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="A file in the form portable or custom.")],
    options: OptimizeOptions,
    output: Output,
) -> None:
    """Make a file faster on the processors of this machine, and on no others.

    ONNX Runtime's convolutions work on blocks of channels, and it reorders
    every tensor before and after a normalization. The new file holds ONNX
    Runtime's own graph with normalizations that work in blocks too, so that
    most reorders go away. It needs ONNX Runtime with the kernels of
    nnorm_export and a processor with blocks of the same size; load() refuses
    it elsewhere. Keep the portable file, and optimize on the machine that
    serves.

    The new file is written only if both files agree. Random inputs suffice
    for that, because the outputs must agree to the last bits. Then both files
    run in turns for a second: the speed is that of this machine with one
    thread, and depends on the batch (--input).

    Examples:

      nnorm-export optimize net.onnx -o net.cpu.onnx

      nnorm-export optimize net.onnx -i data.npz --json
    """
    from nnorm_export.cli.arrays import read_inputs_of_file
    from nnorm_export.files.inspection import describe
    from nnorm_export.optimizing.optimize import optimize as write
    from nnorm_export.optimizing.speed import speed_of

    destination = options.output or str(Path(path).with_suffix(".cpu.onnx"))
    with output.working(f"Reading {path}"):
        dtypes = {info.name: info.dtype for info in describe(path).inputs}
        inputs, notices = read_inputs_of_file(options.input_specs or (), dtypes)
    output.notices(notices)
    with output.working(f"Optimizing into {destination}: ONNX Runtime's graph, layout, verify"):
        report = write(
            path, destination, inputs=inputs or None, verify=not options.no_verify, external_data=options.external_data
        )
        files = describe(destination).files
    output.notices(report.notices)
    speed = None
    if not options.no_verify and (output.json_output or not output.quiet):
        with output.working("Running both files in turns"):
            speed = speed_of(destination, path, inputs or None)
    as_json = report.to_json() | {"files": files, "notices": [*notices, *report.notices]}
    as_json["speed"] = speed and speed.to_json()
    output.show(as_json, lambda: _print(report, speed, output.verbose))


def _print(report: OptimizeReport, speed: Speed | None, verbose: bool) -> None:
    facts = [
        ("file", str(report.path)),
        ("size", size_text(report.size)),
        ("for", f"{report.machine}, with ONNX Runtime (here {report.machine.onnxruntime}) and the kernels"),
        ("nodes", str(report.nodes)),
        ("reorders", f"{report.reorders_after}, where ONNX Runtime alone has {report.reorders_before}"),
        ("normalizations", f"{len(report.in_blocks)} of {len(report.layers)} in blocks"),
        ("speed", "" if speed is None else str(speed)),
        *(("not in blocks", f"{count}: {reason}") for reason, count in report.left.items()),
    ]
    print_facts(facts)
    if verbose:
        typer.echo()
        rows = [(layer.path, layer.op_type, layer.left or "in blocks") for layer in report.layers]
        print_table(("layer", "op", ""), rows)
    typer.echo()
    print_parity(report.parity, other="the original", verbose=verbose)

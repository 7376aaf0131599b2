"""``nnorm-export bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli._common import (
    CheckpointKeyOption,
    CheckpointOption,
    InputOption,
    JsonOption,
    ModelArgOption,
    ModelOption,
    PassthroughOption,
    QuietOption,
    RuntimeOption,
    TrustPickleOption,
    VerboseOption,
    print_facts,
    print_json,
    print_notices,
    print_table,
    working,
)
from nnorm_export.errors import ParityError

if TYPE_CHECKING:
    from nnorm_export.parity.bisection import Bisection


def bisect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="The ONNX file, with its normalizations as nodes.")],
    model: ModelOption,
    model_arg: ModelArgOption = None,
    checkpoint: CheckpointOption = None,
    checkpoint_key: CheckpointKeyOption = None,
    trust_pickle: TrustPickleOption = False,
    passthrough: PassthroughOption = None,
    input_specs: InputOption = None,
    runtime: RuntimeOption = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Another layer to look at, by its path in the model: layer1.0.conv1. Repeatable.",
            rich_help_panel="Comparison",
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Draw the errors of every layer: .png, .svg or .pdf.", rich_help_panel="Output"
        ),
    ] = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Find the first layer at which a runtime leaves PyTorch.

    Every normalization is run twice: in the file, where its input shows the
    error that it inherits, and alone on the input that PyTorch gave it, where
    its output shows its own. Errors are measured as verify measures them, in
    parts of what they may be. The exit code is 1 if anything differs.

    Examples:

      nnorm-export bisect net.onnx -m nets:build -c best.pth -i data.npz

      nnorm-export bisect net.onnx -m nets:build -c best.pth \\
        --runtime reference --layer layer1.0.conv1 --plot errors.png
    """
    from nnorm_export.cli._file_inputs import inputs_of
    from nnorm_export.cli._source import load_source
    from nnorm_export.parity import bisection

    with working("Loading the model", quiet=quiet):
        source = load_source(model, model_arg, checkpoint, checkpoint_key, trust_pickle)
        inputs, notices = inputs_of(source, input_specs, path, runtime)
    print_notices([*source.notices, *notices], quiet=quiet)
    with working(f"Comparing {path} with PyTorch layer by layer", quiet=quiet):
        report = bisection.bisect(
            path, source.module, inputs, runtime=runtime, layers=layer or (), passthrough=passthrough or ()
        )
        if plot is not None:
            from nnorm_export.parity.report.plots import plot_bisection

            plot_bisection(report, Path(plot))
    print_notices(report.notes, quiet=quiet)
    if json_output:
        print_json({"path": path, **report.to_json()})
    elif not quiet:
        _print(report)
    if not report:
        if json_output:
            typer.echo(f"error: {report.verdict}", err=True)
            raise typer.Exit(ParityError.exit_code)
        raise ParityError(report.verdict)


def _print(report: Bisection) -> None:
    from nnorm_export.parity.judgement import share_text

    rows = [
        (
            layer.name,
            layer.op_type,
            layer.implementation or "-",
            share_text(layer.inherited.budget_share),
            "-" if layer.own is None else share_text(layer.own.budget_share),
            "DIFFERENT" if layer.own is not None and not layer.own.passed else "",
        )
        for layer in report.layers
    ]
    rows += [(output.name, "output", "-", share_text(output.budget_share), "-", "") for output in report.outputs]
    print_table(("layer", "node", "ran by", "inherited error", "own error", ""), rows)
    print_facts([("runtime", report.runtime), ("verdict", report.verdict)])

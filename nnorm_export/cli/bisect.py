"""``nnorm-export bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.options import BisectOptions, ModelOptions
from nnorm_export.cli.output import Output, one_line, print_facts, print_table

if TYPE_CHECKING:
    from nnorm_export.parity.bisection import Bisection


def bisect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="The ONNX file, with its normalizations as nodes.")],
    model: ModelOptions,
    options: BisectOptions,
    output: Output,
) -> None:
    """Find the first layer at which a runtime differs from PyTorch.

    Every normalization is run twice: in the file, where its input shows the
    error that it inherits, and alone on the input that PyTorch gave it, where
    its output shows its own. Errors are shares of the error budget of verify.
    The exit code is 1 if anything differs.

    Examples:

      nnorm-export bisect net.onnx -m nets:build -c best.pth -i data.npz

      nnorm-export bisect net.onnx -m nets:build -c best.pth \\
        --runtime reference --layer layer1.0.conv1 --plot errors.png
    """
    from nnorm_export.cli.source import inputs_for, load_source
    from nnorm_export.parity import bisection
    from nnorm_export.parity.report.plots import check_plot, plot_bisection

    if options.plot is not None:
        check_plot(Path(options.plot))  # before the comparison, which may take minutes
    with output.working("Loading the model"):
        source = load_source(model)
        inputs, notices = inputs_for(source, model.input_specs, path, options.runtime)
    output.notices([*source.notices, *notices])
    with output.working(f"Comparing {path} with PyTorch layer by layer"):
        report = bisection.bisect(
            path,
            source.module,
            inputs,
            runtime=options.runtime,
            layers=options.layer or (),
            passthrough=model.passthrough or (),
        )
        if options.plot is not None:
            plot_bisection(report, Path(options.plot))
    output.notices(report.notes)
    output.show({"path": path, **report.to_json()}, lambda: _print(report))
    if not report:
        output.fail(report.verdict)


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
    print_facts([("runtime", report.runtime), ("verdict", one_line(report.verdict))])

"""``nnorm-export bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.options import BisectOptions, OptionalModelOptions, refuse
from nnorm_export.cli.output import Output, one_line, print_bits, print_facts, print_table
from nnorm_export.errors import NnormExportError

if TYPE_CHECKING:
    from nnorm_export.parity.layer_by_layer.bisection import Bisection


def bisect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="The ONNX file, with its normalizations as nodes.")],
    model: OptionalModelOptions,
    options: BisectOptions,
    output: Output,
) -> None:
    """Find the first layer at which a runtime differs from PyTorch.

    Every normalization is run twice: in the file, where the error of its input
    comes from earlier layers, and alone on PyTorch's input, where the error of
    its output is its own. Errors are shares of the error budget of verify. If
    every normalization is right alone, the layers before the first wrong value
    are run alone too. The constants that differ from the model's are listed.
    The exit code is 1 if a layer differs.

    With --exact the bits of two runs are compared instead: on this machine and
    on the machine that recorded a certificate, or in two runtimes. The result
    is the first normalization that computes other bits from equal inputs.

    Examples:

      nnorm-export bisect net.onnx -m nets:build -c best.pth -i data.npz

      nnorm-export bisect net.onnx -m nets:build -c best.pth \\
        --runtime reference --layer layer1.0.conv1 --plot errors.png

      nnorm-export bisect net.onnx --exact net.parity

      nnorm-export bisect net.onnx -i data.npz --exact onnxruntime-cuda
    """
    if options.exact is not None:
        _compare_bits(path, options.exact, model, options, output)
        return
    if not model.model:
        raise NnormExportError("give the model to compare with, --model MODULE:FACTORY, or --exact")
    from nnorm_export.cli.source import by_output, inputs_for, load_source
    from nnorm_export.parity.layer_by_layer.bisect import bisect as find_first_difference
    from nnorm_export.parity.report.plots import check_plot, plot_bisection

    if options.plot is not None:
        check_plot(Path(options.plot))  # before the comparison, which may take minutes
    with output.working("Loading the model"):
        source = load_source(model)
        inputs, notices = inputs_for(source, model, path, options.runtime)
    output.notices([*source.notices, *notices])
    with output.working(f"Comparing {path} with PyTorch layer by layer"):
        report = find_first_difference(
            path,
            source.module,
            inputs,
            runtime=options.runtime,
            layers=options.layer or (),
            where=by_output("--where", options.where, str),
            passthrough=model.passthrough or (),
        )
        if options.plot is not None:
            plot_bisection(report, Path(options.plot))
    output.notices(report.notes)
    output.show({"path": path, **report.to_json()}, lambda: _print(report))
    if not report:
        output.fail(report.verdict)


def _compare_bits(path: str, against: str, model: OptionalModelOptions, options: BisectOptions, output: Output) -> None:
    given = {"--model": model.model, "--decoder": model.decoder, "--layer": options.layer}
    refuse({**given, "--where": options.where, "--plot": options.plot}, "--exact, which compares two runs of the file")
    from nnorm_export.files.inspection import describe
    from nnorm_export.parity.certificates.compare_bits import compare_bits

    inputs = None
    with output.working(f"Running {path} twice"):
        if model.input_specs:
            from nnorm_export.cli.arrays import read_inputs_of_file

            dtypes = {info.name: info.dtype for info in describe(path).inputs}
            inputs, notices = read_inputs_of_file(model.input_specs, dtypes)
            output.notices(notices)
        report = compare_bits(path, inputs, against=against, runtime=options.runtime, trust_pickle=model.trust_pickle)
    output.show({"path": path, **report.to_json()}, lambda: print_bits(report))
    if not report:
        output.fail(f"{path}: {report.verdict}")


def _print(report: Bisection) -> None:
    from nnorm_export.parity.verdict.outcome import share_text

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
    # The verdict on a layer that differs is the error.
    print_facts([("runtime", report.runtime), ("verdict", one_line(report.verdict) if report else "")])

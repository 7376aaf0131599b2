"""``nnorm-export quantize``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.file_options import QuantizeOptions
from nnorm_export.cli.metric_options import Int8MetricOptions
from nnorm_export.cli.options import ReferenceOptions
from nnorm_export.cli.output import (
    Essential,
    Output,
    implementations_text,
    print_facts,
    print_metric,
    print_table,
    size_text,
)

if TYPE_CHECKING:
    from nnorm_export.cli.source import Source
    from nnorm_export.quantizing.accuracy import OutputAccuracy
    from nnorm_export.quantizing.report import QuantizedLayer, QuantizeReport

_RANKED_LAYERS = 10  # that are shown without --verbose


def quantize(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="A float32 file in the form portable or custom.")],
    model: ReferenceOptions,
    options: QuantizeOptions,
    metric: Int8MetricOptions,
    output: Output,
) -> None:
    """Make a file that computes in 8-bit integers, smaller and faster.

    Convolutions, products and the frozen norms between them (BatchNormalNorm
    with its ReLU) compute in int8; norms that compute statistics stay float.
    The ranges of all tensors come from --calibrate: give data as in service,
    prepared as the model takes them.

    The outputs are compared with the float32 file, or with PyTorch if a model
    is given. SQNR is the signal-to-quantization-noise ratio: 40 dB are an
    error of 1 %, 20 dB of 10 %. Below --min-agreement or --min-sqnr no file
    is written and the exit code is 1. Then --rank shows which layers cost
    most, --by-layer where the error grows, and --keep lets layers stay float.
    --metric, top1 for example, is compared on the same data, whose labels are
    --data: no file is written below --min-metric or beyond --within.

    Examples:

      nnorm-export quantize net.onnx --calibrate data.npz

      nnorm-export quantize net.onnx --calibrate images:train.npy \\
        --test images:test.npy --method entropy --min-agreement 0.99

      nnorm-export quantize net.onnx --calibrate data.npz \\
        --test test.npz --metric top1 --data test.npz:y --within 0.5%

      nnorm-export quantize net.onnx --calibrate data.npz --rank --by-layer

      nnorm-export quantize net.onnx --calibrate data.npz --keep head \\
        --keep layer4.1 -o net.int8.onnx

      nnorm-export quantize net.onnx --calibrate data.npz --target tensorrt
    """
    from nnorm_export.cli.arrays import read_inputs_of_file
    from nnorm_export.cli.metrics import metric_arguments
    from nnorm_export.files.inspection import describe
    from nnorm_export.quantizing.quantize import quantize as write

    destination = options.output or str(Path(path).with_suffix(".int8.onnx"))
    with output.working(f"Reading {path}"):
        dtypes = {info.name: info.dtype for info in describe(path).inputs}
        calibration, notices = read_inputs_of_file(options.calibrate, dtypes, "--calibrate")
        test, more = read_inputs_of_file(options.test, dtypes, "--test") if options.test else (None, [])
        source = _source(model) if model.model else None
        labeled = (options.test, "--test") if options.test else (options.calibrate, "--calibrate")
        judged = metric_arguments(metric, *labeled)
    notices = [*(source.notices if source else ()), *notices, *more, *_random(options)]
    output.notices(notices)
    with output.progressing(f"Quantizing {path}") as progress:
        report = write(
            path,
            calibration,
            destination,
            method=options.method,
            percentile=options.percentile,
            activation=options.activation,
            weights=options.weights,
            reduce_range=options.reduce_range,
            keep=options.keep or (),
            target=options.target,
            form=options.form,
            batch_size=options.batch_size,
            test=test,
            model=source.module if source else None,
            passthrough=model.passthrough or (),
            min_agreement=options.min_agreement,
            min_sqnr=options.min_sqnr,
            rank=options.rank,
            by_layer=options.by_layer,
            external_data=options.external_data,
            keep_io_types=options.keep_io_types,
            progress=progress,
            **judged,
        )
    output.notices(report.notices)
    as_json = report.to_json() | {"files": describe(destination).files, "notices": [*notices, *report.notices]}
    output.show(as_json, lambda: _print(report, output.verbose))


def _source(model: ReferenceOptions) -> Source:
    from nnorm_export.cli.source import load_source  # needs PyTorch

    return load_source(model)


def _random(options: QuantizeOptions) -> list[str]:
    random = [spec for spec in options.calibrate if ".np" not in spec.lower()]
    return [Essential(f"--calibrate {spec}: random data, whose ranges are not those of real inputs") for spec in random]


def _print(report: QuantizeReport, verbose: bool) -> None:
    norms = implementations_text(report.implementations)
    kept: dict[str, int] = {}
    for layer in report.layers:
        if layer.kept:
            kept[layer.kept] = kept.get(layer.kept, 0) + 1
    print_facts(
        [
            ("file", str(report.path)),
            ("size", f"{size_text(report.size)}, in float32 {size_text(report.float_size)}"),
            ("calibrated", f"{_calibration(report)}; {report.activation}, {_weights(report)}"),
            ("int8", f"{len(report.quantized)} of {len(report.layers)} layers"),
            *(("float", f"{count}: {why}") for why, count in kept.items()),
            ("normalizations", norms),
        ]
    )
    ranked = [layer for layer in report.layers if layer.gain is not None]
    has_ratios = any(layer.sqnr is not None for layer in report.layers)
    shown = report.layers if verbose or has_ratios else ranked[:_RANKED_LAYERS]
    if shown:
        headings = ("layer", "op", "gain in float", *(("SQNR",) if has_ratios else ()))
        print_table(headings, (_row(layer)[: len(headings)] for layer in shown), apart=True)
    rows = [
        (
            each.name,
            _sqnr_text(each),
            "-" if each.top1_agreement is None else f"{each.top1_agreement:.2%}",
            str(each.rows),
        )
        for each in report.outputs
    ]
    print_table(("output", "SQNR", "top-1", "rows"), rows, numbers=True, apart=True)
    if report.metric is not None:
        print_metric(report.metric)
    print_facts([("compared with", f"{report.reference} on the {report.compared} data")])


def _calibration(report: QuantizeReport) -> str:
    return (
        "in each call, without calibration"
        if report.method == "dynamic"
        else f"{report.samples} samples, {report.method}"
    )


def _weights(report: QuantizeReport) -> str:
    return f"weights {report.weights}{' of 7 bits' if report.reduce_range else ''}"


def _sqnr_text(output: OutputAccuracy) -> str:
    if not output.compared:
        return "of another shape"
    return "equal" if math.isinf(output.sqnr) else f"{output.sqnr:.1f} dB"


def _row(layer: QuantizedLayer) -> tuple[str, str, str, str]:
    gain = "-" if layer.gain is None else f"{layer.gain:+.1f} dB"
    sqnr = "-" if layer.sqnr is None else f"{layer.sqnr:.1f} dB"
    return layer.path, layer.op_types, f"float: {layer.kept}" if layer.kept else gain, sqnr

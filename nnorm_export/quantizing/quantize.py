"""quantize(): a file whose convolutions, products and frozen norms compute in int8."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, ParityError
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.staging import check_output, save, staged, writing
from nnorm_export.files.tensors import inputs_of
from nnorm_export.metrics.asked import gate_of
from nnorm_export.metrics.functions import Metric
from nnorm_export.metrics.gate import MetricReport
from nnorm_export.names import listed
from nnorm_export.quantizing.accuracy import OutputAccuracy, shortfalls, sqnr_of
from nnorm_export.quantizing.by_layer import sqnr_by_layer
from nnorm_export.quantizing.calibration import DYNAMIC, Progress, no_progress
from nnorm_export.quantizing.calibration_data import Data, batches_of
from nnorm_export.quantizing.judging import judged
from nnorm_export.quantizing.layers import layers_of, with_norms
from nnorm_export.quantizing.measure import Calibrated, measure
from nnorm_export.quantizing.qdq import PRODUCTS, Settings
from nnorm_export.quantizing.reference import Reference, reference_of, refuse_constant
from nnorm_export.quantizing.refusals import check_options, refuse, refuse_dynamic
from nnorm_export.quantizing.report import QuantizeReport, layers_found
from nnorm_export.quantizing.request import Request
from nnorm_export.quantizing.schemes import DEFAULT_TARGET, chosen, scheme_of
from nnorm_export.runtimes import Runner, load
from nnorm_export.runtimes.onnxruntime.overflow import overflow_of
from nnorm_export.runtimes.onnxruntime.session import import_onnxruntime

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.reference.pytorch_model import Passthrough

_Judge: TypeAlias = Callable[[Runner, Sequence[Sequence[Array]]], MetricReport | None]

_FEW_SAMPLES = 32
_RANKED_BATCHES = 4


def quantize(
    path: str | Path,
    calibration: Data,
    output: str | Path,
    *,
    method: str = "minmax",
    percentile: float = 99.999,
    activation: str | None = None,
    weights: str = "per-channel",
    reduce_range: bool | None = None,
    keep: Iterable[str] = (),
    target: str = DEFAULT_TARGET,
    form: str | None = None,
    batch_size: int = 32,
    test: Data | None = None,
    model: nn.Module | None = None,
    passthrough: Passthrough = (),
    min_agreement: float | None = None,
    min_sqnr: float | None = 0.0,
    rank: bool = False,
    by_layer: bool = False,
    external_data: bool | None = None,
    keep_io_types: bool = False,
    progress: Progress | None = None,
    metric: Metric | None = None,
    reference: Any = None,
    min_metric: float | str | None = None,
    within: float | str | None = None,
    lower_is_better: bool | None = None,
) -> QuantizeReport:
    """Writes a version of a file whose convolutions, matrix products and frozen norms compute in 8-bit integers.

    A tensor x is stored as q = round(x / scale) + zero_point, with a scale and a zero point that ONNX Runtime's
    calibrators choose from the values on ``calibration``. ONNX Runtime's quantizer writes QuantizeLinear and
    DequantizeLinear around convolutions, products and what lies between them. A BatchNormalNorm between two quantized
    tensors, with its ReLU, ReLU6, hard swish or SiLU, then becomes one node ``QuantizedBatchNormalNorm…``: the kernel
    is a table of 256 entries for each channel. A residual sum of maps follows it as ONNX Runtime's own. Norms that
    compute statistics (LayerNormalNorm, GroupNormalNorm) stay float.

    For TensorRT and OpenVINO (``target``) only what products read is quantized, with zero points of 0. They compute
    norms in float, TensorRT in the kernel of the product before the norm.

    The file is in the same format as ``path``: :func:`nnorm_export.load` opens it, with kernels or without.

    >>> report = nnorm_export.quantize("model.onnx", images, "model.int8.onnx")
    >>> (logits,) = nnorm_export.load(report.path)(images.numpy())

    Args:
        path: a float32 file in the form ``portable`` or ``custom``. An ONNX file of another writer is quantized too.
        calibration: inputs as the network meets them in service, a few hundred samples: the inputs of the file, by
            position or by name, with the samples in the first axis; or an iterable of such batches.
        output: the file to write.
        method: how the range of a tensor is found. ``minmax``: its least and greatest value; ``percentile``: without
            the rarest values; ``entropy``: the range that loses least information; ``dynamic``: in each call, for
            products of matrices alone, as transformers have them. Nothing is calibrated then, and ``calibration`` are
            the data that the outputs are compared on. It is for ONNX Runtime.
        percentile: the percentage of the values that the range of ``percentile`` holds.
        activation: ``uint8``, the default for ONNX Runtime and the fastest on x86, or ``int8``.
        weights: a scale for each output channel of a weight (``per-channel``), or one for all (``per-tensor``). Weights
            are int8.
        reduce_range: 7 bits for the weights and, for OpenVINO, for the second factors of attention. By default yes for
            ONNX Runtime and OpenVINO, which add products of 8 bits in 16 bits on x86 processors without VNNI, so that
            sums overflow: a ResNet18 falls from 20 to 11 dB there. False is for processors with VNNI and for Arm, and
            gains about 1 dB on them.
        keep: the layers that stay float, by their paths in the model, or nodes by their names. A path of a module
            stands for all layers in it. The frozen norm after a convolution or a product that is kept stays float too.
        target: the runtime that the file is for: ``onnxruntime``, ``tensorrt`` or ``openvino``. ONNX Runtime compares
            the outputs here; those of the other two without its int8 kernels, which round at other places.
        form: as for :func:`nnorm_export.export`; by default the first that the target reads. ``primitives`` has no
            tables: the norms compute in float between DequantizeLinear and QuantizeLinear.
        batch_size: how many samples are run at a time, if the batch of the file is dynamic.
        test: other data to compare the outputs on; by default ``calibration``.
        model: the PyTorch model to compare with; by default ``path`` is the reference. Its ``forward`` takes the inputs
            in the order of the file.
        passthrough: as for :func:`nnorm_export.verify`.
        min_agreement: the least share of rows, from 0 to 1, with the same greatest entry in each output that is a
            matrix.
        min_sqnr: the least signal-to-quantization-noise ratio of each output in decibels. 0, the default, is an error
            as great as the output itself; None accepts any.
        rank: measure by how much the SQNR rises if one convolution or product alone stays float, for each of them.
        by_layer: measure the SQNR of each layer's output, on the first batch of the test data. All outputs are in
            memory at once, those in float32 too.
        external_data: as for :func:`nnorm_export.export`.
        keep_io_types: changes nothing, because an int8 file has the float32 inputs and outputs of ``path``. It is there
            for scripts that give it for files of every dtype.
        progress: called with what is done at present, and the part of it that is done.
        metric, reference, within, lower_is_better: as for :meth:`nnorm_export.metrics.gate.Gate.of`. The metric is that
            of the int8 file, and of the outputs that it is compared with, on the same data, whose labels are
            ``reference``; or over the loader ``reference``.
        min_metric: the worst value of the int8 file: the least or, of a metric that is better when lower, the greatest.

    Raises:
        ModelFileError: ``path`` is not an ONNX file, is not float32, is quantized already or optimized for one machine,
            or has nothing that can be quantized.
        InputError: the data do not fit the file, a name in ``keep`` is unknown, no output depends on the data, or the
            labels do not fit the data.
        ParityError: an output is below ``min_agreement`` or ``min_sqnr``, or the metric is below ``min_metric`` or
            loses more than ``within``.
        RuntimeMissingError: ONNX Runtime is not installed.
        ExportError: an option is unknown, the target does not take it, or ``output`` cannot be written.
        After an error ``output`` is unchanged.
    """
    check_options(weights, method, percentile, batch_size, min_agreement)
    gate = gate_of(
        metric, reference, at_least=min_metric, within=within, lower_is_better=lower_is_better, least="min_metric"
    )
    scheme = scheme_of(target)
    form, activation = chosen(scheme, "form", form), chosen(scheme, "activation", activation)
    refuse_dynamic(method, scheme, activation)
    reduced = scheme.reduce_range if reduce_range is None else reduce_range
    import_onnxruntime()
    request = Request(
        source=read(Path(path).expanduser()),
        output=Path(output).expanduser(),
        scheme=scheme,
        settings=Settings(activation, weights, reduced, scheme.products_alone, dynamic=method == DYNAMIC),
        form=form,
        method=method,
        percentile=percentile,
        keep=listed(keep, "keep", InputError),
        min_agreement=min_agreement,
        min_sqnr=min_sqnr,
        external_data=external_data,
        progress=progress or no_progress,
    )
    source = request.source
    check_output(request.output)
    refuse(source, request.output, weights)
    infos = inputs_of(source.proto)
    feeds = batches_of(calibration, infos, batch_size, "calibration")
    tests = feeds if test is None else batches_of(test, infos, batch_size, "test")
    data = "calibration" if test is None else "test"
    expected = reference_of(source, data, tests, model, passthrough)  # first: ONNX Runtime refuses a damaged file
    if min_sqnr is not None:
        refuse_constant(expected)

    def judge(runner: Runner, actual: Sequence[Sequence[Array]]) -> MetricReport | None:
        return None if gate is None else judged(gate, runner, actual, expected)

    with tempfile.TemporaryDirectory() as folder:
        calibrated = measure(request, feeds, Path(folder))
        return _write(calibrated, expected, judge, rank=rank, by_layer=by_layer)


def _write(
    calibrated: Calibrated, reference: Reference, judge: _Judge, *, rank: bool, by_layer: bool
) -> QuantizeReport:
    """Writes the file if its outputs are near those of ``reference``, and ``judge`` finds that its metric passes."""
    request, graph = calibrated.request, calibrated.graph
    settings, config = request.settings, request.scheme.session_config
    request.progress("quantizing", 0.0)
    model, tables = calibrated.quantized(calibrated.names)
    with staged(request.output) as staging:
        with writing(request.output):
            save(model, staging, request.external_data)
        runner = load(staging, "onnxruntime", session_config=config)
        actual = reference.run(runner, request.progress)
        outputs, metric = reference.accuracy(runner, actual), judge(runner, actual)
        gains = _rank(calibrated, reference, runner) if rank else {}
        _refuse_shortfalls(request, outputs, metric, gains)
        ratios = sqnr_by_layer(graph.path, staging, graph.outputs, reference.feeds[0], config) if by_layer else {}
        return QuantizeReport(
            path=request.output,
            size=sum(each.stat().st_size for each in staging.parent.iterdir()),
            float_size=_size(request.source),
            method=request.method,
            activation=settings.activation,
            weights=settings.weights,
            reduce_range=settings.reduce_range,
            samples=calibrated.samples,
            layers=layers_found(calibrated, tables, gains, ratios),
            reference=reference.source,
            compared=reference.data,
            outputs=outputs,
            implementations=runner.implementations,
            notices=_notices(request, calibrated.samples, staging),
            metric=metric,
        )


def _rank(calibrated: Calibrated, reference: Reference, runner: Runner) -> dict[str, float]:
    """Path of a layer with a product -> the decibels by which the least SQNR rises if it alone stays float.

    Args:
        runner: runs the file in which all of ``calibrated.names`` are in int8.
    """
    proto, names, reference = calibrated.graph.proto, calibrated.names, reference.first(_RANKED_BATCHES)
    products = {node.name for node in proto.graph.node if node.op_type in PRODUCTS}
    layers = {path: nodes for path, nodes in layers_of(proto, names).items() if not products.isdisjoint(nodes)}
    basis = sqnr_of(reference.compare(runner))
    gains = {}
    for done, (path, nodes) in enumerate(layers.items()):
        calibrated.request.progress("ranking", done / len(layers))
        alone = with_norms(proto, nodes)
        other = calibrated.runner([name for name in names if name not in alone])
        gains[path] = sqnr_of(reference.compare(other)) - basis
    return gains


def _refuse_shortfalls(
    request: Request, outputs: Sequence[OutputAccuracy], metric: MetricReport | None, gains: dict[str, float]
) -> None:
    if request.min_agreement is not None and all(output.top1_agreement is None for output in outputs):
        raise InputError(
            "min_agreement: no output is a matrix of scores, whose greatest entries could agree; set min_sqnr instead"
        )
    of_metric = [] if metric is None or metric else [metric.reason]
    if wrong := [*shortfalls(outputs, request.min_agreement, request.min_sqnr), *of_metric]:
        raise ParityError(f"{request.output} was not written: {'; '.join(wrong)}", _advice(request.method, gains))


def _advice(method: str, gains: dict[str, float]) -> str:
    other = "entropy" if method != "entropy" else "percentile"
    best = sorted(gains, key=lambda path: gains[path], reverse=True)[:3]
    kept = " and ".join(f"{path} ({gains[path]:+.1f} dB)" for path in best)
    keep = f"of which {kept} gain most" if kept else "which rank=True (--rank) puts in order"
    return (
        f"Calibrate on more samples or by another method ({other} for example), or let layers stay float (keep, "
        f"--keep), {keep}. Lower thresholds (--min-agreement, --min-sqnr, --min-metric, --within) write the file "
        "nevertheless"
    )


def _notices(request: Request, samples: int, staging: Path) -> list[str]:
    """What a user should know besides the numbers of the file, which lies at ``staging``."""
    source, notices = request.source, []
    if source.form == "primitives" and source.layers:
        notices.append(
            f"the {len(source.layers)} normalizations of {source.path} are inlined, and stay float: quantize the "
            "portable file, where each becomes one int8 node"
        )
    if samples < _FEW_SAMPLES and not request.settings.dynamic:
        notices.append(f"calibrated on {samples} samples: a few hundred give better ranges")
    if not request.scheme.products_alone and (overflow := overflow_of(read(staging, large_weights=False))):
        notices.append(overflow)
    return notices


def _size(source: ModelFile) -> int:
    files = [source.path, *(source.path.parent / name for name in source.external_data)]
    return sum(file.stat().st_size for file in files)

"""quantize(): a file whose convolutions, products and frozen norms compute in int8."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from nnorm_export._version import __version__
from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, ParityError
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.staging import check_output, save, staged, writing
from nnorm_export.files.tensors import inputs_of, outputs_of
from nnorm_export.graphs.forms import apply_form
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, METADATA_PREFIX, listed
from nnorm_export.quantizing.accuracy import OutputAgreement, agreements, shortfalls, sqnr_of
from nnorm_export.quantizing.activations import ACTIVATIONS, join_activations
from nnorm_export.quantizing.by_layer import sqnr_by_layer
from nnorm_export.quantizing.calibration import Progress, ranges_of
from nnorm_export.quantizing.calibration_data import Data, Feed, batches_of, count_of
from nnorm_export.quantizing.float_graph import ASKED_FOR, FloatGraph
from nnorm_export.quantizing.layers import kept_nodes, layers_of, with_norms
from nnorm_export.quantizing.qdq import (
    NORMS,
    PRODUCTS,
    Settings,
)
from nnorm_export.quantizing.refusals import check_options, refuse
from nnorm_export.quantizing.report import QuantizedLayer, QuantizeReport, layers_found
from nnorm_export.quantizing.schemes import DEFAULT_TARGET, Target, chosen, target_named
from nnorm_export.quantizing.suitable import unsuitable, without_range
from nnorm_export.runtimes import Runner, load
from nnorm_export.runtimes.onnxruntime.overflow import overflow_of
from nnorm_export.runtimes.onnxruntime.session import import_onnxruntime

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.reference.pytorch_model import Passthrough

_RANKED_BATCHES = 4


def quantize(
    path: str | Path,
    calibration: Data,
    f: str | Path,
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
    progress: Progress | None = None,
) -> QuantizeReport:
    """Writes a version of a file whose convolutions, products and frozen norms compute in 8-bit integers.

    A tensor x is stored as q = round(x / scale) + zero_point, with a scale and a zero point that ONNX Runtime's
    calibrators choose from the values on ``calibration``. ONNX Runtime's quantizer writes QuantizeLinear and
    DequantizeLinear around convolutions, products and what lies between them. A BatchNormalNorm between two quantized
    tensors, with its ReLU, ReLU6, hard swish or SiLU, then becomes one node ``QuantizedBatchNormalNorm…``: the kernel
    is a table of 256 entries for each channel. A residual sum of maps follows it as ONNX Runtime's own. Norms that
    compute statistics (LayerNormalNorm, GroupNormalNorm) stay float.

    For TensorRT and OpenVINO (``target``) only what products read is quantized, with zero points of 0. They compute
    norms in float, TensorRT in the kernel of the product before the norm.

    The file is in the same format as ``path``: :func:`nnorm_export.load` opens it, with kernels or without.

    Args:
        path: a float32 file in the form ``portable`` or ``custom``. An ONNX file of another writer is quantized too.
        calibration: inputs as the network meets them in service, a few hundred samples: the inputs of the file, by
            position or by name, with the samples in the first axis; or an iterable of such batches.
        f: the file to write.
        method: how the range of a tensor is found. ``minmax``: its least and greatest value; ``percentile``: without
            the rarest values; ``entropy``: the range that loses least information.
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
        progress: called with what is done at present, and the part of it that is done.

    Raises:
        ModelFileError: ``path`` is not an ONNX file, is not float32, is quantized already or optimized for one machine,
            or has nothing that can be quantized.
        InputError: the data do not fit the file, or a name in ``keep`` is unknown.
        ParityError: an output is below ``min_agreement`` or ``min_sqnr``.
        RuntimeMissingError: ONNX Runtime is not installed.
        ExportError: an option is unknown, the target does not take it, or ``f`` cannot be written.
        After an error ``f`` is unchanged.
    """
    check_options(weights, method, percentile, batch_size, min_agreement)
    row = target_named(target)
    form, activation = chosen(row, "form", form), chosen(row, "activation", activation)
    reduced = row.reduce_range if reduce_range is None else reduce_range
    settings = Settings(activation, weights, reduced, row.products_alone)
    has_tables = form != "primitives" and not row.products_alone
    import_onnxruntime()
    source, written = read(Path(path).expanduser()), Path(f).expanduser()
    check_output(written)
    refuse(source, written, weights)
    report = progress or _silent
    infos = inputs_of(source.proto)
    feeds = batches_of(calibration, infos, batch_size, "calibration")
    tests = feeds if test is None else batches_of(test, infos, batch_size, "test")
    reference = _expected(source, tests, model, passthrough)  # first, because ONNX Runtime refuses a damaged file
    with tempfile.TemporaryDirectory() as folder:
        graph = FloatGraph(source, Path(folder), with_tables=has_tables)
        floats = dict.fromkeys(kept_nodes(graph.proto, listed(keep, "keep", InputError)), ASKED_FOR)
        if has_tables:
            join_activations(graph.proto, set(floats))
        floats = unsuitable(graph.proto, settings) | floats
        graph.names(settings, floats)  # before the calibration, which takes long
        ranges = ranges_of(graph.path, (*settings.op_types, *ACTIVATIONS), feeds, method, percentile, report)
        floats = without_range(graph.proto, ranges) | floats
        names = graph.names(settings, floats)
        report("quantizing", 0.0)
        made, tables = graph.quantized(ranges, names, settings)
        about = f"{settings}, {method} on {count_of(feeds)} samples"
        _note(made, source, about, form)
        with staged(written) as staging:
            with writing(written):
                save(made, staging, external_data)
            runner = load(staging, "onnxruntime", session_config=row.session_config)
            outputs = _compared(runner, tests, reference, report)
            gains: dict[str, float] = {}
            if rank:

                def quantized(nodes: Sequence[str]) -> Runner:
                    other, _ = graph.quantized(ranges, nodes, settings)
                    _note(other, source, about, form)
                    save(other, Path(folder) / "ranked.onnx", None)
                    return load(Path(folder) / "ranked.onnx", "onnxruntime", session_config=row.session_config)

                gains = _gains(quantized, graph.proto, names, runner, list(zip(tests, reference, strict=True)), report)
            if wrong := shortfalls(outputs, _asked(min_agreement, outputs), min_sqnr):
                raise ParityError(f"{written} was not written: {'; '.join(wrong)}", _advice(method, gains))
            ratios = sqnr_by_layer(
                graph.path,
                staging,
                _outputs_of(graph.proto, graph.layers) if by_layer else {},
                tests[0],
                row.session_config,
            )
            implementations = runner.implementations
            overflow = "" if row.products_alone else overflow_of(read(staging, large_weights=False))
            size = sum(each.stat().st_size for each in staging.parent.iterdir())
    found = layers_found(graph.layers, graph.proto, floats, tables, gains, ratios, _why_float(row, form))
    return QuantizeReport(
        written,
        size,
        _size(source),
        method,
        activation,
        weights,
        reduced,
        count_of(feeds),
        found,
        "the float32 file" if model is None else "PyTorch",
        "calibration" if test is None else "test",
        outputs,
        implementations,
        [*_notices(source, found, count_of(feeds)), *filter(None, [overflow])],
    )


def _note(model: ir.Model, source: ModelFile, about: str, form: str) -> None:
    """Gives ``model`` its bodies, and writes into its metadata what it is."""
    if any(node.domain == DOMAIN for node in model.graph):
        model.opset_imports[DOMAIN] = DOMAIN_VERSION
        apply_form(model, form)
    model.producer_name, model.producer_version = "nnorm_export", __version__
    op_types_by_node = {node.name: node.op_type for node in model.graph}
    entries = {"version": __version__, "quantization": about}
    if source.normalizations:
        entries["form"] = form
    if "layers" in source.metadata:
        noted = [{**entry, "op_type": op_types_by_node.get(entry["node"], entry["op_type"])} for entry in source.layers]
        entries["layers"] = json.dumps(noted)
    model.metadata_props.update({METADATA_PREFIX + key: value for key, value in entries.items()})


def _expected(
    source: ModelFile, feeds: Sequence[Feed], model: nn.Module | None, passthrough: Passthrough
) -> list[list[Array]]:
    """The outputs of the reference on each batch."""
    if model is None:
        runner = load(source.path, "onnxruntime")
        return [runner(**feed) for feed in feeds]
    from nnorm_export.parity.reference.pytorch_model import outputs_in_float32  # noqa: PLC0415 - needs PyTorch

    results = outputs_in_float32(model, [list(feed.values()) for feed in feeds], passthrough)
    names = [info.name for info in outputs_of(source.proto)]
    if len(results[0]) != len(names):
        raise InputError(
            f"{type(model).__name__} returns {len(results[0])} tensors, {source.path} returns {len(names)} "
            f"({', '.join(names)}): give the model that the file was made from"
        )
    for info, found in zip(outputs_of(source.proto), results[0], strict=True):
        if not info.fits(found.shape):
            raise InputError(
                f"{type(model).__name__} returns {info.name} of shape {list(found.shape)}, {source.path} returns "
                f"{info}: give the model that the file was made from"
            )
    return results


def _compared(
    runner: Runner, feeds: Sequence[Feed], expected: Sequence[Sequence[Array]], report: Callable[[str, float], None]
) -> list[OutputAgreement]:
    actual = []
    for done, feed in enumerate(feeds):
        report("comparing", done / len(feeds))
        actual.append(runner(**feed))
    outputs = agreements(runner.outputs, actual, expected)
    if not any(output.compared for output in outputs):
        raise InputError(
            "no output can be compared with the reference, because their shapes differ; give other data, or let the "
            "file return what these outputs are computed from"
        )
    return outputs


def _asked(min_agreement: float | None, outputs: Sequence[OutputAgreement]) -> float | None:
    if min_agreement is not None and all(output.top1_agreement is None for output in outputs):
        raise InputError(
            "min_agreement: no output is a matrix of scores, whose greatest entries could agree; set min_sqnr instead"
        )
    return min_agreement


def _gains(
    quantized: Callable[[Sequence[str]], Runner],
    proto: onnx.ModelProto,
    names: Sequence[str],
    runner: Runner,
    tests: Sequence[tuple[Feed, Sequence[Array]]],
    report: Progress,
) -> dict[str, float]:
    """Path of a layer with a product -> by how much the least SQNR rises if it alone stays float.

    Args:
        quantized: opens a file in which the given nodes are quantized.
        names: the nodes that are quantized in the file of ``runner``.
        tests: the inputs and the outputs of the reference, batch by batch.
    """
    feeds, expected = zip(*tests[:_RANKED_BATCHES], strict=True)
    products = {node.name for node in proto.graph.node if node.op_type in PRODUCTS}
    ranked = {path: nodes for path, nodes in layers_of(proto, names).items() if not products.isdisjoint(nodes)}
    basis = sqnr_of(_compared(runner, feeds, expected, _silent))
    gains = {}
    for done, (path, nodes) in enumerate(ranked.items()):
        report("ranking", done / len(ranked))
        alone = with_norms(proto, nodes)
        other = quantized([name for name in names if name not in alone])
        gains[path] = sqnr_of(_compared(other, feeds, expected, _silent)) - basis
    return gains


def _silent(phase: str, done: float) -> None:
    """Reports no progress."""


def _advice(method: str, gains: dict[str, float]) -> str:
    other = "entropy" if method != "entropy" else "percentile"
    best = sorted(gains, key=lambda path: gains[path], reverse=True)[:3]
    kept = " and ".join(f"{path} ({gains[path]:+.1f} dB)" for path in best)
    keep = f"of which {kept} gain most" if kept else "which rank=True (--rank) puts in order"
    return (
        f"Calibrate on more samples or by another method ({other} for example), or let layers stay float (keep, "
        f"--keep), {keep}. Lower thresholds (--min-agreement, --min-sqnr) write the file nevertheless"
    )


def _outputs_of(proto: onnx.ModelProto, layers: dict[str, list[str]]) -> dict[str, str]:
    """Path of a layer -> the tensor that its last node computes; norms that stay float are layers too."""
    made = {node.name: node.output[0] for node in proto.graph.node}
    floats = {
        node.name: node.output[0] for node in proto.graph.node if node.domain == DOMAIN and node.op_type not in NORMS
    }
    return {path: made[names[-1]] for path, names in layers.items()} | floats


def _why_float(target: Target, form: str) -> str:
    """Why a frozen norm computes in float, unless the user asked for it."""
    if target.products_alone:
        return f"{target.title} computes norms in float"
    return "the form primitives has no tables" if form == "primitives" else "its input or output is not quantized"


def _notices(source: ModelFile, layers: Sequence[QuantizedLayer], samples: int) -> list[str]:
    notices = []
    if source.form == "primitives" and source.layers:
        notices.append(
            f"the {len(source.layers)} normalizations of {source.path} are inlined, and stay float: quantize the "
            "portable file, where each becomes one int8 node"
        )
    if samples < _FEW_SAMPLES:
        notices.append(f"calibrated on {samples} samples: a few hundred give better ranges")
    return notices


_FEW_SAMPLES = 32


def _size(source: ModelFile) -> int:
    files = [source.path, *(source.path.parent / name for name in source.external_data)]
    return sum(file.stat().st_size for file in files)

"""The nodes that stay float, and why: the quantizer or 8 bits would change what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.files.onnx_file import with_nested
from nnorm_export.quantizing.preparation import beta_of
from nnorm_export.quantizing.qdq import MOVING, ON_MAPS, PRODUCTS, Settings

_REMOVED_BY_QUANTIZER = ("Relu", "Clip")  # the range of their output clips as they do
_BETWEEN_SOFTMAX_AND_PRODUCT = (*MOVING, "Dropout", "Cast", "Where", "Identity")


def unsuitable(proto: onnx.ModelProto, settings: Settings) -> dict[str, str]:
    """Name of a node that must not be quantized -> why."""
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    inner = [within for node in graph.node for within in list(with_nested([node]))[1:]]
    read_inside = {name for node in inner for name in node.input}
    scores = _before_softmax(graph)
    bounds = _constants(graph)
    found = {}
    for node in graph.node:
        if node.domain != "":
            continue
        if node.op_type == "ConvTranspose" and not settings.products_alone:
            found[node.name] = "ONNX Runtime has no int8 kernel for ConvTranspose"
        elif beta_of(node) != 1:
            found[node.name] = "its bias is computed, and has a factor (beta)"
        elif node.op_type == "Clip" and not _holds_zero(node, bounds):
            found[node.name] = "its range leaves out 0, which a scale and a zero point cannot"
        elif node.op_type in MOVING and node.input[0] in constants:
            found[node.name] = "its input is a constant"
        elif node.op_type in _REMOVED_BY_QUANTIZER and node.input[0] in read_inside:
            found[node.name] = "a branch or a loop reads its input too"
        elif node.op_type in ON_MAPS and node.name in scores:
            found[node.name] = "it computes the scores of an attention, to which a mask may be added"
    return found


def without_range(proto: onnx.ModelProto, ranges: Any) -> dict[str, str]:
    """Name of a node that reads or computes infinite numbers on the calibration data -> that."""
    infinite = {
        name
        for name, data in ranges.items()
        if not (np.isfinite(data.lowest).all() and np.isfinite(data.highest).all())
    }
    weights = {
        tensor.name
        for tensor in proto.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and not np.isfinite(numpy_helper.to_array(tensor)).all()
    }
    return {
        node.name: "it reads or computes infinite numbers, which 8 bits cannot hold"
        for node in proto.graph.node
        if not (infinite | weights).isdisjoint((*node.input, *node.output))
    }


def _before_softmax(graph: onnx.GraphProto) -> set[str]:
    """The names of the nodes whose numbers reach the Softmax of an attention without a product or a norm between."""
    makers = {name: node for node in graph.node for name in node.output}
    found: set[str] = set()
    waiting = [
        node for node in graph.node if node.domain == "" and node.op_type == "Softmax" and _is_attention(graph, node)
    ]
    while waiting:
        node = waiting.pop()
        for maker in (makers[name] for name in node.input if name in makers):
            if maker.name not in found and maker.domain == "" and maker.op_type not in PRODUCTS:
                found.add(maker.name)
                waiting.append(maker)
    return found


def _is_attention(graph: onnx.GraphProto, softmax: onnx.NodeProto) -> bool:
    """Whether a product of matrices reads the probabilities of ``softmax``."""
    reached, waiting = {softmax.output[0]}, [softmax.output[0]]
    while waiting:
        name = waiting.pop()
        for node in graph.node:
            if name not in node.input:
                continue
            if node.op_type in ("MatMul", "Einsum"):
                return True
            if node.op_type in _BETWEEN_SOFTMAX_AND_PRODUCT and node.output[0] not in reached:
                reached.add(node.output[0])
                waiting.append(node.output[0])
    return False


def _holds_zero(clip: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> bool:
    least, greatest = -np.inf, np.inf
    for attribute in clip.attribute:  # before opset 11
        least = attribute.f if attribute.name == "min" else least
        greatest = attribute.f if attribute.name == "max" else greatest
    given = [constants.get(name) if name else name for name in clip.input[1:3]]
    if None in given:
        return False  # it is computed
    bounds = [float(numpy_helper.to_array(bound)) if bound else None for bound in given]
    least = bounds[0] if bounds and bounds[0] is not None else least
    greatest = bounds[1] if len(bounds) > 1 and bounds[1] is not None else greatest
    return bool(least <= 0 <= greatest)


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The constants of one element, as ``Clip`` reads them."""
    found = {tensor.name: tensor for tensor in graph.initializer if not tensor.dims}
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                number = numpy_helper.from_array(np.array(attribute.f, np.float32))
                found[node.output[0]] = attribute.t if attribute.name == "value" else number
    return found

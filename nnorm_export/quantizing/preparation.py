"""What ONNX Runtime's quantizer takes for granted of a graph, made true: it computes other numbers where it is not."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.quantizing.qdq import PRODUCTS


def prepare(proto: onnx.ModelProto) -> None:
    """Edits ``proto``, which computes the same afterwards."""
    _multiply_biases(proto)
    _separate_constants(proto)


def _multiply_biases(proto: onnx.ModelProto) -> None:
    """Takes the factor β of α·A·B + β·C into C: the quantizer adds C as it is."""
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        beta = beta_of(node)
        if beta == 1 or node.input[2] not in constants:
            continue
        bias = numpy_helper.to_array(constants[node.input[2]])
        name = f"{node.name}/bias"
        proto.graph.initializer.append(numpy_helper.from_array((bias * np.float32(beta)).astype(bias.dtype), name))
        node.input[2] = name
        kept = [attribute for attribute in node.attribute if attribute.name != "beta"]
        del node.attribute[:]
        node.attribute.extend(kept)


def beta_of(node: onnx.NodeProto) -> float:
    """The factor of the bias; 1 for a node without one."""
    if node.domain != "" or node.op_type != "Gemm" or len(node.input) < 3 or not node.input[2]:
        return 1.0
    return next((float(attribute.f) for attribute in node.attribute if attribute.name == "beta"), 1.0)


def _separate_constants(proto: onnx.ModelProto) -> None:
    """Gives products weights of their own: the quantizer rounds a constant once, along the axis of its first reader.

    Products that read it in the same way, as the calls of one layer do, share it.
    """
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    readers: dict[str, dict[tuple[object, ...], list[tuple[onnx.NodeProto, int]]]] = {}
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name in constants:
                readers.setdefault(name, defaultdict(list))[_way(node, index)].append((node, index))
    for name, ways in readers.items():
        ofs_products = [way for way in ways if way]
        for number, way in enumerate(ofs_products if len(ofs_products) < len(ways) else ofs_products[1:]):
            copy = proto.graph.initializer.add()
            copy.CopyFrom(constants[name])
            copy.name = f"{name}/{number + 1}"
            for node, index in ways[way]:
                node.input[index] = copy.name


def _way(node: onnx.NodeProto, index: int) -> tuple[object, ...]:
    """How ``node`` reads its input ``index``; empty for a node that is no product."""
    if node.domain != "" or node.op_type not in PRODUCTS:
        return ()
    transposed = tuple(sorted((each.name, each.i) for each in node.attribute if each.name in ("transA", "transB")))
    return node.op_type, index, transposed

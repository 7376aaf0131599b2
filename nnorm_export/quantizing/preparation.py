"""Rewrites factors of biases and shared weights, with which ONNX Runtime's quantizer computes wrong numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.files.onnx_file import with_nested
from nnorm_export.quantizing.qdq import PRODUCTS


def multiply_biases(proto: onnx.ModelProto) -> None:
    """Takes the factor β of α·A·B + β·C into C: the quantizer adds C as it is."""
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    names = _Names(proto)
    for node in proto.graph.node:
        beta = beta_of(node)
        if beta == 1 or node.input[2] not in constants:
            continue
        bias = numpy_helper.to_array(constants[node.input[2]])
        name = names.new(f"{node.name}/bias")
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


def separated(proto: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy of ``proto`` whose products among the nodes ``names`` have weights of their own.

    The quantizer rounds a constant once, along the axis of its first reader, and for all of its readers. Products that
    read it in the same way, as the calls of one layer do, share it.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    readers: dict[str, dict[tuple[object, ...], list[tuple[onnx.NodeProto, int]]]] = {}
    chosen = set(names)
    for node in copy.graph.node:
        for index, name in enumerate(node.input):
            if name in constants:
                key = _key(node, index) if node.name in chosen else ()
                readers.setdefault(name, defaultdict(list))[key].append((node, index))
    taken = _Names(proto)
    for name, keys in readers.items():
        of_products = [key for key in keys if key]
        for key in of_products if len(of_products) < len(keys) else of_products[1:]:
            own = copy.graph.initializer.add()
            own.CopyFrom(constants[name])
            own.name = taken.new(f"{name}/of_{keys[key][0][0].name}")
            for node, index in keys[key]:
                node.input[index] = own.name
    return copy


def _key(node: onnx.NodeProto, index: int) -> tuple[object, ...]:
    """A key that is equal for products that read a weight in the same way; empty if ``node`` is not a product."""
    if node.domain != "" or node.op_type not in PRODUCTS:
        return ()
    transposed = tuple(sorted((each.name, each.i) for each in node.attribute if each.name in ("transA", "transB")))
    return node.op_type, index, transposed


class _Names:
    """The names of the values of a graph, and new ones."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        graph = proto.graph
        self._taken = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
        self._taken |= {name for node in with_nested(graph.node) for name in (*node.input, *node.output)}

    def new(self, name: str) -> str:
        """Returns ``name``, with a mark where another value has it."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

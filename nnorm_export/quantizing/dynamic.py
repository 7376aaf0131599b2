"""Products of matrices whose first factor is quantized in each call: the method ``dynamic``.

A weight is stored in int8. The other factor gets a scale and a zero point from its own values in each call
(DynamicQuantizeLinear), so that nothing is calibrated. The numbers between the products stay float, and so do
convolutions: a scale for a whole batch of maps is not better than a calibrated one, and ONNX Runtime's ConvInteger is
slower than its Conv.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.process import silent_loggers

PRODUCTS_OF_MATRICES = ("MatMul", "Gemm")


def without_weight(proto: onnx.ModelProto) -> dict[str, str]:
    """Name of a product that the method leaves in float -> why."""
    weights = {tensor.name: len(tensor.dims) for tensor in proto.graph.initializer}
    found = {}
    for node in proto.graph.node:
        if node.domain == "" and node.op_type in PRODUCTS_OF_MATRICES:
            if weights.get(node.input[1]) != 2:
                found[node.name] = "its second factor is not a matrix of weights"
            elif node.op_type == "Gemm" and not _is_matmul(node):
                found[node.name] = "its first factor is transposed, or its product or bias has a factor"
    return found


def with_dynamic_products(
    proto: onnx.ModelProto, names: Collection[str], *, per_channel: bool, reduce_range: bool
) -> onnx.ModelProto:
    """Returns a copy of ``proto`` whose products ``names`` are DynamicQuantizeLinear and MatMulInteger."""
    # ONNX Runtime may be missing until a file is quantized, and this part of it takes a second to load.
    quantization = importlib.import_module("onnxruntime.quantization")
    quantizer_module = importlib.import_module("onnxruntime.quantization.onnx_quantizer")

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    nodes = [each for node in copy.graph.node for each in _as_matmul(copy, node, names)]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    with silent_loggers(["root"]):  # it warns of each tensor that it leaves in float
        quantizer = quantizer_module.ONNXQuantizer(
            copy,
            per_channel,
            reduce_range,
            quantization.QuantizationMode.IntegerOps,
            False,  # static
            quantization.QuantType.QInt8,
            quantization.QuantType.QUInt8,
            None,  # ranges
            list(names),
            [],
            ["MatMul"],
            {"MatMulConstBOnly": True},
        )
        quantizer.quantize_model()
    made: onnx.ModelProto = quantizer.model.model
    made.producer_name, made.producer_version = proto.producer_name, proto.producer_version
    return made


def _is_matmul(gemm: onnx.NodeProto) -> bool:
    """Whether it is A·B + C or A·Bᵀ + C."""
    factors = {"alpha": 1.0, "beta": 1.0}
    return all(
        attribute.i == 0
        if attribute.name == "transA"
        else attribute.name == "transB" or attribute.f == factors[attribute.name]
        for attribute in gemm.attribute
    )


def _as_matmul(proto: onnx.ModelProto, node: onnx.NodeProto, names: Collection[str]) -> Iterator[onnx.NodeProto]:
    """A Gemm among the nodes ``names`` as a MatMul of its name and an Add; other nodes as they are."""
    if node.op_type != "Gemm" or node.domain != "" or node.name not in names:
        yield node
        return
    weight = node.input[1]
    if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
        weight = f"{node.name}/weight"
        tensor = next(each for each in proto.graph.initializer if each.name == node.input[1])
        array = np.ascontiguousarray(numpy_helper.to_array(tensor).T)
        proto.graph.initializer.append(numpy_helper.from_array(array, weight))
    has_bias = len(node.input) > 2 and bool(node.input[2])
    product = f"{node.name}/product" if has_bias else node.output[0]
    matmul = onnx.helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name)
    matmul.metadata_props.extend(node.metadata_props)
    yield matmul
    if has_bias:
        yield onnx.helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}/bias")

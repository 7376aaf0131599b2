"""A file that only kernels can run, to find the dtypes for which kernels exist."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from nnorm_export.domain import Operator
from nnorm_export.domain.quantized_batch_normal_norm import QuantizedOperator
from nnorm_export.dtypes import DTYPES, Dtype
from nnorm_export.names import DOMAIN, DOMAIN_VERSION


def every_operator(dtype: Dtype, operators: Collection[Operator]) -> onnx.ModelProto:
    """A file with a node of each operator, without bodies. Tensors are ``dtype``, parameters float32 or float64."""
    arithmetic = DTYPES["float64" if dtype.name == "float64" else "float32"]
    tensor = onnx.helper.make_tensor_value_info
    inputs, outputs, nodes = {}, [], []
    for operator in operators:
        scales = operator.scales if isinstance(operator, QuantizedOperator) else ()
        zero_points = operator.zero_points if isinstance(operator, QuantizedOperator) else ()
        for name in operator.inputs:
            kind = arithmetic if name in (*operator.parameters, *scales) else dtype
            shape = [1] if name in operator.parameters else [] if name in (*scales, *zero_points) else [1, 1]
            inputs[name] = tensor(name, kind.onnx_type, shape)
        nodes.append(onnx.helper.make_node(operator.op_type, operator.inputs, [operator.op_type], domain=DOMAIN))
        outputs.append(tensor(operator.op_type, dtype.onnx_type, [1, 1]))
    graph = onnx.helper.make_graph(nodes, "operators", list(inputs.values()), outputs)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)

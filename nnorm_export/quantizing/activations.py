"""Joins a norm and the activation after it before the graph is quantized: one table for both saves a rounding.

    BatchNormalNorm → HardSwish             becomes    BatchNormalNormHardSwish
    BatchNormalNorm → y·Sigmoid(y)          becomes    BatchNormalNormSwish

These operators have no kernel and no body. A joined norm that does not become a table is split again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import onnx
import onnx_ir as ir

from nnorm_export.domain import OPERATORS, QUANTIZED_OPERATORS, Operator, Step
from nnorm_export.names import DOMAIN

JOINED: dict[str, Operator] = {
    op_type: OPERATORS[quantized.norm.removeprefix("Quantized")].followed_by(*quantized.epilogue)
    for quantized in QUANTIZED_OPERATORS.values()
    if (op_type := quantized.op_type.removeprefix("Quantized")) not in OPERATORS
}
ACTIVATIONS = tuple(dict.fromkeys(step.op_type for operator in JOINED.values() for step in operator.epilogue))


def join_activations(proto: onnx.ModelProto, kept: Collection[str]) -> None:
    """Edits the graph of ``proto``: a norm whose output only an activation reads computes the activation's output.

    Nodes whose names are in ``kept`` are left alone.
    """
    graph = proto.graph
    readers = defaultdict(list)
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers[name].append(node)
    outputs = {value.name for value in graph.output}
    gone: list[onnx.NodeProto] = []
    for norm in (node for node in graph.node if node.name not in kept):
        for op_type, operator in JOINED.items():
            if norm.domain == DOMAIN and norm.op_type == operator.norm and norm.output[0] not in outputs:
                found = _activation(norm.output[0], operator.epilogue[0], readers)
                inside = {name for node in found[:-1] for name in node.output}
                if found and outputs.isdisjoint(inside) and not any(node.name in kept for node in found):
                    norm.op_type = op_type
                    norm.output[0] = found[-1].output[0]
                    gone += found
                    break
    left = [node for node in graph.node if not any(node is other for other in gone)]
    del graph.node[:]
    graph.node.extend(left)


def _activation(y: str, step: Step, readers: dict[str, list[onnx.NodeProto]]) -> list[onnx.NodeProto]:
    """The nodes that compute ``step`` of ``y``, if nothing else reads ``y``: one operator, or a gate and a product."""
    found = readers[y]
    if len(found) == 1:
        (node,) = found
        return found if (node.domain, node.op_type) == ("", step.op_type) and not node.attribute else []
    if len(found) != 2 or any(node.domain for node in found):
        return []
    gate, product = found
    op_type, attributes = _parsed(step.gate)
    is_gate = gate.op_type == op_type and {each.name: each.f for each in gate.attribute} == attributes
    is_product = product.op_type == "Mul" and sorted(product.input) == sorted([y, gate.output[0]])
    return found if is_gate and is_product and len(readers[gate.output[0]]) == 1 else []


def split_activation(norm: ir.Node, graph: ir.Graph) -> None:
    """Splits a norm that :func:`join_activations` has joined."""
    operator = JOINED[norm.op_type]
    (step,) = operator.epilogue
    op_type, attributes = _parsed(step.gate)
    final = norm.outputs[0]
    alone = ir.Node(
        DOMAIN,
        operator.norm,
        norm.inputs,
        list(norm.attributes.values()),
        name=norm.name,
        metadata_props=dict(norm.metadata_props),
    )
    y = alone.outputs[0]
    gate = ir.node(op_type, [y], attributes, name=f"{norm.name}/{step.op_type}/gate")
    product = ir.node("Mul", [y, gate.outputs[0]], name=f"{norm.name}/{step.op_type}")
    y.name, gate.outputs[0].name = f"{final.name}/x", f"{final.name}/gate"
    product.outputs[0].name = final.name
    product.outputs[0].shape, product.outputs[0].type = final.shape, final.type
    ir.convenience.replace_nodes_and_values(graph, norm, [norm], [alone, gate, product], [final], product.outputs)


def _parsed(gate: str) -> tuple[str, dict[str, float]]:
    """The operator of a gate and its attributes, as a body has them."""
    node = onnx.parser.parse_node(f"gate = {gate} (y)")
    return node.op_type, {attribute.name: attribute.f for attribute in node.attribute}

"""Makes tables of the norms between quantized tensors: one node in the place of three.

    DequantizeLinear → BatchNormalNormRelu → QuantizeLinear    becomes    QuantizedBatchNormalNormRelu

That is exact: the node's body is those three. ONNX Runtime's integer convolutions have the channels last, and it
transposes their inputs and outputs. Beside a convolution the node is therefore written with the channels last too,
between a Transpose to that layout and one back, of which ONNX Runtime cancels each against the convolution's:

    QLinearConv → Transpose⁻¹ → Transpose → node → Transpose⁻¹ → Transpose → QLinearConv
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common

from nnorm_export.domain import ALL_OPERATORS
from nnorm_export.names import DOMAIN
from nnorm_export.quantizing.activations import JOINED, split_activation
from nnorm_export.quantizing.qdq import FLOAT_NORMS, NORMS

_TO_CHANNELS_LAST, _FROM_CHANNELS_LAST = (0, 2, 3, 1), (0, 3, 1, 2)
_RANK = 4  # of the maps that ONNX Runtime's integer convolutions have with the channels last
_CONVOLUTIONS = ("Conv", "ConvTranspose")
# What ONNX Runtime moves a Transpose through on the way to a convolution.
_TRANSPARENT = (
    *("QuantizeLinear", "DequantizeLinear", "Add", "Mul", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"),
    *("Relu", "Clip", "Pad", "Resize", "Split"),
)


def use_tables(model: ir.Model, ranks: dict[str, int], names: Collection[str]) -> set[str]:
    """Edits ``model``, and returns the names of the norms that are tables now.

    Args:
        model: a graph of :func:`.with_qdq`.
        ranks: name of a node of the float graph -> the rank of what it computes.
        names: the nodes that may be tables.
    """
    graph = model.graph
    norms = [node for node in graph if node.domain == DOMAIN and node.op_type in NORMS]
    last = {norm for norm in norms if ranks.get(norm.name or "", 0) == _RANK and _is_beside_convolution(norm)}
    wanted = set(names)
    tables = {
        norm.name or "" for norm in norms if norm.name in wanted and _replace(norm, graph, channels_last=norm in last)
    }
    for norm in [node for node in graph if node.domain == DOMAIN and node.op_type in JOINED]:
        split_activation(norm, graph)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
    return tables


def _replace(norm: ir.Node, graph: ir.Graph, *, channels_last: bool) -> bool:
    """Replaces ``norm`` if its data are dequantized and its output is quantized, and nothing else reads that."""
    operator = FLOAT_NORMS[norm.op_type]
    given = dict(zip(operator.inputs, norm.inputs, strict=True))
    sources = {name: _dequantized(given[name]) for name in ("X", *operator.operands)}
    y = norm.outputs[0]
    quantize = next((use.node for use in y.uses() if use.node.op_type == "QuantizeLinear"), None)
    is_output_quantized = quantize is not None and len(y.uses()) == 1 and not y.is_graph_output()
    if quantize is None or not is_output_quantized or None in sources.values():
        return False
    twin = ALL_OPERATORS[NORMS[norm.op_type]]
    values: dict[str, ir.Value | None] = {name: given[name] for name in operator.parameters}
    for name, source in sources.items():
        assert source is not None
        data, scale, zero_point = source.inputs
        values |= {name: data, f"{name.lower()}_scale": scale, f"{name.lower()}_zero_point": zero_point}
        if channels_last and data is not None:
            values[name] = _transposed(data, f"{norm.name}/{name}", _TO_CHANNELS_LAST, norm, graph)
    _, values["y_scale"], values["y_zero_point"] = quantize.inputs
    quantized = quantize.outputs[0]
    kept = [attribute for name, attribute in norm.attributes.items() if name not in twin.attributes]
    table = ir.Node(
        DOMAIN,
        twin.op_type,
        [values[name] for name in twin.inputs],
        [*kept, ir.AttrInt64("axis", -1 if channels_last else 1)],
        name=norm.name,
        metadata_props=dict(norm.metadata_props),
    )
    result = table.outputs[0]
    result.name = f"{quantized.name}/channels_last" if channels_last else f"{quantized.name}/table"
    graph.insert_before(norm, table)
    if channels_last:
        result = _transposed(result, f"{norm.name}/Y", _FROM_CHANNELS_LAST, norm, graph)
    final = quantized.name
    quantized.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove([norm, quantize], safe=True)
    result.name = final
    return True


def _dequantized(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that computes ``value`` with one scale and zero point for all; None if there is none."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or len(node.inputs) != 3 or None in node.inputs:
        return None
    scale = node.inputs[1]
    constant = None if scale is None else scale.const_value
    return node if constant is not None and len(constant.shape) == 0 else None


def _transposed(value: ir.Value, name: str, axes: tuple[int, ...], before: ir.Node, graph: ir.Graph) -> ir.Value:
    transpose = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", axes)], name=f"{name}/Transpose")
    transpose.outputs[0].name = f"{name}/transposed"
    graph.insert_before(before, transpose)
    return transpose.outputs[0]


def _is_beside_convolution(norm: ir.Node) -> bool:
    """Whether a convolution computes what ``norm`` reads or reads what it computes, other norms and sums aside."""
    return _reaches(norm, forwards=True) or _reaches(norm, forwards=False)


def _reaches(norm: ir.Node, *, forwards: bool) -> bool:
    waiting, seen = [norm], {norm}
    while waiting:
        node = waiting.pop()
        if forwards:
            neighbors = {use.node for value in node.outputs for use in value.uses()}
        else:
            neighbors = {maker for value in node.inputs if value is not None and (maker := value.producer())}
        for other in neighbors - seen:
            seen.add(other)
            if other.op_type in _CONVOLUTIONS:
                return True
            if other.op_type in _TRANSPARENT or (other.domain == DOMAIN and other.op_type in NORMS):
                waiting.append(other)
    return False

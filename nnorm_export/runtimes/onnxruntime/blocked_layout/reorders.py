"""ONNX Runtime's blocked layout in a graph: its reorders, and the nodes that work in either layout.

ONNX Runtime's convolutions on a CPU read and write [N, C/block, H, W, block], where ``block`` is the 8 or 16 channels
that fit the processor's vectors; they are nodes of the domain ``com.microsoft.nchwc``. ReorderInput converts a tensor
from [N, C, H, W] to that layout, ReorderOutput converts it back.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export.domain import BLOCKED_TWINS, OPERATORS, Operator
from nnorm_export.names import DOMAIN

NCHWC_DOMAIN = "com.microsoft.nchwc"
TO_BLOCKS, TO_PLAIN = "ReorderInput", "ReorderOutput"

# Operators that compute every entry from the entries at the same place: they work in blocks without a change. ONNX
# Runtime keeps them, and Concat of channels, in blocks between its own nodes, but not beside an operator of nnorm.
ELEMENTWISE = {
    "": {
        *("Add", "Clip", "Div", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Mul"),
        *("Relu", "Selu", "Sigmoid", "Softplus", "Sub", "Tanh"),
    },
    "com.microsoft": {"Gelu", "QuickGelu"},
}
_CHANNEL_AXIS = 1


def count_reorders(model: ir.Model) -> int:
    return sum(
        node.domain == NCHWC_DOMAIN and node.op_type in (TO_BLOCKS, TO_PLAIN)
        for node in RecursiveGraphIterator(model.graph)
    )


def has_blocks(model: ir.Model) -> bool:
    """Whether any node depends on the size of the blocks."""
    return any(
        node.domain == NCHWC_DOMAIN or (node.domain == DOMAIN and node.op_type in BLOCKED_TWINS)
        for node in RecursiveGraphIterator(model.graph)
    )


def operator_of(node: ir.Node) -> Operator | None:
    """The operator of the domain ``nnorm`` that ``node`` calls, or None."""
    return OPERATORS.get(node.op_type) if node.domain == DOMAIN else None


def is_reorder(node: ir.Node | None, op_type: str) -> bool:
    """Whether ``node`` is a reorder from or to [N, C, H, W]. Those from and to [N, H, W, C] stay as they are."""
    if node is None or node.domain != NCHWC_DOMAIN or node.op_type != op_type:
        return False
    channels_last = node.attributes.get("channels_last")
    return channels_last is None or channels_last.as_int() == 0


def values_in_blocks(graph: ir.Graph) -> set[ir.Value]:
    """The values that ONNX Runtime left in blocks: outputs of its nodes for blocks, and what is computed from them."""
    in_blocks: set[ir.Value] = set()
    for node in RecursiveGraphIterator(graph):
        if node.domain == NCHWC_DOMAIN:
            is_in_blocks = node.op_type != TO_PLAIN
        else:
            is_in_blocks = any(value in in_blocks for value in node.inputs)
        if is_in_blocks:
            in_blocks.update(node.outputs)
    return in_blocks


def origin(value: ir.Value) -> ir.Value:
    """The value that ``value`` is a reordered copy of, or itself."""
    while is_reorder(value.producer(), TO_BLOCKS) or is_reorder(value.producer(), TO_PLAIN):
        value = read_by(value.producer())
    return value


def read_by(reorder: ir.Node | None) -> ir.Value:
    assert reorder is not None
    source = reorder.inputs[0]
    assert source is not None
    return source


def reorders_to_blocks(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses() if is_reorder(use.node, TO_BLOCKS)]


def data_inputs(node: ir.Node) -> dict[int, ir.Value]:
    """The tensors in either layout that a norm or layout-free node reads, by their position; not its parameters."""
    operator = operator_of(node)
    parameters = [] if operator is None else [operator.inputs.index(name) for name in operator.parameters]
    return {
        index: value
        for index, value in enumerate(node.inputs)
        if value is not None and index not in parameters and not _is_scalar(value)
    }


def is_layout_free(node: ir.Node, block: int) -> bool:
    """Whether ``node`` computes the same in blocks: float32, whole blocks of channels, and no broadcasting."""
    inputs, y = list(data_inputs(node).values()), node.outputs[0]
    if not all(_is_whole_blocks(value, block) for value in (*inputs, y)):
        return False
    if (node.domain, node.op_type) == ("", "Concat"):
        return node.attributes["axis"].as_int() == _CHANNEL_AXIS
    return _is_elementwise(node) and all(_same_shape(value, y) for value in inputs)


def complete_shapes(graph: ir.Graph) -> None:
    """Adds the shapes that ONNX Runtime leaves out where it inlined a function of ONNX, HardSwish for example."""
    for node in graph:
        y, inputs = node.outputs[0], list(data_inputs(node).values())
        if (
            y.shape is None
            and inputs
            and _is_elementwise(node)
            and all(_same_shape(value, inputs[0]) for value in inputs)
        ):
            y.shape, y.type = inputs[0].shape, inputs[0].type


def channels_of(node: ir.Node) -> int | None:
    """The number of channels that ``node`` computes, None if unknown; a parameter of a norm tells it."""
    operator = operator_of(node)
    parameter = node.inputs[1] if operator is not None and operator.is_per_channel else None  # the first one after X
    shape, axis = (node.outputs[0].shape, _CHANNEL_AXIS) if parameter is None else (parameter.shape, 0)
    length = None if shape is None or len(shape) <= axis else shape[axis]
    return length if isinstance(length, int) else None


def _is_elementwise(node: ir.Node) -> bool:
    return node.op_type in ELEMENTWISE.get(node.domain, ())


def _is_whole_blocks(value: ir.Value, block: int) -> bool:
    if value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) != 4:
        return False
    channels = value.shape[_CHANNEL_AXIS]
    return isinstance(channels, int) and channels % block == 0


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    return a.shape is not None and not a.shape.has_unknown_dim() and a.shape == b.shape


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 0

"""ONNX Runtime's blocked layout as it shows in a graph: reorders, and the nodes that can do without them.

ONNX Runtime's convolutions on a CPU read and write [N, C/block, H, W, block], ``block`` being the 8 or 16 channels that
fit the processor's vectors; they are nodes of the domain ``com.microsoft.nchwc``. ReorderInput brings a tensor into
that layout, ReorderOutput back into [N, C, H, W].
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export.names import DOMAIN

NCHWC_DOMAIN = "com.microsoft.nchwc"
TO_BLOCKS, TO_PLAIN = "ReorderInput", "ReorderOutput"

# The operators that have a twin for the blocked layout, with one more attribute: ``block``.
BLOCKED_TWINS = {name: f"Nchwc{name}" for name in ("BatchNormalNorm", "BatchNormalNormRelu", "BatchNormalNormAddRelu")}
# Which of their inputs are X, scale and, if there is one, the residual. All but X and the residual are vectors [C].
X, SCALE, RESIDUAL = 0, 1, 7

# Operators that compute every entry from those at its place alone: they work in blocks as they are. ONNX Runtime has
# them, and Concat of channels, do so between its own nodes, but not beside one that it does not know.
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
    nodes = RecursiveGraphIterator(model.graph)
    return any(
        node.domain == NCHWC_DOMAIN or (node.domain == DOMAIN and node.op_type in BLOCKED_TWINS.values())
        for node in nodes
    )


def is_reorder(node: ir.Node | None, op_type: str) -> bool:
    """A reorder from or to [N, C, H, W]. ONNX Runtime has some from and to [N, H, W, C] too, which stay as they are."""
    if node is None or node.domain != NCHWC_DOMAIN or node.op_type != op_type:
        return False
    channels_last = node.attributes.get("channels_last")
    return channels_last is None or channels_last.as_int() == 0


def values_in_blocks(graph: ir.Graph) -> set[ir.Value]:
    """What is in blocks as ONNX Runtime left the graph: what its nodes for blocks give, and what is made of that."""
    in_blocks: set[ir.Value] = set()
    for node in RecursiveGraphIterator(graph):
        if node.domain == NCHWC_DOMAIN:
            gives_blocks = node.op_type != TO_PLAIN
        else:
            gives_blocks = any(value in in_blocks for value in node.inputs)
        if gives_blocks:
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
    """The tensors in either layout that a norm or layout-free node reads, by their place: not parameters."""
    places = (X, RESIDUAL) if node.domain == DOMAIN else range(len(node.inputs))
    inputs = {index: node.inputs[index] for index in places if index < len(node.inputs)}
    return {index: value for index, value in inputs.items() if value is not None and not _is_scalar(value)}


def is_layout_free(node: ir.Node, block: int) -> bool:
    """Whether ``node`` provably computes the same in blocks: float32, whole blocks of channels, nothing broadcast."""
    inputs, y = list(data_inputs(node).values()), node.outputs[0]
    if not all(_is_whole_blocks(value, block) for value in (*inputs, y)):
        return False
    if (node.domain, node.op_type) == ("", "Concat"):
        return node.attributes["axis"].as_int() == _CHANNEL_AXIS
    return _is_elementwise(node) and all(_same_shape(value, y) for value in inputs)


def complete_shapes(graph: ir.Graph) -> None:
    """ONNX Runtime notes no shapes in the functions of ONNX that it inlined, HardSwish for one."""
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
    vector = node.inputs[SCALE] if node.domain == DOMAIN else None
    shape, axis = (node.outputs[0].shape, _CHANNEL_AXIS) if vector is None else (vector.shape, 0)
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

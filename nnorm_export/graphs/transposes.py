"""Products of a transposed tensor in float16 as transposed products.

From version 1.24 on, ONNX Runtime ends the process when it opens a float16 file with a Transpose of the first axis
before a MatMul (:mod:`nnorm_export.runtimes.onnxruntime.known_faults`). Every ``nn.MultiheadAttention`` with
``batch_first=True`` begins with these two nodes. If the matrix is a constant, the Transpose is moved behind the MatMul:
the result is the same, because the product of a row does not depend on its index, and ONNX Runtime opens the file.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.convenience
import onnx_ir.passes.common


def move_float16_transposes(model: ir.Model) -> None:
    """Replaces MatMul(Transpose(x), w) [+ b] by Transpose(MatMul(x, w) [+ b]) in float16.

    w is a constant matrix, b a constant vector or scalar; the Transpose moves the first axis but not the last one.
    """
    for product in [node for node in model.graph if node.domain == "" and node.op_type == "MatMul"]:
        x, w = product.inputs
        transpose = None if x is None else x.producer()
        if x is None or x.dtype != ir.DataType.FLOAT16 or transpose is None or not _is_constant(w, rank=2):
            continue
        order = _order(transpose)
        if order and order[0] != 0 and order[-1] == len(order) - 1:
            _move(model.graph, product, transpose.inputs[0], order)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


def _order(node: ir.Node) -> list[int]:
    """The permutation of a Transpose; empty for other nodes, and by default, which moves the last axis."""
    is_transpose = node.domain == "" and node.op_type == "Transpose"
    return [*node.attributes.get_ints("perm", [])] if is_transpose else []


def _is_constant(value: ir.Value | None, *, rank: int) -> bool:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor is not None and len(tensor.shape) == rank


def _move(graph: ir.Graph, product: ir.Node, x: ir.Value | None, order: list[int]) -> None:
    """Moves the transposition ``order`` of ``x`` behind ``product`` and, if there is one, the Add of its bias."""
    moved = [ir.node("MatMul", [x, product.inputs[1]], name=product.name)]
    replaced, users = product, [*product.outputs[0].uses()]
    if len(users) == 1 and not product.outputs[0].is_graph_output():
        total, position = users[0]
        bias = total.inputs[1 - position] if total.domain == "" and total.op_type == "Add" else None
        if _is_constant(bias, rank=1) or _is_constant(bias, rank=0):
            moved.append(ir.node("Add", [moved[0].outputs[0], bias], name=total.name))
            replaced = total
    last = replaced.outputs[0]
    removed = [product] if replaced is product else [product, replaced]
    for made, old in zip(moved, removed, strict=True):
        value = made.outputs[0]
        value.name = f"{old.outputs[0].name}_transposed"
        value.type = last.type
        if last.shape is not None:
            value.shape = ir.Shape([last.shape[order.index(axis)] for axis in range(len(order))])
    back = ir.node("Transpose", [moved[-1].outputs[0]], {"perm": order}, name=f"{replaced.name}_transpose")
    ir.convenience.replace_nodes_and_values(graph, replaced, removed[::-1], [*moved, back], [last], back.outputs)

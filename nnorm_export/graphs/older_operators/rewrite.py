"""A node that is rewritten for an older opset, and the table of the rules that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience

Rule = Callable[["Rewrite"], "Sequence[ir.Value] | None"]
Rules = dict[str, tuple[int, Rule]]  # operator -> the first opset that needs no rule, and the rule


class Refused(Exception):
    """Why no older operator does, and the least opset that does."""

    def __init__(self, why: str, least: int) -> None:
        super().__init__(why)
        self.why, self.least = why, least


def before(rules: Rules, opset: int, *op_types: str) -> Callable[[Rule], Rule]:
    """Enters a rule for the opsets before ``opset`` into ``rules``."""

    def register(rule: Rule) -> Rule:
        rules.update(dict.fromkeys(op_types, (opset, rule)))
        return rule

    return register


@dataclass
class Rewrite:
    """A node that is rewritten.

    Attributes:
        opset: the one that it is rewritten for.
        least: the first opset that needs no rule.
        nodes: those that replace the node.
    """

    node: ir.Node
    opset: int
    least: int
    nodes: list[ir.Node] = field(default_factory=list)

    def input(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    @property
    def x(self) -> ir.Value:
        value = self.input(0)
        assert value is not None
        return value

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, value: Any, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """A new initializer; scalars stay scalars."""
        graph = self.node.graph
        assert isinstance(graph, ir.Graph)
        start = f"{self.node.outputs[0].name}_constant"
        name = next(
            name for n in range(len(graph.initializers) + 1) if (name := f"{start}_{n}") not in graph.initializers
        )
        tensor = ir.tensor(np.asarray(value).astype(dtype.numpy()), dtype=dtype, name=name)
        constant = ir.val(name, dtype, [*tensor.numpy().shape], const_value=tensor)
        graph.register_initializer(constant)
        return constant

    def like(self, value: float, x: ir.Value) -> ir.Value:
        """``value`` in the dtype of ``x``."""
        return self.constant(value, self.dtype(x))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        if x.dtype == dtype:
            return x
        made = self.op("Cast", x, to=int(dtype))
        made.dtype, made.shape = dtype, x.shape
        return made

    def dtype(self, x: ir.Value) -> ir.DataType:
        if x.dtype is None:
            raise Refused(f"takes {x.name}, whose dtype is unknown", self.least)
        return x.dtype

    def rank(self, x: ir.Value) -> int:
        if x.shape is None:
            raise Refused(f"takes {x.name}, whose number of axes is unknown", self.least)
        return len(x.shape)

    def integers(self, index: int, name: str) -> list[int] | None:
        """The constant input ``index``; None if the node does not have it."""
        value = self.input(index)
        if value is None:
            return None
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None:
            raise Refused(f"computes its {name} in the model", self.least)
        return [int(number) for number in np.atleast_1d(tensor.numpy())]

    def take_attribute(self, name: str, default: Any) -> Any:
        attribute = self.node.attributes.pop(name, None)
        return default if attribute is None else attribute.value

    def to_attribute(self, index: int, name: str) -> None:
        """Makes the constant input ``index``, the last, an attribute."""
        values = self.integers(index, name)
        self.node.resize_inputs(index)
        if values is not None:
            self.node.attributes.add(ir.AttrInt64s(name, values))

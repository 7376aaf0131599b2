"""What an operator of the standard domain is in opsets that lack it, or have another form of it.

Each rule is for the opsets before the one that it names. It changes the node in place and returns None, or returns the
values that replace the node's outputs. What it makes may be newer than the opset too: the caller takes that down next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience

Rule = Callable[["Rewrite"], "Sequence[ir.Value] | None"]
RULES: dict[str, tuple[int, Rule]] = {}  # operator -> the first opset that needs no rule, and the rule


class Refused(Exception):
    """Why no older operator does, and the least opset that does."""

    def __init__(self, why: str, least: int) -> None:
        super().__init__(why)
        self.why, self.least = why, least


def _before(opset: int, *op_types: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, (opset, rule)))
        return rule

    return register


@dataclass
class Rewrite:
    """A node that is rewritten for ``opset``; ``nodes`` are those that replace it."""

    node: ir.Node
    opset: int
    nodes: list[ir.Node] = field(default_factory=list)

    def input(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    @property
    def x(self) -> ir.Value:
        value = self.input(0)
        assert value is not None
        return value

    def op(self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes, num_outputs=outputs)
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

    @property
    def least(self) -> int:
        return RULES[self.node.op_type][0]

    def take_attribute(self, name: str, default: Any) -> Any:
        attribute = self.node.attributes.pop(name, None)
        return default if attribute is None else attribute.value

    def to_attribute(self, index: int, name: str) -> None:
        """Makes the constant input ``index``, the last, an attribute."""
        values = self.integers(index, name)
        self.node.resize_inputs(index)
        if values is not None:
            self.node.attributes.add(ir.AttrInt64s(name, values))


@_before(
    18, *(f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"))
)
def _reduce(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    axes = rewrite.integers(1, "axes")
    if not axes and rewrite.take_attribute("noop_with_empty_axes", 0):
        return [rewrite.op("Identity", rewrite.x)]
    if axes == []:
        rewrite.node.resize_inputs(1)  # all axes
    rewrite.take_attribute("noop_with_empty_axes", 0)
    rewrite.to_attribute(1, "axes")
    return None


_before(13, "ReduceSum")(_reduce)


@_before(13, "Squeeze", "Unsqueeze")
def _axes(rewrite: Rewrite) -> None:
    rewrite.to_attribute(1, "axes")


@_before(18, "Split")
def _split(rewrite: Rewrite) -> None:
    parts = rewrite.take_attribute("num_outputs", None)
    axis, shape = rewrite.node.attributes.get_int("axis", 0), rewrite.x.shape
    length = None if shape is None else shape[axis]
    if parts is not None and isinstance(length, int) and length % parts:  # the older Split makes equal parts only
        part = math.ceil(length / parts)
        rewrite.node.resize_inputs(2)
        rewrite.node.replace_input_with(1, rewrite.constant([part] * (parts - 1) + [length - part * (parts - 1)]))
    if rewrite.opset < 13:
        rewrite.to_attribute(1, "split")


@_before(18, "Pad")
def _pad(rewrite: Rewrite) -> None:
    axes, pads = rewrite.integers(3, "axes"), rewrite.integers(1, "pads") if rewrite.input(3) is not None else None
    if axes is not None and pads is not None:
        rank = rewrite.rank(rewrite.x)
        everywhere = [0] * (2 * rank)
        for position, axis in enumerate(axes):
            everywhere[axis % rank] = pads[position]
            everywhere[axis % rank + rank] = pads[position + len(axes)]
        rewrite.node.replace_input_with(1, rewrite.constant(everywhere))
        rewrite.node.resize_inputs(3)


@_before(18, "Resize")
def _resize(rewrite: Rewrite) -> None:
    node, axes = rewrite.node, rewrite.take_attribute("axes", None)
    if axes is not None and sorted(axis % rewrite.rank(rewrite.x) for axis in axes) != list(
        range(rewrite.rank(rewrite.x))
    ):
        raise Refused(f"has axes={list(axes)}", 18)
    if rewrite.opset < 13:  # where roi and scales are not optional
        node.resize_inputs(max(3, len(node.inputs)))
        for index in (1, 2):
            if node.inputs[index] is None:
                node.replace_input_with(index, rewrite.constant([], ir.DataType.FLOAT))


@_before(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    """Older ones flatten all axes from ``axis`` on, so that it must be the last."""
    rank = rewrite.rank(rewrite.x)
    axis = rewrite.take_attribute("axis", -1) % rank
    if axis == rank - 1:
        rewrite.node.attributes.add(ir.AttrInt64("axis", axis))
        return None
    order = [*range(rank)]
    order[axis], order[-1] = rank - 1, axis
    last = rewrite.op("Transpose", rewrite.x, perm=order)
    last.shape = ir.Shape([None] * rank)
    return [rewrite.op("Transpose", rewrite.op(rewrite.node.op_type, last, axis=rank - 1), perm=order)]


@_before(15, "Shape")
def _shape(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    start, end = rewrite.take_attribute("start", 0), rewrite.take_attribute("end", None)
    if start == 0 and end is None:
        return None
    ends = rewrite.constant([np.iinfo(np.int64).max if end is None else end])
    return [rewrite.op("Slice", rewrite.op("Shape", rewrite.x), rewrite.constant([start]), ends)]


@_before(18, "Reshape")
def _reshape(rewrite: Rewrite) -> None:
    """ONNX Runtime 1.10 refuses allowzero beside a length -1, and before opset 14 there is none.

    A length 0 is then that of the input, which differs for tensors without elements only.
    """
    shape = rewrite.input(1)
    tensor = None if shape is None else ir.convenience.get_const_tensor(shape)
    has_zero = tensor is not None and 0 in tensor.numpy()
    allows_zero = rewrite.node.attributes.get_int("allowzero", 0)
    if allows_zero and has_zero and rewrite.opset < 14:
        raise Refused("makes a tensor without elements", 14)
    if not has_zero and (tensor is not None or rewrite.opset < 14):
        rewrite.take_attribute("allowzero", 0)


@_before(18, "Gemm")
def _gemm(rewrite: Rewrite) -> None:
    """ONNX Runtime up to 1.12 fuses a Gemm without C with an activation, and then refuses the model for want of C."""
    if rewrite.input(2) is None:
        rewrite.node.resize_inputs(3)
        weight = rewrite.input(1)
        assert weight is not None
        axis = 0 if rewrite.node.attributes.get_int("transB", 0) else 1
        columns = None if weight.shape is None else weight.shape[axis]
        # OpenCV 4.8 takes a vector only.
        zeros = [0] * columns if isinstance(columns, int) else 0
        rewrite.node.replace_input_with(2, rewrite.constant(zeros, rewrite.dtype(rewrite.x)))


@_before(15, "CastLike")
def _cast_like(rewrite: Rewrite) -> Sequence[ir.Value]:
    other = rewrite.input(1)
    assert other is not None
    return [rewrite.op("Cast", rewrite.x, to=int(rewrite.dtype(other)))]


@_before(12, "GreaterOrEqual", "LessOrEqual")
def _or_equal(rewrite: Rewrite) -> Sequence[ir.Value]:
    other = rewrite.input(1)
    strict = rewrite.op(rewrite.node.op_type.removesuffix("OrEqual"), rewrite.x, other)
    return [rewrite.op("Or", strict, rewrite.op("Equal", rewrite.x, other))]  # a negation would be true for NaN


@_before(12, "Max", "Min")
def _extremes_of_integers(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    if rewrite.dtype(rewrite.x).is_floating_point():
        return None
    found = rewrite.x
    for other in rewrite.node.inputs[1:]:
        found = _extreme(rewrite, rewrite.node.op_type, found, other)
    return [found]


@_before(12, "Clip")
def _clip_of_integers(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    if rewrite.dtype(rewrite.x).is_floating_point():
        return None
    found = rewrite.x
    for op_type, bound in (("Max", rewrite.input(1)), ("Min", rewrite.input(2))):
        found = found if bound is None else _extreme(rewrite, op_type, found, bound)
    return [rewrite.op("Identity", found) if found is rewrite.x else found]


def _extreme(rewrite: Rewrite, op_type: str, a: ir.Value, b: ir.Value | None) -> ir.Value:
    return rewrite.op("Where", rewrite.op("Greater" if op_type == "Max" else "Less", a, b), a, b)


@_before(12, "Pow")
def _pow(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    """Older ones take one dtype, of floats."""
    exponent, dtype = rewrite.input(1), rewrite.dtype(rewrite.x)
    if exponent is None or exponent.dtype == dtype or not dtype.is_floating_point():
        return None
    return [rewrite.op("Pow", rewrite.x, rewrite.cast(exponent, dtype))]


@_before(12, "Constant")
def _constant(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    value = rewrite.node.outputs[0]
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or "value" in rewrite.node.attributes:
        return None
    return [rewrite.op("Constant", value=tensor)]


@_before(13, "QuantizeLinear", "DequantizeLinear")
def _quantization(rewrite: Rewrite) -> None:
    """Older ones have one scale for the tensor."""
    scale = rewrite.input(1)
    if scale is None or scale.shape is None or len(scale.shape):
        raise Refused("has a scale for each channel", 13)
    rewrite.take_attribute("axis", 1)


@_before(14, "Trilu")
def _trilu(rewrite: Rewrite) -> Sequence[ir.Value]:
    """Keeps the elements whose column less row is at least k, or at most."""
    x, k, is_upper = rewrite.x, rewrite.input(1), rewrite.take_attribute("upper", 1)
    shape, zero, one = rewrite.op("Shape", x), rewrite.constant(0), rewrite.constant(1)
    rows, columns = (
        rewrite.op("Range", zero, rewrite.op("Gather", shape, rewrite.constant(axis), axis=0), one) for axis in (-2, -1)
    )
    distance = rewrite.op("Sub", columns, rewrite.op("Unsqueeze", rows, rewrite.constant([1])))
    limit = (
        rewrite.op("Sub", zero if k is None else k, one)
        if is_upper
        else rewrite.op("Add", zero if k is None else k, one)
    )
    kept = rewrite.op("Greater" if is_upper else "Less", distance, limit)
    if rewrite.dtype(x) != ir.DataType.BOOL:
        return [rewrite.op("Where", kept, x, rewrite.like(0, x))]
    return [rewrite.op("And", kept, x)]


@_before(14, "HardSwish")
def _hard_swish(rewrite: Rewrite) -> Sequence[ir.Value]:
    return [rewrite.op("Mul", rewrite.x, rewrite.op("HardSigmoid", rewrite.x, alpha=1 / 6, beta=0.5))]


@_before(18, "Mish")
def _mish(rewrite: Rewrite) -> Sequence[ir.Value]:
    return [rewrite.op("Mul", rewrite.x, rewrite.op("Tanh", rewrite.op("Softplus", rewrite.x)))]


@_before(24, "Swish")
def _swish(rewrite: Rewrite) -> Sequence[ir.Value]:
    x, alpha = rewrite.x, rewrite.take_attribute("alpha", 1.0)
    scaled = x if alpha == 1 else rewrite.op("Mul", x, rewrite.like(alpha, x))
    return [rewrite.op("Mul", x, rewrite.op("Sigmoid", scaled))]


@_before(20, "Gelu")
def _gelu(rewrite: Rewrite) -> Sequence[ir.Value]:
    x = rewrite.x
    if rewrite.take_attribute("approximate", "none") == "tanh":  # tanh(√(2/π)·(x + 0.044715·x³))
        cube = rewrite.op("Mul", rewrite.op("Mul", x, x), x)
        polynomial = rewrite.op("Add", x, rewrite.op("Mul", cube, rewrite.like(0.044715, x)))
        inner = rewrite.op("Tanh", rewrite.op("Mul", polynomial, rewrite.like(math.sqrt(2 / math.pi), x)))
    else:
        inner = rewrite.op("Erf", rewrite.op("Mul", x, rewrite.like(math.sqrt(0.5), x)))
    half = rewrite.op("Mul", x, rewrite.like(0.5, x))
    return [rewrite.op("Mul", half, rewrite.op("Add", inner, rewrite.like(1, x)))]


@_before(17, "LayerNormalization")
def _layer_normalization(rewrite: Rewrite) -> Sequence[ir.Value]:
    axes, epsilon, x = _rows(rewrite)
    mean = rewrite.op("ReduceMean", x, axes)
    h, inverse = _scaled_rows(rewrite, rewrite.op("Sub", x, mean), axes, epsilon)
    y = _affine(rewrite, h, rewrite.input(1), rewrite.input(2))
    return [y, mean, inverse][: len(rewrite.node.outputs)]


@_before(23, "RMSNormalization")
def _rms_normalization(rewrite: Rewrite) -> Sequence[ir.Value]:
    axes, epsilon, x = _rows(rewrite)
    return [_affine(rewrite, _scaled_rows(rewrite, x, axes, epsilon)[0], rewrite.input(1), None)]


@_before(21, "GroupNormalization")
def _group_normalization(rewrite: Rewrite) -> Sequence[ir.Value]:
    groups, rank = rewrite.node.attributes.get_int("num_groups"), rewrite.rank(rewrite.x)
    x = rewrite.cast(rewrite.x, ir.DataType.FLOAT) if rewrite.dtype(rewrite.x) != ir.DataType.DOUBLE else rewrite.x
    rows, axes = rewrite.op("Reshape", x, rewrite.constant([0, groups, -1])), rewrite.constant([-1])
    epsilon = rewrite.like(rewrite.take_attribute("epsilon", 1e-5), x)
    centred = rewrite.op("Sub", rows, rewrite.op("ReduceMean", rows, axes))
    h = rewrite.op("Reshape", _scaled_rows(rewrite, centred, axes, epsilon)[0], rewrite.op("Shape", x))
    shape = rewrite.constant([-1] + [1] * (rank - 2))
    scale, bias = (rewrite.op("Reshape", rewrite.input(index), shape) for index in (1, 2))
    return [_affine(rewrite, h, scale, bias)]


def _rows(rewrite: Rewrite) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The axes of a row, epsilon, and X in the dtype in which a norm computes."""
    rank = rewrite.rank(rewrite.x)
    axis = rewrite.take_attribute("axis", -1) % rank
    stash = ir.DataType(rewrite.take_attribute("stash_type", int(ir.DataType.FLOAT)))
    x = rewrite.x if rewrite.dtype(rewrite.x) == ir.DataType.DOUBLE else rewrite.cast(rewrite.x, stash)
    epsilon = rewrite.like(rewrite.take_attribute("epsilon", 1e-5), x)
    return rewrite.constant([*range(axis - rank, 0)]), epsilon, x


def _scaled_rows(rewrite: Rewrite, rows: ir.Value, axes: ir.Value, epsilon: ir.Value) -> tuple[ir.Value, ir.Value]:
    """rows / √(mean of rows² + ε), and 1 / √(…)."""
    variance = rewrite.op("ReduceMean", rewrite.op("Mul", rows, rows), axes)
    deviation = rewrite.op("Sqrt", rewrite.op("Add", variance, epsilon))
    return rewrite.op("Div", rows, deviation), rewrite.op("Reciprocal", deviation)


def _affine(rewrite: Rewrite, h: ir.Value, scale: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """h in X's dtype, times the scale, plus the bias."""
    dtype = rewrite.dtype(rewrite.x)
    y = h if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else rewrite.op("Cast", h, to=int(dtype))
    y = y if scale is None else rewrite.op("Mul", y, scale)
    return y if bias is None else rewrite.op("Add", y, bias)


@_before(19, "AveragePool")
def _average_pool(rewrite: Rewrite) -> None:
    dilations = rewrite.take_attribute("dilations", [1])
    if {*dilations} != {1}:
        raise Refused(f"has dilations={list(dilations)}", 19)


@_before(20, "GridSample")
def _grid_sample(rewrite: Rewrite) -> None:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = rewrite.take_attribute("mode", "linear")
    rewrite.node.attributes.add(ir.AttrString("mode", names.get(mode, mode)))


@_before(16, "RoiAlign")
def _roi_align(rewrite: Rewrite) -> None:
    mode = rewrite.take_attribute("coordinate_transformation_mode", "half_pixel")
    if mode != "output_half_pixel":
        raise Refused(f"has coordinate_transformation_mode={mode}", 16)

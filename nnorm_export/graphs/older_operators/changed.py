"""Operators that older opsets have too, with other attributes, inputs or dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience

from nnorm_export.graphs.older_operators.rewrite import Refused, Rewrite, Rules, before

RULES: Rules = {}
_before = partial(before, RULES)


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
    if axes is not None:  # the scales and sizes are in their order
        rank = rewrite.rank(rewrite.x)
        if [axis % rank for axis in axes] != [*range(rank)]:
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
    """ONNX Runtime 1.10 refuses allowzero beside a length -1, and opsets before 14 do not have it.

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


@_before(12, "Max", "Min")
def _extremes_of_integers(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    if rewrite.dtype(rewrite.x).is_floating_point():
        return None
    found = rewrite.x
    for other in rewrite.node.inputs[1:]:
        found = _extreme(rewrite, rewrite.node.op_type, found, other)
    return [_computed(rewrite, found)]


@_before(12, "Clip")
def _clip_of_integers(rewrite: Rewrite) -> Sequence[ir.Value] | None:
    if rewrite.dtype(rewrite.x).is_floating_point():
        return None
    found = rewrite.x
    for op_type, bound in (("Max", rewrite.input(1)), ("Min", rewrite.input(2))):
        found = found if bound is None else _extreme(rewrite, op_type, found, bound)
    return [_computed(rewrite, found)]


def _computed(rewrite: Rewrite, value: ir.Value) -> ir.Value:
    """``value`` as the output of a new node; an input of the old one would get the name of its output."""
    return rewrite.op("Identity", value) if value is rewrite.x else value


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

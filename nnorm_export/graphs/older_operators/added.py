"""Operators that older opsets lack, as operators that they have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import onnx_ir as ir

from nnorm_export.graphs.older_operators.rewrite import Rewrite, Rules, before

RULES: Rules = {}
_before = partial(before, RULES)


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


@_before(14, "Trilu")
def _trilu(rewrite: Rewrite) -> Sequence[ir.Value]:
    """Keeps the elements whose column less row is at least k, or at most."""
    x, k, is_upper = rewrite.x, rewrite.input(1), rewrite.take_attribute("upper", 1)
    shape, zero, one = rewrite.op("Shape", x), rewrite.constant(0), rewrite.constant(1)
    rows, columns = (
        rewrite.op("Range", zero, rewrite.op("Gather", shape, rewrite.constant(axis), axis=0), one) for axis in (-2, -1)
    )
    distance = rewrite.op("Sub", columns, rewrite.op("Unsqueeze", rows, rewrite.constant([1])))
    limit = rewrite.op("Sub" if is_upper else "Add", zero if k is None else k, one)
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

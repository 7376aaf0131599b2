"""LayerNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from the trailing axes of each sample (NN eq. 3, 5–15)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from nnorm_export.domain.bodies import axes_of_rows
from nnorm_export.domain.operator import Array, Operator
from nnorm_export.domain.rows import EPSILON_AND_DELTA, normal_norm_of_rows

MOST_AXES = 8


def _statements(axes: int, arithmetic: str) -> str:
    """The body for a weight of this rank.

    The axes of X from `axis` on are the shape of weight, and so are the last ones: then `axis` is the rank's. A node
    whose weight does not fit X fails, in Reshape, instead of mixing the rows.
    (Only a Constant may refer to an attribute: onnx's reference evaluator passes it to no other operator.)
    """
    return f"""
{axes_of_rows(axes)}
    shape = Shape (x)
    one_axis = Constant <value_ints = [1]> ()
    axis_scalar = Constant <value_int: int = @axis> ()
    first_axis = Reshape (axis_scalar, one_axis)
    end = Constant <value_ints = [9223372036854775807]> ()
    normalized_shape = Slice (shape, first_axis, end)
    weight_from_axis = Reshape <allowzero = 1> (weight, normalized_shape)
    last_shape = Shape <start = {-axes}> (x)
    fitting_weight = Reshape <allowzero = 1> (weight_from_axis, last_shape)
    half_weight = Mul (fitting_weight, half)
    rows = Identity (x)
{normal_norm_of_rows(axes, arithmetic)}
    weighted = Mul (twice_psi, half_weight)
    y = Add (weighted, bias)
"""


def variant(parameters: Mapping[str, Array | None]) -> str:
    """The name of the body for a weight of this rank; that for one axis has none.

    The rank of a weight that is computed is what a negative attribute ``axis`` says.

    Raises:
        ValueError: there is none for this rank.
    """
    weight, axis = parameters["weight"], parameters.get("axis")
    axes = np.ndim(weight) if weight is not None else max(1, 0 if axis is None else -int(axis))
    if not 1 <= axes <= MOST_AXES:
        raise ValueError(f"it normalizes {axes} axes at a time, and a body takes 1 to {MOST_AXES}")
    return _name(axes)


def _name(axes: int) -> str:
    return "" if axes == 1 else f"{axes}_axes"


LAYER_NORMAL_NORM = Operator(
    op_type="LayerNormalNorm",
    parameters=("weight", "bias"),
    is_frozen=False,
    is_per_channel=False,
    attributes={"axis": ("int", -1), **EPSILON_AND_DELTA},
    variant=variant,
    statements={_name(axes): partial(_statements, axes) for axes in range(1, MOST_AXES + 1)},
)

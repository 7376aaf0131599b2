"""GroupNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from groups of channels of each sample (NN eq. 3, 5–15).

InstanceNormalNorm is GroupNormalNorm with one channel a group.
"""

from __future__ import annotations

from nnorm_export.domain.bodies import UNIT_STATISTICS, axes_of_rows, per_channel_affine
from nnorm_export.domain.operator import Operator
from nnorm_export.domain.rows import EPSILON_AND_DELTA, normal_norm_of_rows


def _statements(arithmetic: str) -> str:
    """The body, whose rows are X as [samples, groups, elements in a group].

    Reshape makes the rows by the shape [0, groups, elements], where 0 is the length of the same axis of X. (From a
    Concat ONNX Runtime makes [0, groups, -1], which it refuses for no samples.) The weight is brought into groups and
    back, so that a node whose groups do not divide the channels fails. With 0 groups the divisor is 1, and Reshape
    fails: some runtimes end the process where integers are divided by 0.
    """
    return f"""
{axes_of_rows(1)}
    shape = Shape (x)
    one_axis = Constant <value_ints = [1]> ()
    channels_and_spatial = Shape <start = 1> (x)
    sample_extent = ReduceProd <keepdims = 1> (channels_and_spatial)
    num_groups_scalar = Constant <value_int: int = @num_groups> ()
    groups = Reshape (num_groups_scalar, one_axis)
    no_groups = Constant <value_ints = [0]> ()
    has_no_groups = Equal (groups, no_groups)
    divisor = Where (has_no_groups, one_axis, groups)
    group_extent = Div (sample_extent, divisor)
    second = Constant <value_ints = [0, 1, 0]> ()
    third = Constant <value_ints = [0, 0, 1]> ()
    second_length = Mul (groups, second)
    third_length = Mul (group_extent, third)
    rows_shape = Add (second_length, third_length)
    rows = Reshape (x, rows_shape)
{normal_norm_of_rows(1, arithmetic)}
    twice_psi_of_x = Reshape (twice_psi, shape)
    channels = Shape (weight)
    group_channels = Div (channels, divisor)
    grouped = Concat <axis = 0> (groups, group_channels)
    weight_in_groups = Reshape <allowzero = 1> (weight, grouped)
    weight_of_channels = Reshape <allowzero = 1> (weight_in_groups, channels)
    half_weight = Mul (weight_of_channels, half)
{UNIT_STATISTICS}
{per_channel_affine("y", "twice_psi_of_x", "half_weight", "bias")}
"""


GROUP_NORMAL_NORM = Operator(
    op_type="GroupNormalNorm",
    parameters=("weight", "bias"),
    is_frozen=False,
    is_per_channel=True,
    attributes={"num_groups": ("int", 1), **EPSILON_AND_DELTA},
    statements={"": _statements},
)

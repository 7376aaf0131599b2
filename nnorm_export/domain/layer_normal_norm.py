"""LayerNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from the trailing axes of each sample (NN eq. 3, 5–15)."""

from __future__ import annotations

from nnorm_export.domain.operator import Operator
from nnorm_export.domain.rows import EPSILON_AND_DELTA, NORMAL_NORM_ROWS

LAYER_NORMAL_NORM = Operator(
    op_type="LayerNormalNorm",
    parameters=("weight", "bias"),
    is_frozen=False,
    is_per_channel=False,
    attributes={"axis": ("int", -1), **EPSILON_AND_DELTA},
    # X becomes [rows, elements in a row]: the elements of weight give the number of rows, the axes of X from `axis` on
    # the length of one. So a node whose weight does not fit X fails, in Reshape or Mul, instead of mixing the rows.
    # Rows without elements are divided by 1: some runtimes end the process where integers are divided by 0.
    # (Only a Constant may refer to an attribute: onnx's reference evaluator passes it to no other operator.)
    statements={
        "": f"""
    x = CastLike (X, weight)
    shape = Shape (x)
    one_axis = Constant <value_ints = [1]> ()
    flat = Constant <value_ints = [1, -1]> ()
    width_scalar = Size (weight)
    width = Reshape (width_scalar, one_axis)
    size_scalar = Size (x)
    size = Reshape (size_scalar, one_axis)
    divisor = Max (width, one_axis)
    num_rows = Div (size, divisor)
    axis_scalar = Constant <value_int: int = @axis> ()
    first_axis = Reshape (axis_scalar, one_axis)
    end = Constant <value_ints = [9223372036854775807]> ()
    normalized_shape = Slice (shape, first_axis, end)
    row_length = ReduceProd <keepdims = 1> (normalized_shape)
    rows_shape = Concat <axis = 0> (num_rows, row_length)
    rows = Reshape <allowzero = 1> (x, rows_shape)
    weight_row = Reshape (weight, flat)
    half_weight = Mul (weight_row, half)
    bias_row = Reshape (bias, flat)
{NORMAL_NORM_ROWS}
    weighted = Mul (twice_psi, half_weight)
    y_rows = Add (weighted, bias_row)
    y = Reshape <allowzero = 1> (y_rows, shape)
"""
    },
)

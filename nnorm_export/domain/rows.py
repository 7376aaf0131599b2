"""What the operators that normalize within a sample share: LayerNormalNorm and GroupNormalNorm."""

from __future__ import annotations

from nnorm_export.domain.bodies import (
    ESTIMATE_LMBDA,
    HALF_Z_OF_ROWS,
    MAGNITUDE,
    POWER_TRANSFORM,
    QUARTER_EXPONENTS,
    RESOLVE_EXPONENTS,
    SIGNED_LOGARITHM,
    STANDARDIZE_ROWS,
)

EPSILON_AND_DELTA = {"epsilon": ("float", 1e-5), "delta": ("float", 1e-5**0.5)}

# The attributes as scalars of the arithmetic's type. ONNX attributes are float32, in a float64 model too. A value that
# is negative, infinite or NaN becomes NaN, and so does Y: the kernels refuse such a node.
_EPSILON_AND_DELTA_VALUES = "".join(
    f"""
    {name}_f32 = Constant <value_float: float = @{name}> ()
    {name}_given = CastLike ({name}_f32, one)
    {name}_root = Sqrt ({name}_given)
    {name}_nothing = Mul ({name}_root, zero)
    {name}_value = Add ({name}_given, {name}_nothing)
"""
    for name in EPSILON_AND_DELTA
)


# h from rows of one sample set each, λ̂ and the exponents from h, and 2ψ(h); for with_rows().
NORMAL_NORM_ROWS = "".join(
    [
        _EPSILON_AND_DELTA_VALUES,
        STANDARDIZE_ROWS,
        MAGNITUDE,
        SIGNED_LOGARITHM,
        ESTIMATE_LMBDA,
        RESOLVE_EXPONENTS,
        QUARTER_EXPONENTS,
        HALF_Z_OF_ROWS,
        POWER_TRANSFORM,
    ]
)

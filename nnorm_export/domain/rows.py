"""What the operators that normalize within a sample share: LayerNormalNorm and GroupNormalNorm."""

from __future__ import annotations

from nnorm_export.domain.bodies import (
    HALF_Z_OF_ROWS,
    MAGNITUDE,
    QUARTER_EXPONENTS,
    RESOLVE_EXPONENTS,
    SIGNED_LOGARITHM,
    estimate_lmbda,
    power_transform,
    standardize_rows,
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


def normal_norm_of_rows(axes: int, arithmetic: str) -> str:
    """rows, of one sample set each -> h, λ̂ and the exponents from h, and twice_psi; needs ``axes_of_rows``."""
    return "".join(
        [
            _EPSILON_AND_DELTA_VALUES,
            standardize_rows(axes),
            MAGNITUDE,
            SIGNED_LOGARITHM,
            estimate_lmbda(axes),
            RESOLVE_EXPONENTS,
            QUARTER_EXPONENTS,
            HALF_Z_OF_ROWS,
            power_transform(arithmetic),
        ]
    )

"""BatchNormalNorm: y = weight·ψ(scale·x + shift) + bias per channel, with frozen exponents η₊ and η₋ (NN eq. 3)."""

from __future__ import annotations

from nnorm_export.domain.bodies import (
    HALF_EXPONENTS,
    MAGNITUDE,
    POWER_TRANSFORM,
    UNIT_STATISTICS,
    per_channel_affine,
)
from nnorm_export.domain.operator import Operator

BATCH_NORMAL_NORM = Operator(
    op_type="BatchNormalNorm",
    parameters=("scale", "shift", "exponent_pos", "exponent_neg", "weight", "bias"),
    is_frozen=True,
    is_per_channel=True,
    # The standardization is one BatchNormalization, which runtimes fold into a convolution before it.
    statement=f"""
    x = CastLike (X, scale)
{UNIT_STATISTICS}
{per_channel_affine("h", "x", "scale", "shift")}
    eta_pos = Identity (exponent_pos)
    eta_neg = Identity (exponent_neg)
{MAGNITUDE}{HALF_EXPONENTS}
{per_channel_affine("half_exponent", "is_positive", "half_difference", "half_neg")}
{POWER_TRANSFORM}
    half_weight = Mul (weight, half)
{per_channel_affine("y", "twice_psi", "half_weight", "bias")}
""",
)

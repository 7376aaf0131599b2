"""BatchNormalNorm: y = weight·ψ(scale·x + shift) + bias per channel, with frozen exponents η₊ and η₋ (NN eq. 3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnorm_export.domain.bodies import (
    HALF_EXPONENTS,
    MAGNITUDE,
    POWER_TRANSFORM,
    POWER_TRANSFORM_FAR_FROM_ZERO,
    QUARTER_EXPONENTS,
    SIGNED_LOGARITHM,
    UNIT_STATISTICS,
    per_channel_affine,
)
from nnorm_export.domain.operator import Array, Operator

# The body for nodes with an exponent near 0, which is a third longer.
NEAR_ZERO = "near_zero"
# The least exponent, for a weight of 1, of the short body: a Tanh with an absolute error of 1.2e-7 gives y one of 4e-6.
LEAST_EXPONENT = 1 / 16


def variant(parameters: Mapping[str, Array | None]) -> str:
    """The name of the body for a node with these parameters; None stands for one that is not a constant.

    The error of y by the short body is 2e·weight/η, where Tanh has the absolute error e.
    """
    known = [parameters[name] for name in ("exponent_pos", "exponent_neg", "weight")]
    exponent_pos, exponent_neg, weight = (np.array(np.nan) if value is None else np.abs(value) for value in known)
    least = LEAST_EXPONENT * np.maximum(weight, 1.0)
    # Comparisons with NaN are false.
    return "" if bool(np.all(exponent_pos >= least) and np.all(exponent_neg >= least)) else NEAR_ZERO


# The standardization is one BatchNormalization, which runtimes fold into a convolution before it.
_STANDARDIZED = f"""
{UNIT_STATISTICS}
{per_channel_affine("h", "x", "scale", "shift")}
    eta_pos = Identity (exponent_pos)
    eta_neg = Identity (exponent_neg)
{MAGNITUDE}"""
_WEIGHTED = f"""
    half_weight = Mul (weight, half)
{per_channel_affine("y", "twice_psi", "half_weight", "bias")}
"""

BATCH_NORMAL_NORM = Operator(
    op_type="BatchNormalNorm",
    parameters=("scale", "shift", "exponent_pos", "exponent_neg", "weight", "bias"),
    is_frozen=True,
    is_per_channel=True,
    variant=variant,
    statements={
        "": f"""{_STANDARDIZED}{HALF_EXPONENTS}
{per_channel_affine("half_exponent", "is_positive", "half_difference", "half_neg")}
{POWER_TRANSFORM_FAR_FROM_ZERO}{_WEIGHTED}""",
        NEAR_ZERO: f"""{_STANDARDIZED}{SIGNED_LOGARITHM}{QUARTER_EXPONENTS}
{per_channel_affine("even_half_z", "log_base", "even_part", "zeros")}
{per_channel_affine("odd_half_z", "signed_log", "odd_part", "zeros")}
    half_z = Add (even_half_z, odd_half_z)
{POWER_TRANSFORM}{_WEIGHTED}""",
    },
)

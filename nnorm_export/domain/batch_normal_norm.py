"""BatchNormalNorm: y = weight·ψ(scale·x + shift) + bias per channel, with frozen exponents η₊ and η₋ (NN eq. 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from nnorm_export.domain.bodies import (
    MAGNITUDE,
    POWER_TRANSFORM_FAR_FROM_ZERO,
    QUARTER_EXPONENTS,
    SIGNED_LOGARITHM,
    UNIT_STATISTICS,
    half_exponents,
    per_channel_affine,
    power_transform,
)
from nnorm_export.domain.operator import Array, Operator

# The body for nodes with an exponent near 0, which is a third longer.
NEAR_ZERO_BODY = "near_zero"
# The least exponent, for a weight of 1, of the short body: a Tanh with an absolute error of 1.2e-7 gives y one of 4e-6.
LEAST_EXPONENT_OF_SHORT_BODY = 1 / 16


def variant(parameters: Mapping[str, Array | None]) -> str:
    """The name of the body for a node with these parameters; None stands for one that is not a constant.

    The error of y by the short body is 2e·weight/η, where Tanh has the absolute error e.
    """
    known = [parameters[name] for name in ("exponent_pos", "exponent_neg", "weight")]
    exponent_pos, exponent_neg, weight = (np.array(np.nan) if value is None else np.abs(value) for value in known)
    least = LEAST_EXPONENT_OF_SHORT_BODY * np.maximum(weight, 1.0)
    # Comparisons with NaN are false.
    return "" if bool(np.all(exponent_pos >= least) and np.all(exponent_neg >= least)) else NEAR_ZERO_BODY


def statements(
    variant: str,
    arithmetic: str,
    scale: str = "scale",
    affine: Callable[[str, str, str, str], str] = per_channel_affine,
) -> str:
    """The body of this name.

    Args:
        variant, arithmetic: see :class:`.Operator`.
        scale: the name of the tensor of the scale.
        affine: the statements of y = scale·x + shift per channel. By default the standardization is one
            BatchNormalization, which runtimes fold into a convolution before it.
    """
    if variant == NEAR_ZERO_BODY:
        twice_psi = f"""{SIGNED_LOGARITHM}{QUARTER_EXPONENTS}
{affine("even_half_z", "log_base", "even_part", "zeros")}
{affine("odd_half_z", "signed_log", "odd_part", "zeros")}
    half_z = Add (even_half_z, odd_half_z)
{power_transform(arithmetic)}"""
    else:
        twice_psi = f"""{half_exponents(arithmetic)}
{affine("half_exponent", "is_positive", "half_difference", "half_neg")}
{POWER_TRANSFORM_FAR_FROM_ZERO}"""
    return f"""
{UNIT_STATISTICS}
{affine("h", "x", scale, "shift")}
    eta_pos = Identity (exponent_pos)
    eta_neg = Identity (exponent_neg)
{MAGNITUDE}{twice_psi}
    half_weight = Mul (weight, half)
{affine("y", "twice_psi", "half_weight", "bias")}
"""


BATCH_NORMAL_NORM = Operator(
    op_type="BatchNormalNorm",
    parameters=("scale", "shift", "exponent_pos", "exponent_neg", "weight", "bias"),
    is_frozen=True,
    is_per_channel=True,
    variant=variant,
    statements={name: partial(statements, name) for name in ("", NEAR_ZERO_BODY)},
)

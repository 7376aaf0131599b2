"""The formulas of normality normalization in ONNX primitives: the texts from which every operator's body is made.

**Power transform.** With a = |h|, the textbook s·((1 + a)^η − 1)/η cancels twice in floating point: in 1 + a for small
a, and in (…)^η − 1 for small exponents. ONNX has neither log1p nor expm1, and in ONNX Runtime Pow and Where are slow.
With b = fl(1 + u + a), u the machine epsilon of the arithmetic, t = log b and y = η·t/2, the body evaluates

    ψ(h) = h·t/(b − 1) · φ(2y),      φ(2y) = expm1(2y)/(2y) = tanh(y)/y · (exp(2y) + 1)/2

- h/(b − 1) replaces a by the number that the rounding of b left of it, so that log b and b − 1 belong to the same
  argument: the quotient is a smooth function of that argument and keeps full relative accuracy (Kahan's evaluation of
  log1p). Adding u keeps b above 1, so the quotient is never 0/0; it moves the argument by one rounding. Tools that
  convert a model to half precision round u away: then the least value of b − 1 keeps the quotient from 0/0.
- Exp and Tanh are vectorized in ONNX Runtime.

**Absolute errors.** Where y is near 0, the Tanh of many runtimes has an absolute error e of 6e-8 to 1.2e-7 in place of
a relative one; then tanh(y)/y has the error e/y. There are two forms for it:

- :func:`power_transform` takes the quotient at max(|y|, c) with c = 1/32, and adds k·(c² − y²) where |y| < c, with
  k = 1/3 − 2c²/15. That differs from tanh(y)/y − tanh(c)/c by less than c⁴/30, half a rounding. Nothing is divided by
  a small y, an exponent may be 0, and the error of the quotient is at most e/c.
- :data:`POWER_TRANSFORM_FAR_FROM_ZERO` is shorter, and has the error 2e/η. It is for exponents that are known to be
  large, see :func:`nnorm_export.domain.batch_normal_norm.variant`. The sign of h picks the exponent through
  p = HardSigmoid(1e30·s + ½) ∈ {0, 1} in η = η₋ + p·(η₊ − η₋), with s = h/(b − 1), which the formula has anyway. A
  HardSigmoid takes as long as one to two Muls, a Less with a Where as long as six, a Sign fourteen (ONNX Runtime 1.32).
  It is not taken of h itself: ONNX Runtime would compute it in the layout of the convolution before it, and change the
  layout of the map once more. At h = 0, p = ½ is harmless: ψ(0) = 0 whatever η. An exponent smaller than
  v = 2u·(|η₊| + |η₋|), about 5e-7, becomes v: the logarithmic branch within v·t/2 relative, without a branch.

**Estimate of λ** (NN eq. 5–15): the sums of :func:`nnorm_export.mathematics.estimate_lmbda` over each row, from the
same b and log b. A row is what lies in the last axes of ``rows``.

The texts are in ONNX's own syntax (``onnx.parser``); see :func:`function_proto` for how a body is put together. What
depends on the arithmetic (``float`` or ``double``) or on the number of axes of a row is a function of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import onnx
import onnx.parser

from nnorm_export.names import DOMAIN

# TensorRT's parser requires the names inside a function to differ from those of the tensors outside.
NAME_PREFIX = "nnorm__"


def axes_of_rows(axes: int) -> str:
    """The constants with the last ``axes`` axes, two in each, over which :func:`_row_mean` takes means in turn.

    The axes are constants, because several runtimes take no others. OpenCV 4 takes a mean over three axes at a time
    wrongly.
    """
    pairs = [[-axis - 1, -axis] for axis in range(1, axes, 2)] + ([[-axes]] if axes % 2 else [])
    return "\n".join(f"    axes_{index} = Constant <value_ints = {pair}> ()" for index, pair in enumerate(pairs))


def _row_mean(mean: str, values: str, axes: int) -> str:
    """mean = the mean of ``values`` over each row; needs :func:`axes_of_rows`."""
    names = [values, *(f"{mean}_of_axes_{index}" for index in range((axes - 1) // 2)), mean]
    return "\n".join(
        f"    {y} = ReduceMean <keepdims = 1> ({x}, axes_{index})"
        for index, (x, y) in enumerate(itertools.pairwise(names))
    )


def standardize_rows(axes: int) -> str:
    """The statements of h.

    Runtimes add a row in float32, in an order of their own, so that the mean is off by many roundings of itself. Where
    the mean is thousands of times the deviation, that would be the greatest error of h. The differences from such a
    mean are exact, and their own mean is its error.
    """
    return f"""
    # rows, epsilon_value -> h = (rows - mean) / sqrt(variance + epsilon), over each row
{_row_mean("mean", "rows", axes)}
    nearly_centred = Sub (rows, mean)
{_row_mean("error_of_mean", "nearly_centred", axes)}
    centred = Sub (nearly_centred, error_of_mean)
    centred_square = Mul (centred, centred)
{_row_mean("variance", "centred_square", axes)}
    variance_and_epsilon = Add (variance, epsilon_value)
    deviation = Sqrt (variance_and_epsilon)
    h = Div (centred, deviation)
"""


MAGNITUDE = """
    # h -> base = 1 + |h|, log_base, excess = |h|
    magnitude = Abs (h)
    base = Add (magnitude, one_and_epsilon)
    log_base = Log (base)
    base_less_one = Sub (base, one)
    excess = Clip (base_less_one, least_excess)
"""

SIGNED_LOGARITHM = """
    # h, log_base, excess -> signed_log = sign(h)·log(1 + |h|)
    log_per_h = Div (log_base, excess)
    signed_log = Mul (log_per_h, h)
"""


def estimate_lmbda(axes: int) -> str:
    return f"""
    # h, base, log_base, signed_log, excess, delta_value -> lmbda = 1 - L' / (L'' + delta), over each row
    base_log = Mul (base, log_base)
    d = Sub (base_log, excess)
    hd = Mul (h, d)
{_row_mean("mean_hd", "hd", axes)}
{_row_mean("mean_signed_log", "signed_log", axes)}
    slope = Sub (mean_hd, mean_signed_log)
{_row_mean("mean_d", "d", axes)}
    d_square = Mul (d, d)
    base_log_square = Mul (base_log, log_base)
    twice_d = Add (d, d)
    d_derivative = Sub (base_log_square, twice_d)
    h_d_derivative = Mul (excess, d_derivative)
{_row_mean("mean_h_d_derivative", "h_d_derivative", axes)}
{_row_mean("mean_d_square", "d_square", axes)}
    mean_curvature_terms = Add (mean_h_d_derivative, mean_d_square)
    square_of_mean_d = Mul (mean_d, mean_d)
    curvature_terms = Sub (mean_curvature_terms, square_of_mean_d)
    mean_hd_square = Mul (mean_hd, mean_hd)
    twice_mean_hd_square = Add (mean_hd_square, mean_hd_square)
    curvature = Sub (curvature_terms, twice_mean_hd_square)
    damped_curvature = Add (curvature, delta_value)
    newton_step = Div (slope, damped_curvature)
    lmbda = Sub (one, newton_step)
"""


def _shifted(half: str, exponent: str) -> str:
    """eta = 0 where |exponent| <= delta, else exponent moved away from zero by delta; ``half`` is pos or neg."""
    return f"""
    {half}_is_negative = Less ({exponent}, zero)
    {half}_shift = Where ({half}_is_negative, minus_delta, delta_value)
    {half}_shifted = Add ({exponent}, {half}_shift)
    {half}_unshifted_size = Abs ({exponent})
    {half}_is_logarithmic = LessOrEqual ({half}_unshifted_size, delta_value)
    eta_{half} = Where ({half}_is_logarithmic, zero, {half}_shifted)
"""


RESOLVE_EXPONENTS = f"""
    # lmbda, delta_value -> eta_pos, eta_neg
    minus_delta = Neg (delta_value)
    mirrored = Sub (two, lmbda)
{_shifted("pos", "lmbda")}{_shifted("neg", "mirrored")}"""


def _half_exponent(half: str) -> str:
    """half_pos or half_neg: half of eta, or of the least size that survives in a sum with the other."""
    return f"""
    {half}_vanishes = Less ({half}_size, vanishing)
    {half} = Where ({half}_vanishes, vanishing, eta_{half})
    half_{half} = Mul ({half}, half)
"""


def half_exponents(arithmetic: str) -> str:
    return f"""
    # h, excess, eta_pos, eta_neg (small beside h) -> h_per_excess, is_positive, half_neg, half_difference
    pos_size = Abs (eta_pos)
    neg_size = Abs (eta_neg)
    exponent_sizes = Add (pos_size, neg_size)
    vanishing = Mul (exponent_sizes, twice_epsilon)
{_half_exponent("pos")}{_half_exponent("neg")}
    half_difference = Sub (half_pos, half_neg)
    h_per_excess = Div (h, excess)
{_is_positive(arithmetic)}
"""


def _is_positive(arithmetic: str) -> str:
    """is_positive = 1 where h > 0, 0 where h < 0. ONNX Runtime has no HardSigmoid for float64."""
    if arithmetic == "float":
        return "    is_positive = HardSigmoid <alpha = 1e30, beta = 0.5> (h_per_excess)"
    return """
    steep = Constant <value = double {1e30}> ()
    steep_sign = Mul (h_per_excess, steep)
    steep_sign_and_half = Add (steep_sign, half)
    is_positive = Clip (steep_sign_and_half, zero, one)"""


# Quarters, because half_z is half of z: the exponents of the two signs are the sum and the difference of the two.
QUARTER_EXPONENTS = """
    # eta_pos, eta_neg (small beside h) -> even_part, odd_part
    exponent_sum = Add (eta_pos, eta_neg)
    even_part = Mul (exponent_sum, quarter)
    exponent_difference = Sub (eta_pos, eta_neg)
    odd_part = Mul (exponent_difference, quarter)
"""

HALF_Z_OF_ROWS = """
    # log_base, signed_log, even_part, odd_part -> half_z, where the exponents broadcast against h
    even_half_z = Mul (log_base, even_part)
    odd_half_z = Mul (signed_log, odd_part)
    half_z = Add (even_half_z, odd_half_z)
"""

# c in the module's formula: the least argument of Tanh. In float32 it is a number of half precision too.
_CLAMP_OF_TANH = {"float": 2.0**-5, "double": 2.0**-13}


def power_transform(arithmetic: str) -> str:
    return f"""
    # signed_log, half_z -> twice_psi
    half_z_size = Abs (half_z)
    divisor_of_tanh = Clip (half_z_size, near_zero)
    tanh_away_from_zero = Tanh (divisor_of_tanh)
    ratio_away_from_zero = Div (tanh_away_from_zero, divisor_of_tanh)
    half_z_square = Mul (half_z, half_z)
{_ratio_near_zero(arithmetic)}
    ratio = Add (ratio_away_from_zero, ratio_near_zero)
    z = Add (half_z, half_z)
    exp_z = Exp (z)
    exp_z_plus_one = Add (exp_z, one)
    twice_psi_per_log = Mul (ratio, exp_z_plus_one)
    twice_psi = Mul (twice_psi_per_log, signed_log)
"""


def _ratio_near_zero(arithmetic: str) -> str:
    """ratio_near_zero = max(0, k·(c² − half_z_square)), with c and k as in the module's formula."""
    c_square = _CLAMP_OF_TANH[arithmetic] ** 2
    k = 1 / 3 - 2 * c_square / 15
    if arithmetic == "float":
        return f"    ratio_near_zero = HardSigmoid <alpha = {-k!r}, beta = {k * c_square!r}> (half_z_square)"
    return f"""
    ratio_slope = Constant <value = double {{{k!r}}}> ()
    near_zero_square = Constant <value = double {{{c_square!r}}}> ()
    square_below = Sub (near_zero_square, half_z_square)
    square_below_or_zero = Relu (square_below)
    ratio_near_zero = Mul (square_below_or_zero, ratio_slope)"""


POWER_TRANSFORM_FAR_FROM_ZERO = """
    # log_base, h_per_excess, half_exponent -> twice_psi
    half_z = Mul (log_base, half_exponent)
    tanh_half_z = Tanh (half_z)
    z = Mul (half_z, two)
    exp_z = Exp (z)
    exp_z_plus_one = Add (exp_z, one)
    expm1_z = Mul (tanh_half_z, exp_z_plus_one)
    expm1_z_per_half_exponent = Div (expm1_z, half_exponent)
    twice_psi = Mul (expm1_z_per_half_exponent, h_per_excess)
"""

# ONNX's per-channel multiply-add is BatchNormalization with mean 0 and variance 1: one pass over a tensor of any rank
# where Mul and Add are two and need the channel axis aligned. The epsilon is a power of two, so that its sum with
# unit_variance is exactly 1; some runtimes refuse an epsilon below 1e-5.
UNIT_STATISTICS = """
    # weight, a vector with one entry a channel -> zeros, unit_variances
    zeros = Sub (weight, weight)
    unit_variances = Add (zeros, unit_variance)
"""
_UNIT_EPSILON = 2.0**-16


def per_channel_affine(y: str, x: str, scale: str, shift: str) -> str:
    """The statement y = scale·x + shift per channel; needs :data:`UNIT_STATISTICS`."""
    inputs = f"{x}, {scale}, {shift}, zeros, unit_variances"
    return f"    {y} = BatchNormalization <epsilon = {_UNIT_EPSILON!r}> ({inputs})"


def affine_along_the_last_axis(y: str, x: str, scale: str, shift: str) -> str:
    """The statements y = scale·x + shift per channel where the channels are the last axis of x; or y = scale·x."""
    if shift == "zeros":
        return f"    {y} = Mul ({x}, {scale})"
    return f"    {y}_unshifted = Mul ({x}, {scale})\n    {y} = Add ({y}_unshifted, {shift})"


def function_proto(
    op_type: str, inputs: Iterable[str], attributes: Iterable[str], body: str, opset: int, arithmetic: str
) -> onnx.FunctionProto:
    """The model-local function of an operator.

    Args:
        op_type: the operator's name in the domain ``nnorm``.
        inputs: formal inputs; the first is X.
        attributes: attribute declarations in ONNX syntax, with their defaults.
        body: statements that compute Y from the formal inputs and :func:`_constants`.
        opset: version of the standard operators, that of the model (a checker rule).
        arithmetic: ``float`` or ``double``, the type of the parameters and of every intermediate value.
    """
    inputs, attributes = list(inputs), list(attributes)
    attribute_list = f"<{', '.join(attributes)}>" if attributes else ""
    text = (
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n'
        f"{op_type} {attribute_list} ({', '.join(inputs)}) => (Y) {{\n{_constants(arithmetic)}\n{body}\n}}"
    )
    function: onnx.FunctionProto = onnx.parser.parse_function(text)
    for names in (function.input, function.output, *(io for node in function.node for io in (node.input, node.output))):
        names[:] = [NAME_PREFIX + name for name in names]
    return function


def _constants(arithmetic: str) -> str:
    epsilon = float(np.finfo(np.float64 if arithmetic == "double" else np.float32).eps)
    scalars = {"zero": 0.0, "quarter": 0.25, "half": 0.5, "one": 1.0, "two": 2.0}
    scalars |= {"one_and_epsilon": 1.0 + epsilon, "twice_epsilon": 2.0 * epsilon, "unit_variance": 1.0 - _UNIT_EPSILON}
    # Less than epsilon, and in float32 a number of half precision too, the least.
    scalars |= {"least_excess": 0.5 * epsilon, "near_zero": _CLAMP_OF_TANH[arithmetic]}
    lines = [f"    {name} = Constant <value = {arithmetic} {{{value!r}}}> ()" for name, value in scalars.items()]
    return "\n".join(lines)

#!/usr/bin/env python3
"""Derives the float coefficients of include/nnorm/mathematics.h and compares them with those in it.

For f(x) = x·P(x) the polynomial P minimizes the greatest relative error of f over an interval. That is a weighted
least squares problem whose weights follow the error (Lawson's algorithm). Rounding all coefficients to float32 at the
end would lose accuracy, so they are rounded one at a time, lowest order first, and the rest is fitted again.

Needs NumPy. Exits with 1 if the header has other coefficients.
"""

import argparse
import math
import pathlib
import re
import sys

import numpy as np

HEADER = pathlib.Path(__file__).parent.parent / "include" / "nnorm" / "mathematics.h"
POINTS = 1201  # in the interval, denser toward its ends (Chebyshev), where the error is greatest


def log2_1p_over_m(m):
    """log2(1 + m)/m."""
    return np.where(m == 0, 1.0, np.log1p(m) / np.where(m == 0, 1.0, m)) / math.log(2)


def exp2_m1_over_f(f):
    """(2^f - 1)/f."""
    return np.where(f == 0, math.log(2), np.expm1(f * math.log(2)) / np.where(f == 0, 1.0, f))


# The function in the header, f(x)/x, the interval of x, the degree of P.
POLYNOMIALS = [
    ("log2_1p_of_mantissa", log2_1p_over_m, math.sqrt(0.5) - 1, math.sqrt(2) - 1, 8),
    ("exp2_m1_of_fraction", exp2_m1_over_f, -0.5, 0.5, 5),
]


def lawson(basis, target, iterations):
    """The coefficients c with the least max|basis·c - target|, and that maximum."""
    weights = np.ones(len(target))
    best, least = None, math.inf
    for _ in range(iterations):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs(basis @ coefficients - target)
        if error.max() < least:
            best, least = coefficients, error.max()
        weights *= (error + 1e-30) ** 0.8  # a power below 1 keeps the iteration from oscillating
        weights /= weights.sum()
    return best, least


def fit(function, low, high, degree, iterations):
    """P's coefficients in float32, its greatest relative error, and that of the best one in float64."""
    x = (low + high) / 2 - (high - low) / 2 * np.cos(np.pi * np.arange(POINTS) / (POINTS - 1))
    basis = x[:, None] ** np.arange(degree + 1) / function(x)[:, None]  # relative: the target is 1 everywhere
    target = np.ones(POINTS)
    _, in_float64 = lawson(basis, target, 3 * iterations)
    rounded = []
    for order in range(degree + 1):
        rest = target - basis[:, :order] @ np.array(rounded)
        coefficients, _ = lawson(basis[:, order:], rest, iterations)
        rounded.append(float(np.float32(coefficients[0])))
    return rounded, np.abs(basis @ np.array(rounded) - target).max(), in_float64


def in_header(name):
    """The float literals in the body of the header's function for float."""
    body = re.search(rf"float {name}\(float \w+\) {{(.*?)\n}}", HEADER.read_text(encoding="utf-8"), re.DOTALL).group(1)
    return sorted(np.float32(literal) for literal in re.findall(r"-?\d+\.\d+(?=f)", body))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--iterations", type=int, default=150, help="of Lawson's algorithm, for each coefficient (default 150)"
    )
    iterations = parser.parse_args().iterations
    all_same = True
    for name, function, low, high, degree in POLYNOMIALS:
        coefficients, error, in_float64 = fit(function, low, high, degree, iterations)
        same = sorted(np.float32(coefficients)) == in_header(name)
        all_same &= same
        print(f"{name}: relative error {error:.2e} on [{low:.6g}, {high:.6g}], {in_float64:.2e} unrounded")
        print("  " + ", ".join(f"{coefficient:.9g}f" for coefficient in coefficients))
        print(f"  {'the same as' if same else 'DIFFERENT from those'} in {HEADER.name}")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())

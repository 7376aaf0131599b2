"""Constants of ψ by polynomials, as the kernels have them, for Inductor and for the training kernels for GPUs.

``custom_ops/scripts/fit_polynomials.py`` computes the coefficients; ``tests/custom_ops/test_polynomials.py`` compares
them and the least exponents with the kernels' (``custom_ops/include/nnorm/mathematics.h``).
"""

from __future__ import annotations

import torch

# An exponent of less magnitude is replaced by this one. It is Format::least_exponent of the kernels.
LEAST_EXPONENT = {torch.float32: 2.0**-26, torch.float64: 2.0**-60}

# log₂(1 + m) and 2^f − 1 without their constant term, lowest order first.
LOG2_1P = (
    1.44269502,
    -0.721347392,
    0.48090896,
    -0.360700577,
    0.287953496,
    -0.239014849,
    0.215480775,
    -0.206787512,
    0.125843421,
)
EXP2_M1 = (0.693147182, 0.240226492, 0.0555036739, 0.00961831119, 0.00133873872, 0.000153820118)

"""What may follow a BatchNormalNorm and be folded into its node: the steps of an *epilogue*.

    BatchNormalNormRelu      Y = max(0, weight·ψ(scale·X + shift) + bias)
    BatchNormalNormAddRelu   Y = max(0, weight·ψ(scale·X + shift) + bias + residual)

X and ``residual`` have one dtype and one shape. The arithmetic has the parameters' dtype and rounds once, on output,
where separate nodes round y to the dtype of X before they add. NaN stays NaN, as in PyTorch.

A traced model has the norm, the sum and the ReLU apart; :mod:`nnorm_export.exporting.epilogues` finds them in the
translated graph.
"""

from __future__ import annotations

import numpy as np

from nnorm_export.domain.operator import Array, Step


def _relu(y: Array) -> Array:
    return np.maximum(y, np.zeros((), y.dtype))


ADD = Step("Add", np.add, operand="residual")
RELU = Step("Relu", _relu)

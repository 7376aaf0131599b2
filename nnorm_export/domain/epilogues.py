"""What may follow a BatchNormalNorm and be folded into its node: the steps of an *epilogue*.

    BatchNormalNormRelu      Y = max(0, weight·ψ(scale·X + shift) + bias)
    BatchNormalNormAddRelu   Y = max(0, weight·ψ(scale·X + shift) + bias + residual)

X and ``residual`` have one dtype and one shape. The arithmetic has the parameters' dtype and rounds once, on output,
where separate nodes round y to the dtype of X before they add. NaN stays NaN, as in PyTorch.

Between quantized tensors, where a node is a table, an activation of mobile networks costs nothing:

    QuantizedBatchNormalNormHardSwish    y·clip(y/6 + 1/2, 0, 1)
    QuantizedBatchNormalNormSwish        y/(1 + exp(−y)), PyTorch's SiLU

A traced model has the norm, the sum and the ReLU apart; :mod:`nnorm_export.graphs.fuse_epilogues` finds them in the
translated graph.
"""

from __future__ import annotations

import numpy as np

from nnorm_export.domain.operator import Array, Step


def _relu(y: Array) -> Array:
    return np.maximum(y, np.zeros((), y.dtype))


def _hard_swish(y: Array) -> Array:
    gate: Array = np.clip(y / 6 + 0.5, 0, 1)
    return y * gate


def _swish(y: Array) -> Array:
    with np.errstate(over="ignore"):  # y/∞ is 0, as it should be
        return np.asarray(y / (1 + np.exp(-y)))


ADD = Step("Add", np.add, operand="residual")
RELU = Step("Relu", _relu)
HARD_SWISH = Step("HardSwish", _hard_swish, gate=f"HardSigmoid <alpha = {1 / 6!r}, beta = 0.5>")
SWISH = Step("Swish", _swish, gate="Sigmoid")

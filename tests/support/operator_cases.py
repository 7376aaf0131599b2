"""The cases of the operators, and their expected outputs by the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
from node_models import BATCH_OPERATORS, DELTA

# One rounding of the output to its dtype, and what the float32 arithmetic adds; relative to max(1, |y|).
BOUNDS = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-13}
# Apart from nnorm_export.domain, whose epilogues are tested.
EPILOGUES: dict[str, Callable[[Any, Any], Any]] = {
    "BatchNormalNorm": lambda y, _: y,
    "BatchNormalNormRelu": lambda y, _: np.maximum(y, 0.0),
    "BatchNormalNormAddRelu": lambda y, residual: np.maximum(y + residual, 0.0),
}
# Spatial extents on either side of the kernels' least, 16, with and without samples to share parameters; last, one that
# is spread over threads.
BATCH_SHAPES = [
    (4, 7),
    (4, 7, 0, 5),
    (1, 1),
    (0, 7),
    (3, 7, 5),
    (2, 7, 3, 5),
    (2, 7, 0, 5),
    (2, 7, 1, 2, 3),
    (5, 7, 3, 5),
    (3, 7, 83, 61),
]
CASES: list[tuple[str, tuple[int, ...], dict[str, int]]] = [
    *((op_type, shape, {}) for op_type in BATCH_OPERATORS for shape in BATCH_SHAPES),
    ("LayerNormalNorm", (37,), {"axis": -1}),
    ("LayerNormalNorm", (3, 1), {"axis": -1}),
    ("LayerNormalNorm", (2, 5, 37), {"axis": -1}),
    ("LayerNormalNorm", (0, 5, 37), {"axis": -1}),
    ("LayerNormalNorm", (5, 0), {"axis": -1}),
    ("LayerNormalNorm", (4, 0, 3), {"axis": 1}),
    ("LayerNormalNorm", (3, 6, 10), {"axis": -2}),
    ("LayerNormalNorm", (3, 6, 10), {"axis": 1}),
    ("LayerNormalNorm", (67, 768), {"axis": -1}),
    ("LayerNormalNorm", (3, 4099), {"axis": -1}),
    ("GroupNormalNorm", (4, 8), {"num_groups": 2}),
    ("GroupNormalNorm", (3, 8, 11), {"num_groups": 8}),
    ("GroupNormalNorm", (0, 8, 3), {"num_groups": 4}),
    ("GroupNormalNorm", (2, 8, 3, 5), {"num_groups": 1}),
    ("GroupNormalNorm", (2, 8, 1, 1), {"num_groups": 8}),
    ("GroupNormalNorm", (2, 6, 2, 3, 4), {"num_groups": 3}),
    ("GroupNormalNorm", (2, 6, 3, 3), {"num_groups": 3}),
    ("GroupNormalNorm", (2, 6, 43, 53), {"num_groups": 2}),
]


def expected_output(op_type: str, values: dict[str, np.ndarray], num_groups: int, normalized_axes: int) -> np.ndarray:
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    x, weight, bias = wide["X"], wide["weight"], wide["bias"]
    if x.size == 0:
        return x
    attributes = {"eps": float(np.float32(1e-5)), "delta": float(np.float32(DELTA)), "weight": weight, "bias": bias}
    per_channel = (-1, *[1] * (x.ndim - 2))
    if op_type in BATCH_OPERATORS:
        scale, shift, lmbda = (wide[name].reshape(per_channel) for name in ("scale", "shift", "exponent_pos"))
        psi = oracle.power_transform(scale * x + shift, lmbda, 0.0)
        y = weight.reshape(per_channel) * psi + bias.reshape(per_channel)
        return EPILOGUES[op_type](y, wide.get("residual"))
    if op_type == "LayerNormalNorm":
        return oracle.layer_normal_norm(x, normalized_axes, **attributes)
    return oracle.group_normal_norm(x, num_groups, **attributes)

"""Models of one normalization, and values for its inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from nnorm_export.domain import OPERATORS
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

DELTA = 1e-5**0.5
ELEMENTS = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "float64": (TensorProto.DOUBLE, np.float64),
}
# The attributes of a node whose input has the shape [3, 8, 5]; BatchNormalNorm and its epilogues have none.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "LayerNormalNorm": {"axis": -1, "epsilon": 1e-5, "delta": DELTA},
    "GroupNormalNorm": {"num_groups": 4, "epsilon": 1e-5, "delta": DELTA},
}
BATCH_OPERATORS = [op_type for op_type, operator in OPERATORS.items() if operator.norm == "BatchNormalNorm"]


def single_node_model(
    path: Any,
    op_type: str,
    values: dict[str, np.ndarray],
    opset: int = 20,
    variant: str | None = None,
    constants: Collection[str] = (),
    **attributes: Any,
) -> str:
    """A model of one node with a body, by default the one for ``values``; of inputs of any length, or constants."""
    operator = OPERATORS[op_type]
    variant = operator.variant(values) if variant is None else variant
    assert tuple(values) == operator.inputs
    element = {np.dtype(kind): number for number, kind in ELEMENTS.values()}
    node = helper.make_node(op_type, list(values), ["Y"], name="node", domain=DOMAIN, overload=variant, **attributes)
    infos = [
        helper.make_tensor_value_info(name, element[value.dtype], [f"{name}{axis}" for axis in range(value.ndim)])
        for name, value in values.items()
        if name not in constants
    ]
    weights = [numpy_helper.from_array(values[name], name) for name in constants]
    x = values["X"]
    output = helper.make_tensor_value_info("Y", element[x.dtype], [f"X{axis}" for axis in range(x.ndim)])
    arithmetic = "double" if x.dtype == np.float64 else "float"
    model = helper.make_model(
        helper.make_graph([node], "graph", infos, [output], weights),
        functions=[operator.function(opset, arithmetic, variant, overload=variant)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return str(path)


def make_values(op_type: str, shape: tuple[int, ...], dtype: str, normalized_axes: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(shape) + len(shape))
    kind, arithmetic = ELEMENTS[dtype][1], np.float64 if dtype == "float64" else np.float32
    parameter_shape = shape[len(shape) - normalized_axes :] if op_type == "LayerNormalNorm" else (shape[1],)
    values = {"X": (2 * rng.standard_normal(shape)).astype(kind)}
    if op_type in BATCH_OPERATORS:
        lmbda = np.resize([0.0, 1.0, 2.0, 0.3, -0.7, 1.6, 3.1], shape[1])
        values["scale"] = rng.uniform(0.5, 2, shape[1]).astype(arithmetic)
        values["shift"] = rng.standard_normal(shape[1]).astype(arithmetic)
        values["exponent_pos"] = lmbda.astype(arithmetic)
        values["exponent_neg"] = (2 - lmbda).astype(arithmetic)
    values["weight"] = rng.uniform(-2, 2, parameter_shape).astype(arithmetic)
    values["bias"] = rng.standard_normal(parameter_shape).astype(arithmetic)
    values |= {name: (2 * rng.standard_normal(shape)).astype(kind) for name in OPERATORS[op_type].operands}
    return values

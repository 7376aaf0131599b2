"""Bodies in runtimes whose functions have absolute errors, or that compute in half precision: every body is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import oracle
import pytest
from node_models import ATTRIBUTES, BATCH_OPERATORS, DELTA
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from operator_cases import EPILOGUES

from nnorm_export.domain import OPERATORS
from nnorm_export.domain.batch_normal_norm import LEAST_EXPONENT_OF_SHORT_BODY, NEAR_ZERO_BODY
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

Array = np.ndarray[Any, np.dtype[Any]]

ERROR = 1.2e-7  # of Tanh, measured in runtimes for browsers and for phones
TOLERANCE = 1e-5  # relative to 1 + |y|
SIGNS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "above": lambda _: 1.0,
    "below": lambda _: -1.0,
    "random": lambda shape: np.random.default_rng(0).choice([-1.0, 1.0], shape),
}
EXACT = {"Tanh": np.tanh, "Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt}
CASES = [(op_type, variant) for op_type, operator in OPERATORS.items() for variant in operator.statements]


def with_errors(sign: Callable[[tuple[int, ...]], Any]) -> list[type[OpRun]]:
    """Operators of onnx's reference evaluator whose results are off by :data:`ERROR`."""

    def run(self: Any, x: Array) -> tuple[Array]:
        exact = EXACT[type(self).__name__](x.astype(np.float64))
        return ((exact + ERROR * sign(x.shape)).astype(x.dtype),)

    return [type(name, (OpRun,), {"op_domain": "", "_run": run}) for name in EXACT]


def values_of(op_type: str, variant: str) -> tuple[dict[str, Array], Array]:
    """Inputs of a node that this body is for, with λ at its edges and everywhere between, and y in float64."""
    rng = np.random.default_rng(1)
    if op_type not in BATCH_OPERATORS:
        return _rows(op_type, axes_of(variant), rng)
    near = [0.0, 1e-9, -1e-6, 1e-4, 1e-3, DELTA, 0.01, 0.02, 0.031, 0.05, 0.1]
    lmbda = np.concatenate([[1.0], near, 2 - np.array(near), rng.uniform(-2, 4, 41)])
    weight = rng.uniform(-2, 2, len(lmbda))
    if not variant:  # the least exponents that it is used for, of either sign
        lmbda = np.concatenate(
            [np.linspace(0.125, 1.875, 20), [-0.125, 2.125, -1.0, 3.0], np.full(9, LEAST_EXPONENT_OF_SHORT_BODY)]
        )
        weight = np.concatenate([np.full(24, 2.0), np.linspace(-1, 1, 9)])
    wide = {"exponent_pos": lmbda, "exponent_neg": 2 - lmbda, "weight": weight}
    wide["bias"], wide["scale"] = rng.standard_normal((2, len(lmbda)))
    wide["shift"] = rng.standard_normal(len(lmbda))
    h = np.concatenate([[0.0], np.geomspace(1e-9, 50, 400)])
    wide["X"] = np.concatenate([h, -h])[:, None] * np.ones(len(lmbda))
    wide["scale"][:], wide["shift"][:] = 1.0, 0.0
    values = {name: wide[name].astype(np.float32) for name in OPERATORS[op_type].inputs if name in wide}
    exact = {name: value.astype(np.float64) for name, value in values.items()}
    halves = [
        oracle.power_transform(exact["X"], eta, 0.0) for eta in (exact["exponent_pos"], 2 - exact["exponent_neg"])
    ]
    y = exact["weight"] * np.where(exact["X"] >= 0, *halves) + exact["bias"]
    for name in OPERATORS[op_type].operands:
        values[name] = rng.standard_normal(y.shape).astype(np.float32)
    return values, EPILOGUES[op_type](y, values.get("residual"))


def axes_of(variant: str) -> int:
    return int(variant.removesuffix("_axes") or 1)


def _rows(op_type: str, axes: int, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    """Rows of every skewness: their λ̂ are on either side of 0 and of 2, and close to them."""
    channels = 4 if op_type == "GroupNormalNorm" else 1
    skewness = np.linspace(-0.7, 0.7, 150 * channels)[:, None]
    noise = rng.standard_normal((len(skewness), 96))
    x = (noise + skewness * noise**2).astype(np.float32)
    normalized = {1: (96,), 2: (6, 16)}.get(axes, (*[1] * (axes - 3), 4, 6, 4))
    shape = (channels,) if channels > 1 else normalized
    x = x.reshape(-1, channels, 96) if channels > 1 else x.reshape(-1, *shape)
    weight, bias = rng.uniform(-2, 2, shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    options = {"eps": float(np.float32(1e-5)), "delta": float(np.float32(DELTA))}
    given = {"weight": weight.astype(np.float64), "bias": bias.astype(np.float64)}
    wide = x.astype(np.float64)
    if channels > 1:
        y = oracle.group_normal_norm(wide, channels, **options, **given)
    else:
        y = oracle.layer_normal_norm(wide, axes, **options, **given)
    return {"X": x, "weight": weight, "bias": bias}, y


def model_of(op_type: str, variant: str, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    operator = OPERATORS[op_type]
    attributes = ATTRIBUTES.get(op_type, {}) | ({"axis": -axes_of(variant)} if op_type == "LayerNormalNorm" else {})
    node = helper.make_node(op_type, operator.inputs, ["Y"], domain=DOMAIN, **attributes)
    tensors = [helper.make_tensor_value_info(name, dtype, None) for name in (*operator.inputs, "Y")]
    return helper.make_model(
        helper.make_graph([node], "graph", tensors[:-1], tensors[-1:]),
        functions=[operator.function(20, "float", variant)],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(("op_type", "variant"), CASES)
def test_absolute_errors_of_functions_stay_small(op_type: str, variant: str, sign: str) -> None:
    values, expected = values_of(op_type, variant)
    assert OPERATORS[op_type].variant(values) == variant
    # Inlined, because the evaluator does not take new operators into functions.
    model = onnx.inliner.inline_local_functions(model_of(op_type, variant))
    runner = ReferenceEvaluator(model, new_ops=with_errors(SIGNS[sign]))
    (y,) = runner.run(None, values)
    size = 1 + np.abs(expected) + np.abs(values.get("residual", 0.0))  # the sum with the residual may cancel
    share = np.abs(y - expected) / (TOLERANCE * size)
    assert share.max() <= 1


def round_constants(model: onnx.ModelProto, dtype: type) -> None:
    """Rounds the scalars of the bodies to half precision, as converters of models do, and gives them this dtype."""
    for function in model.functions:
        for node in function.node:
            value = node.attribute[0].t if node.op_type == "Constant" else None
            if value is not None and value.data_type == TensorProto.FLOAT:
                array = numpy_helper.to_array(value).astype(np.float16).astype(dtype)
                value.CopyFrom(numpy_helper.from_array(array))


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["constants", "everything"])
@pytest.mark.parametrize(("op_type", "variant"), CASES)
def test_half_precision_makes_no_nan(op_type: str, variant: str, dtype: type) -> None:
    values, expected = values_of(op_type, variant)
    model = model_of(op_type, variant, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    round_constants(model, dtype)
    with np.errstate(over="ignore"):
        (y,) = ReferenceEvaluator(model).run(None, {name: value.astype(dtype) for name, value in values.items()})
    assert y.dtype == dtype
    assert not np.isnan(y).any()
    assert np.isfinite(y[np.abs(expected) < 1e3]).all()
    assert np.median(np.abs(y - expected) / (1 + np.abs(expected))) <= 1e-2


def test_the_body_is_chosen_by_the_exponents_and_the_weight() -> None:
    def chosen(exponent: float, weight: float) -> str:
        given = {"exponent_pos": np.array([1.0, exponent]), "exponent_neg": np.array([1.0, 2 - exponent])}
        return OPERATORS["BatchNormalNorm"].variant({**given, "weight": np.array([1.0, weight])})

    least = LEAST_EXPONENT_OF_SHORT_BODY
    assert chosen(least, 1.0) == chosen(2 - least, -1.0) == chosen(-least, 0.0) == ""
    assert chosen(0.06, 1.0) == chosen(1.94, 0.0) == chosen(0.5, 10.0) == chosen(np.nan, 1.0) == NEAR_ZERO_BODY
    unknown = {"exponent_pos": None, "exponent_neg": None, "weight": None}
    assert OPERATORS["BatchNormalNorm"].variant(unknown) == NEAR_ZERO_BODY

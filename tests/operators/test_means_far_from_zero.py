"""Rows whose mean is far from 0: LayerNormalNorm and GroupNormalNorm, by kernel and by body, against the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from backends import BACKENDS, needs_kernels, open_with
from node_models import ATTRIBUTES, ELEMENTS, make_values, single_node_model
from onnx import helper
from operator_cases import BOUNDS, expected_output

from nnorm_export.domain import OPERATORS
from nnorm_export.domain.bodies import NAME_PREFIX
from nnorm_export.domain.known_bodies import KNOWN_BODIES, digest

# Rows of 1, of an odd number and of 4096 elements; over several axes; more elements than one running sum takes well.
CASES = {
    "layer of 1": ("LayerNormalNorm", (3, 1), {"axis": -1}),
    "layer of 7": ("LayerNormalNorm", (5, 7), {"axis": -1}),
    "layer of 4096": ("LayerNormalNorm", (3, 4096), {"axis": -1}),
    "layer over 2 axes": ("LayerNormalNorm", (2, 33, 31), {"axis": -2}),
    "layer over 3 axes": ("LayerNormalNorm", (2, 3, 17, 11), {"axis": -3}),
    "group of 1": ("GroupNormalNorm", (2, 6, 1, 1), {"num_groups": 6}),
    "group of 45": ("GroupNormalNorm", (2, 6, 3, 5), {"num_groups": 2}),
    "group of 4096": ("GroupNormalNorm", (1, 4, 64, 32), {"num_groups": 2}),
    "group of 18432": ("GroupNormalNorm", (1, 2, 96, 96), {"num_groups": 1}),
    "instance of 111": ("GroupNormalNorm", (2, 3, 3, 37), {"num_groups": 3}),
    "instance of 4096": ("GroupNormalNorm", (1, 2, 64, 64), {"num_groups": 2}),
}


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("case", CASES)
def test_a_mean_far_from_zero_costs_no_digits(case: str, dtype: str, tmp_path: Path) -> None:
    """The bounds are those of rows around 0: what a dtype cannot hold is lost in X, not in the norm."""
    op_type, shape, attributes = CASES[case]
    axes = len(shape) - attributes.get("axis", -1) % len(shape)
    values = make_values(op_type, shape, dtype, axes)
    node_attributes = {**ATTRIBUTES[op_type], **attributes}
    path = single_node_model(tmp_path / "node.onnx", op_type, values, **node_attributes)
    runners = {backend: open_with(path, backend) for backend in BACKENDS}
    spread = np.random.default_rng(3).standard_normal(shape)
    for mean in (1.0, 1e2, -1e4):
        values["X"] = (spread + mean).astype(values["X"].dtype)
        # Less the mean, which is exact here: float64 would lose digits of it too.
        exact = values | {"X": values["X"].astype(np.float64) - mean}
        expected = expected_output(op_type, exact, attributes.get("num_groups", 1), axes)
        for backend, runner in runners.items():
            error = np.abs(runner(**values)[0].astype(np.float64) - expected) / np.maximum(1, np.abs(expected))
            assert error.max() <= BOUNDS[dtype], f"{backend}, mean {mean}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 0.1, -12345.678])
@pytest.mark.parametrize("op_type", ATTRIBUTES)
def test_a_row_of_equal_elements_gives_the_bias(op_type: str, offset: float, backend: str, tmp_path: Path) -> None:
    """Their mean, 0.1 for example, is not exact in any dtype."""
    values = make_values(op_type, (3, 8, 333), "float32")
    values["X"][:] = offset
    path = single_node_model(tmp_path / "node.onnx", op_type, values, **ATTRIBUTES[op_type])
    bias = values["bias"] if op_type == "LayerNormalNorm" else values["bias"][:, None]
    (y,) = open_with(path, backend)(**values)
    np.testing.assert_allclose(y, np.broadcast_to(bias, y.shape), rtol=0, atol=1e-5)


def with_the_older_body(path: str, op_type: str) -> str:
    """Gives the file the body of versions that centred a row once; returns the digest of that body."""
    model = onnx.load(path)
    (function,) = model.functions
    nodes = {node.output[0].removeprefix(NAME_PREFIX): node for node in function.node}
    for name in ("error_of_mean", "centred", "square_of_mean_d", "curvature_terms"):
        function.node.remove(nodes[name])
    nodes["nearly_centred"].output[0] = nodes["centred"].output[0]
    d, mean_d, spread = (NAME_PREFIX + name for name in ("d", "mean_d", "d_spread"))
    nodes["d_square"].input[:] = [spread, spread]
    nodes["curvature"].input[0] = NAME_PREFIX + "mean_curvature_terms"
    function.node.insert([*function.node].index(nodes["d_square"]), helper.make_node("Sub", [d, mean_d], [spread]))
    onnx.save(model, path)
    return digest(function)


@needs_kernels
@pytest.mark.parametrize("op_type", ATTRIBUTES)
def test_files_with_the_older_body_are_known(op_type: str, tmp_path: Path) -> None:
    """It centred once. A kernel still runs such a node, and the body runs as the file says."""
    values = make_values(op_type, (3, 8, 5), "float32")
    path = single_node_model(tmp_path / "node.onnx", op_type, values, **ATTRIBUTES[op_type])
    older = with_the_older_body(path, op_type)
    assert older in KNOWN_BODIES[op_type]["float"][len(OPERATORS[op_type].statements) :]
    expected = expected_output(op_type, values, ATTRIBUTES[op_type].get("num_groups", 1), 1)
    for backend in BACKENDS:
        (y,) = open_with(path, backend)(**values)
        np.testing.assert_allclose(y, expected, rtol=4e-6, atol=4e-6)

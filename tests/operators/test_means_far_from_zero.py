"""Rows whose mean is far from 0: LayerNormalNorm and GroupNormalNorm, by kernel and by body, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import oracle
import pytest
import torch
from backends import BACKENDS, needs_kernels, open_with
from node_models import ATTRIBUTES, DELTA, ELEMENTS, make_values, single_node_model
from onnx import helper
from operator_cases import BOUNDS, expected_output
from torch import Tensor, nn

from nnorm_export import export, freeze
from nnorm_export.domain import OPERATORS
from nnorm_export.domain.bodies import NAME_PREFIX
from nnorm_export.domain.known_bodies import KNOWN_BODIES, digest
from nnorm_export.layers import (
    BMLV,
    LMBV,
    EvoNormS0,
    GroupNormalNorm,
    InstanceNormalNorm1d,
    LayerNormalNorm,
    PreLayerNorm,
    RegNorm,
    SwitchableNorm,
)

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


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., oracle.Array]]] = {
    "layer": (lambda: LayerNormalNorm(333), lambda x, **scalars: oracle.layer_normal_norm(x, 1, **scalars)),
    "group": (lambda: GroupNormalNorm(6, 2), lambda x, **scalars: oracle.group_normal_norm(x, 2, **scalars)),
    "instance": (lambda: InstanceNormalNorm1d(6), lambda x, **scalars: oracle.group_normal_norm(x, 6, **scalars)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_and_their_frozen_forms_keep_the_digits_too(layer: str) -> None:
    """Files of PyTorch's formats compute as the frozen form does, and every file is compared with the layer."""
    make, exact = LAYERS[layer]
    trained = make().eval()
    deltas = torch.randn(4, 6, 333, generator=torch.Generator().manual_seed(0))
    for mean in (1.0, 1e2, -1e4):
        x = deltas + mean
        expected = torch.from_numpy(exact(x.double().numpy() - mean, eps=1e-5, delta=DELTA))
        for module in (trained, freeze(trained)):
            torch.testing.assert_close(module(x).double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_far_from_zero(layer: str) -> None:
    module = LAYERS[layer][0]().double().eval()
    x = torch.randn(2, 6, 333, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.randn_like(x)
    found = []
    for mean in (0.0, 2.0**13):  # adding it loses 13 of 52 bits
        moved = (x + mean).requires_grad_()
        (module(moved) * weights).sum().backward()
        found.append(moved.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


class Related(nn.Module):
    """The layers of standard operators that take means of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                BMLV(4),
                LMBV(4),
                RegNorm(4),
                EvoNormS0(4, num_groups=2),
                SwitchableNorm(4),
                PreLayerNorm(nn.Conv2d(4, 3, 1)),
                PreLayerNorm(nn.Linear(31, 5)),
            ]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.slow
def test_the_related_layers_keep_the_digits_in_a_plain_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Related().eval(), torch.randn(2, 4, 37, 31) - 1e4
    for layer in (model.layers[0], model.layers[4]):
        layer.running_mean.fill_(-1e4)
    path = export(model, x, tmp_path / "m.onnx", dynamic_shapes={}, input_names=["x"], verify=False).path
    results = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    in_pytorch = model(x)
    for layer, y, same, exact in zip(model.layers, results, in_pytorch, model.double()(x.double()), strict=True):
        scale = exact.abs().max()
        assert (torch.from_numpy(y) - exact).abs().max() <= 2e-6 * scale, layer
        assert (same - exact).abs().max() <= 2e-6 * scale, layer


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

"""Whitening: its results, and where it folds into the layer before it and leaves no node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from family import nodes
from torch import Tensor, nn

from nnorm_export import (
    export,
    freeze,
    layers,
)
from nnorm_export.layers.related.decorrelated import whitening_matrix


def test_whitening_whitens() -> None:
    mix = torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn(6, 6, dtype=torch.float64)
    x = torch.einsum("ij,njhw->nihw", mix, torch.randn(50, 6, 3, 3, dtype=torch.float64)) + 3
    for iterations, tolerance in ((None, 1e-3), (9, 2e-2)):
        y = layers.DecorrelatedBatchNorm2d(6, 2, affine=False, iterations=iterations, dtype=torch.float64)(x)
        for rows in (slice(0, 3), slice(3, 6)):
            covariance = torch.cov(y.transpose(0, 1).flatten(1)[rows], correction=0)
            torch.testing.assert_close(covariance, torch.eye(3, dtype=torch.float64), rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda norm: nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), norm(8, 4)),
        lambda norm: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, bias=False), norm(8, 4)),
    ],
    ids=["bias", "groups"],
)
def test_whitening_folds_into_convolutions(build: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = build(layers.DecorrelatedBatchNorm2d)
    for _ in range(3):
        model(torch.randn(5, model[0].in_channels, 6, 6))
    assert nodes(model.eval(), torch.randn(5, model[0].in_channels, 6, 6), tmp_path / "m.onnx") == {"Conv": 1}


class Reader(nn.Module):
    """A convolution that more than a whitening reads, or a whitening that more than one convolution feeds."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.twice = nn.Conv2d(4, 4, 1), layers.DecorrelatedBatchNorm2d(4), twice

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return self.norm(z) + (self.norm(x) if self.twice else z)


@pytest.mark.slow
def test_whitening_that_cannot_fold_stays(tmp_path: Path) -> None:
    x = torch.randn(3, 4, 5, 5)
    mixed = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), layers.DecorrelatedBatchNorm2d(8, 2))
    assert nodes(mixed.eval(), x, tmp_path / "m.onnx") == {"Conv": 2}
    assert nodes(Reader(False), x, tmp_path / "m.onnx")["Conv"] == 2
    assert nodes(Reader(True), x, tmp_path / "m.onnx")["Conv"] == 3


class Tied(nn.Module):
    """A kernel that the decoder uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), layers.DecorrelatedBatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(self.norm(self.conv(x)), self.conv.weight)


class TwoNames(nn.Module):
    """One layer under two names, of which one is whitened."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 1), layers.DecorrelatedBatchNorm2d(4)
        self.again = self.first if of == "conv" else self.norm
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        return y + self.again(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Tied(), (3, 4, 5, 5)),
        (TwoNames("conv"), (3, 4, 5, 5)),
        (TwoNames("norm"), (3, 4, 5, 5)),
        (nn.Sequential(nn.Linear(5, 4), layers.DecorrelatedBatchNorm1d(4)), (3, 4, 5)),
        (nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (1, 6)), layers.DecorrelatedBatchNorm1d(1)), (3, 5)),
    ],
    ids=["tied", "conv under two names", "whitening under two names", "linear over another axis", "a user's own axis"],
)
def test_whitening_folds_only_where_that_is_exact(model: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    for _ in range(3):
        model(torch.randn(7, *shape[1:]))
    assert export(model.eval(), torch.randn(shape), tmp_path / "m.onnx").parity


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp64"])
def test_whitening_folds_in_every_dtype(dtype: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layers.DecorrelatedBatchNorm2d(4))
    for _ in range(3):
        model(torch.randn(8, 3, 6, 6))
    report = export(model.eval(), torch.randn(4, 3, 6, 6), tmp_path / "m.onnx", dtype=dtype, opset_version=22)
    assert report.parity
    assert [node.op_type for node in onnx.load(report.path).graph.node] == ["Conv"]


@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_channels_that_depend_on_each_other_whiten_to_numbers(running: Any) -> None:
    layer = layers.DecorrelatedBatchNorm1d(16, running=running)
    for scale in (1.0, 30.0, 1000.0):
        x = (torch.randn(8, 16) * scale).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert all(value.isfinite().all() for value in layer.state_dict().values())
    assert layer.eval()(torch.randn(8, 16)).isfinite().all()
    assert freeze(layer)(torch.randn(8, 16)).isfinite().all()


def test_second_derivatives_of_whitening_by_eigenvectors_are_refused() -> None:
    """Those of Newton's steps are right."""
    x = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    layer = layers.DecorrelatedBatchNorm1d(2, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    newton = layers.DecorrelatedBatchNorm1d(2, iterations=3, affine=False, track_running_stats=False).double()
    assert torch.autograd.gradgradcheck(newton, (x,))


def test_whitening_of_stacked_batches_by_vmap() -> None:
    layer = layers.DecorrelatedBatchNorm1d(2, track_running_stats=False)
    x = torch.randn(3, 9, 2)
    layer(x[0])
    covariance = torch.stack([torch.cov(batch.T) for batch in x])
    rows = torch.func.vmap(lambda matrix: whitening_matrix(matrix, 1e-5, None))(covariance)
    for row, matrix in zip(rows, covariance, strict=True):
        torch.testing.assert_close(row, whitening_matrix(matrix, 1e-5, None))

"""The torch operators have gradients: a frozen model is differentiable with respect to its input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import freeze, layers
from nnorm_export.mathematics import resolve_exponents
from nnorm_export.operators import NORMALIZATIONS

LMBDA = torch.tensor([0.0, 1.0, 2.0, 0.3], dtype=torch.float64)  # both logarithmic branches, the identity, another


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("delta", [0.0, 1e-5**0.5])
def test_gradients_of_a_batch_normal_norm(delta: float) -> None:
    op = NORMALIZATIONS["BatchNormalNorm"].torch_op
    affine = [values(4) + 2.0, values(4)]
    exponents = resolve_exponents(LMBDA, delta)

    def compute(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = op(x, scale, shift, *exponents, weight, bias)
        return y

    inputs = [values(5, 4, 3), values(4) + 2.0, values(4), *affine]
    inputs = [value.requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LayerNormalNorm", "GroupNormalNorm"])
def test_gradients_of_norms_with_statistics_of_their_own(name: str) -> None:
    op = NORMALIZATIONS[name].torch_op
    rest = (1e-5, 1e-5**0.5) if name == "LayerNormalNorm" else (2, 1e-5, 1e-5**0.5)
    inputs = [value.requires_grad_() for value in (values(3, 6, 6), values(6) + 2.0, values(6))]

    def compute(*tensors: Tensor) -> Tensor:
        y: Tensor = op(*tensors, *rest)
        return y

    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def gradient(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [layers.BatchNormalNorm1d(4), layers.LayerNormalNorm(4), layers.GroupNormalNorm(4, 2)],
    ids=lambda norm: type(norm).__name__,
)
def test_the_gradient_of_a_frozen_model_is_that_of_the_model(norm: nn.Module, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 3)).to(dtype).eval()
    x = values(5, 4).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(gradient(freeze(model), x), gradient(model, x), rtol=tolerance, atol=tolerance)


def test_without_a_gradient_nothing_is_kept() -> None:
    frozen = freeze(layers.LayerNormalNorm(4))
    assert not frozen(torch.randn(2, 4)).requires_grad
    with torch.no_grad():
        assert not frozen(torch.randn(2, 4, requires_grad=True)).requires_grad


def test_inputs_that_come_from_one_another() -> None:
    """A gradient of one does not run through the other, nor twice through what both come from."""
    weight = torch.rand(4, dtype=torch.float64) + 0.5
    weight.requires_grad_(True)
    x, ones, zeros = torch.randn(3, 4, dtype=torch.float64), weight.new_ones(4), weight.new_zeros(4)

    def compute(weight: Tensor) -> Tensor:
        y: Tensor = torch.ops.nnorm.batch_normal_norm(x * weight, weight, zeros, ones, ones, ones, zeros)
        return y

    assert torch.autograd.gradcheck(compute, (weight,))

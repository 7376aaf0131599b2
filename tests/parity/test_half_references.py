"""Which results in float64 are the reference of a half-precision file, and what the frozen model is compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from half_heads import HEADS, Head
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from nnorm_export import freeze
from nnorm_export.layers import WeightStandardization
from nnorm_export.parity.reference.pytorch_model import HALVES, PyTorchModel, bound
from nnorm_export.parity.verdict.case import Case


def _case(model: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[Case, str]:
    pytorch, example = PyTorchModel(model.eval(), dtype, ()), bound(model, x.to(dtype))
    expected = pytorch.run(example)
    float64 = pytorch.run_in_float64(example)
    case = Case([], expected, expected).with_runs(float64, pytorch.perturbed_runs(example, expected))
    return case, pytorch.defect_of_freezing(example, case.float64_unchanged)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("of", HEADS.values(), ids=HEADS)
def test_a_rounding_of_a_small_element_does_not_replace_float64(
    of: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    case, defect = _case(Head(of).to(dtype), torch.randn(64, 3), dtype)
    assert case.float64 is not None
    assert case.float64_unchanged is not None
    np.testing.assert_array_equal(case.float64[0], case.float64_unchanged[0])
    assert defect == ""


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_a_dtype_replace_float64(dtype: torch.dtype) -> None:
    """Of a mask with the least number of its dtype, the masked elements are PyTorch's, and those beside them float64's.

    The frozen model, in float32, is compared with the results in float64 as they are.
    """

    def of(h: Tensor) -> Tensor:
        return torch.where(torch.arange(16) % 4 > 0, torch.sin(16 * h), torch.finfo(h.dtype).min)

    torch.manual_seed(0)
    case, defect = _case(Head(of).to(dtype), torch.randn(64, 3), dtype)
    assert case.float64 is not None
    assert case.float64_unchanged is not None
    masked = np.arange(16) % 4 == 0
    assert (case.float64[0][:, masked] == torch.finfo(dtype).min).all()
    np.testing.assert_array_equal(case.float64[0][:, ~masked], case.float64_unchanged[0][:, ~masked])
    assert defect == ""


def standardized(layer: nn.Module) -> nn.Module:
    return register_parametrization(layer, "weight", WeightStandardization())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parametrized", [weight_norm, spectral_norm, standardized])
def test_weights_that_freezing_computes_are_rounded_as_pytorch_rounds_them(
    parametrized: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrized(nn.Linear(64, 32)), nn.GELU()).to(dtype)
    assert _case(model, torch.randn(8, 64), dtype)[1] == ""


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_that_freezing_changes_are_told(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[freeze.__module__]
    monkeypatch.setattr(module, "_computed_weights", lambda layer: {"weight": layer.weight.detach() * 1.01})
    model = nn.Sequential(standardized(nn.Linear(64, 32)), nn.GELU()).to(dtype)
    assert "the frozen model does not compute" in _case(model, torch.randn(8, 64), dtype)[1]

"""Constants of the user's code: those that are almost 0 or 1, and expressions that no input changes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.numpy_helper import to_array
from torch import Tensor, nn

from nnorm_export import change_form, export, freeze, load
from nnorm_export.layers import BatchNormalNorm1d, LayerNormalNorm


class UnitRows(nn.Module):
    """x/(|x| + ε) behind a norm, with an ε and a factor that are not 0 and not 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNormalNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = x / (x.norm(dim=1, keepdim=True) + 1e-9)
        return self.norm(y * 1.000004) - 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("form", ["portable", "primitives"])
def test_constants_that_are_almost_neutral_stay(form: str, tmp_path: Path) -> None:
    path = tmp_path / "unit.onnx"
    export(UnitRows().eval(), (torch.randn(8, 6),), path, form="portable")
    if form == "primitives":
        change_form(path, path, form)
    model = onnx.load(path)
    arrays = [to_array(tensor) for tensor in model.graph.initializer]
    scalars = {float(array) for array in arrays if array.shape == () and array.dtype == np.float32}
    assert {float(np.float32(number)) for number in (1e-9, 1.000004, 1e-12)} <= scalars
    assert np.isfinite(load(path)(np.zeros((1, 6), np.float32))[0]).all()


class Steps(nn.Module):
    """The embedding of a diffusion model's time step: a rounding of a frequency is a thousand times as great in it."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        self.norm, self.nested = LayerNormalNorm(64), nested

    def forward(self, step: Tensor) -> Tensor:
        if not self.nested:
            return self.embedded(step)
        with torch.autocast("cpu", enabled=False):
            return self.embedded(step)

    def embedded(self, step: Tensor) -> Tensor:
        angles = step[:, None].float() * frequencies()[None]
        return self.norm(torch.cat([angles.cos(), angles.sin()], -1).to(self.norm.weight.dtype))


def frequencies() -> Tensor:
    return torch.exp(-math.log(10000) * torch.arange(32, dtype=torch.float32) / 32)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "in-autocast"])
@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_expressions_without_an_input_have_the_bits_of_pytorch(nested: bool, dtype: str | None, tmp_path: Path) -> None:
    report = export(Steps(nested=nested).eval(), torch.tensor([999, 500]), tmp_path / "m.onnx", dtype=dtype)
    arrays = [to_array(tensor) for tensor in onnx.load(report.path).graph.initializer]
    assert any(np.array_equal(array.ravel(), frequencies().numpy()) for array in arrays)
    assert report.parity


class Written(nn.Module):
    """Constants that forward writes to, also through a view, and a buffer."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)
        self.register_buffer("offsets", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.ones(4).exp()
        powers[:2].mul_(2)
        filled = torch.zeros(4).cos()
        filled[1] = 7
        made = torch.tensor([1.0, 2.0, 3.0, 4.0]).sin() + torch.empty(4).fill_(1)
        return self.norm(x) * powers + filled.exp() + made + self.offsets


def test_constants_that_forward_writes_to(tmp_path: Path) -> None:
    model = Written().eval()
    path = export(model, torch.randn(3, 4), tmp_path / "m.onnx").path
    x = torch.randn(5, 4)
    np.testing.assert_allclose(load(path)(x.numpy())[0], model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert "offsets" in {tensor.name for tensor in onnx.load(path).graph.initializer}  # a buffer stays one


@pytest.mark.slow
def test_a_program_is_not_changed_by_its_export(tmp_path: Path) -> None:
    with torch.no_grad():
        program = torch.export.export(freeze(Steps(nested=True).eval()), (torch.tensor([999, 500]),))
    before = str(program)
    export(program, (), tmp_path / "m.onnx")
    assert str(program) == before

"""The text in a program: arithmetic with lengths is data, and everything else is code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import export_program, load
from nnorm_export.errors import ModelFileError
from nnorm_export.models.exported_programs import load_program
from nnorm_export.models.program_text import CodeFoundError, check_expression, check_program


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(2), Symbol('s0', integer=True))",
        "Max(1, s0) + FloorDiv(s1, 2)*s0**2",
        "Pow(Symbol('s0'), Integer(-1))",
        "Eq(Mod(s0, 8), 0)",
        "FloatPow(ToFloat(Symbol('s77', positive=True, integer=True)), Float('-0.5', precision=53))",
        "FloatPow(Float('10000.0', precision=53), IntTrueDiv(Symbol('s27'), Integer(64)))",
        "PowByNatural(Integer(2), Symbol('s27', positive=True, integer=True))",
    ],
)
def test_sizes_are_arithmetic(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "lambdify", "Max('os')", "s0.__class__", "9**9**9**9", "(lambda: 0)()", "[0 for s0 in s1]", "preview(s0)",
        "2**s0", "Pow(Integer(2), Symbol('s0'))", "PowByNatural(Rational(3, 2), Symbol('s0'))", "torch.load('s0')",
        "PowByNatural(Integer(2), PowByNatural(Integer(9), Symbol('s0')))", "FloatPow('os', s0)", "math.sin(s0)",
        "s0 +",
    ],
)  # fmt: skip
def test_other_text_is_not(text: str) -> None:
    with pytest.raises(CodeFoundError):
        check_expression(text)


_BY_LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda x: x / x.shape[0] ** 0.5,
    "square": lambda x: x * x.shape[1] ** 2,
    "power of an integer": lambda x: x * 2 ** x.shape[1],
    "power of a float": lambda x: x * 1.5 ** x.shape[1],
    "square root": lambda x: x * torch.sym_sqrt(x.shape[1]),
    "doubled": lambda x: x.new_ones(x.shape[1] << 1),
    "halved": lambda x: x.new_ones((x.shape[1] >> 1) + 1),
    "truncated root": lambda x: x.new_ones(int(x.shape[1] ** 0.5)),
    "truncated power": lambda x: x.new_ones(int(1.5 ** x.shape[1])),
}


@pytest.mark.parametrize("name", _BY_LENGTHS)
def test_programs_that_compute_with_lengths_are_data(name: str, tmp_path: Path) -> None:
    class ByLengths(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _BY_LENGTHS[name](x)

    auto: Any = torch.export.Dim.AUTO
    x = torch.randn(5, 7)
    program = torch.export.export(ByLengths(), (x,), dynamic_shapes=({0: auto, 1: auto},))
    torch.export.save(program, tmp_path / "m.pt2")
    torch.testing.assert_close(load_program(tmp_path / "m.pt2").module()(x), program.module()(x))


def test_files_of_export_program_load(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.shape[0] ** 0.5

    x = torch.randn(5, 7)
    report = export_program(Scaled(), x, tmp_path / "m.pt2")
    assert report.needs_trust == ""
    (found,) = load(report.path)(x[:3].numpy())
    torch.testing.assert_close(torch.from_numpy(found), x[:3] / 3**0.5)


def test_the_report_says_what_needs_trust(tmp_path: Path) -> None:
    class Foreign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.ops.nnorm_test_foreign.twice(x)
            return y

    with torch.library._scoped_library("nnorm_test_foreign", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        report = export_program(Foreign(), torch.randn(5, 7), tmp_path / "m.pt2")
        assert "calls 'torch.ops.nnorm_test_foreign.twice.default'" in report.needs_trust
        assert f"trust_pickle=True only: {report.needs_trust}" in str(report)
        with pytest.raises(ModelFileError, match="would run code"):
            load(report.path)
        assert load(report.path, trust_pickle=True).inputs[0].name == "x"


@pytest.mark.parametrize(
    "target",
    ["_operator.call", "_operator.methodcaller", "_operator.attrgetter", "_operator.ipow", "builtins.pow",
     "math.factorial", "os.system", "torch.load", "torch.sym_float.__class__"],
)  # fmt: skip
def test_other_functions_are_not(target: str) -> None:
    with pytest.raises(CodeFoundError, match="it calls"):
        check_program(json.dumps({"nodes": [{"target": target, "inputs": []}]}).encode())


def test_guards_are_conditions() -> None:
    check_expression("L['x'].size()[0] <= 64 and Mod(L['x'].size()[1], 8) == 0", guard=True)
    check_expression("math.trunc(1.5 ** torch.sym_float(L['x'].size()[0])) == 7", guard=True)
    for text in (
        "L['x'].__class__.__base__ == 0",
        "torch.load('x') == 0",
        "torch.ops.aten.save(L['x']) == 0",
        "9 ** 9 ** 9 ** L['x'].size()[0] == 0",
        "torch['load'](0) == 0",
    ):
        with pytest.raises(CodeFoundError):
            check_expression(text, guard=True)

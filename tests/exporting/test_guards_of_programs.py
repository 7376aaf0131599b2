"""Conditions on lengths that an exported program keeps: those of its operators do no harm, those of branches do."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from nnorm_export import ParityError, export, freeze
from nnorm_export.layers import BatchNormalNorm2d
from nnorm_export.models.program_guards import beyond_program_guards, without_guards

AUTO: Any = Dim.AUTO
FREE = {0: AUTO, 2: AUTO, 3: AUTO}
HEIGHT, WIDTH = Dim("h", min=2, max=64), Dim("w", min=2, max=64)
FROM_FOUR = Dim("h", min=4, max=64)

pytestmark = pytest.mark.skipif(
    "_guards_code" not in ExportedProgram.__init__.__code__.co_names, reason="this torch keeps no conditions"
)


class Net(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.function = BatchNormalNorm2d(3), function

    def forward(self, x: Tensor, others: dict[str, Any] | None = None) -> Tensor:
        return self.function(self.norm(x), **(others or {}))


def program_of(
    function: Callable[..., Tensor], shapes: Any = None, inputs: Any = None, *, strict: bool = False
) -> ExportedProgram:
    inputs = (torch.randn(3, 3, 8, 8),) if inputs is None else inputs
    return torch.export.export(freeze(Net(function).eval()), inputs, dynamic_shapes=shapes or (FREE,), strict=strict)


def doubled_if(condition: Callable[..., bool]) -> Callable[..., Tensor]:
    return lambda y, **others: y * 2 if condition(*y.shape, **others) else y


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


OF_BRANCHES = {
    "taller": (doubled_if(lambda n, c, h, w: h > w), {}, r"x\.shape\[2\] <= x\.shape\[3\]"),
    "a great area": (
        doubled_if(lambda n, c, h, w: h * w > 3900),
        {"shapes": ({0: AUTO, 2: HEIGHT, 3: WIDTH},)},
        r"\*x\.shape\[\d\] <= 3900",
    ),
    "odd in fours": (doubled_if(lambda n, c, h, w: h % 4 == 1), {}, r"\(x\.shape\[2\] % 4\) != 1"),
    "not square": (doubled_if(lambda n, c, h, w: n == w), {}, r"x\.shape\[0\] != x\.shape\[3\]"),
    "an integer": (lambda y: y * (3 if y.shape[2] > y.shape[3] else 1), {}, r"x\.shape\[2\] <= x\.shape\[3\]"),
    "a branch beside pairs": (
        lambda y: F.interpolate(F.avg_pool2d(y, 2), scale_factor=2) + y * (2 if y.shape[2] > y.shape[3] else 1),
        {},
        r"x\.shape\[2\] <= x\.shape\[3\]",
    ),
    "an input in a dict": (
        doubled_if(lambda n, c, h, w, a: a[0].shape[0] > h),
        {
            "inputs": (torch.randn(3, 3, 8, 8), {"a": [torch.randn(4)]}),
            "shapes": (FREE, {"a": [{0: AUTO}]}),
        },
        r"others_a_0\.shape\[0\] <= x\.shape\[2\]",
    ),
}


@pytest.mark.parametrize("name", OF_BRANCHES)
def test_a_condition_of_a_branch_is_refused(name: str, tmp_path: Path) -> None:
    function, how, guard = OF_BRANCHES[name]
    program = program_of(function, **how)
    with pytest.raises(ParityError, match=f"the program is right only where .*{guard}, a condition of forward"):
        export(program, (), tmp_path / "m.onnx")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["taller", "an input in a dict"])
def test_a_condition_of_a_strict_program_is_refused(name: str, tmp_path: Path) -> None:
    """torch.export counts the inputs there, and does not name them."""
    function, how, guard = OF_BRANCHES[name]
    program = program_of(function, **how, strict=True)
    with pytest.raises(ParityError, match=f"the program is right only where .*{guard}, a condition of forward"):
        export(program, (), tmp_path / "m.onnx")


def test_conditions_of_operators_in_a_strict_program_do_no_harm() -> None:
    program = program_of(OF_OPERATORS["pairs"][0], strict=True)
    result, branch = beyond_program_guards(program, without_guards(program), {"x": program.example_inputs[0][0]})
    assert (branch, result.untried) == (None, [])
    assert result.found


def test_a_program_from_a_file_keeps_its_conditions(tmp_path: Path) -> None:
    program = saved_and_loaded(program_of(doubled_if(lambda n, c, h, w: h > w)))
    with pytest.raises(ParityError, match="the program is right only where"):
        export(program, (), tmp_path / "m.onnx")


def test_the_file_of_a_program_keeps_them_too(tmp_path: Path) -> None:
    program = program_of(doubled_if(lambda n, c, h, w: h > w))
    export(program, (), tmp_path / "m.pt2", target="pt2")
    with pytest.raises(AssertionError, match="Guard failed"):
        torch.export.load(tmp_path / "m.pt2").module()(torch.randn(2, 3, 9, 8))


OF_OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Any, bool]] = {
    "a map of one element": (lambda y: F.max_pool2d(F.max_pool2d(y, 3, 2), 2), {}, True),
    "a stride": (lambda y: F.avg_pool2d(y, 2), {}, True),
    "pairs": (lambda y: F.interpolate(F.avg_pool2d(y, 2), scale_factor=2) + y, {}, True),
    "a table": (lambda y: y + torch.linspace(0, 1, 64)[: y.shape[2], None], {}, False),
    "axes that are equal": (lambda y: F.avg_pool2d(y @ y, 2), {}, True),
    "one Dim": (lambda y: (y @ y).unfold(2, 3, 1), {"shapes": ({0: AUTO, 2: FROM_FOUR, 3: FROM_FOUR},)}, False),
    "twice as wide": (
        lambda y: F.avg_pool2d(torch.cat([y, y], 2) + torch.cat([y, y], 2).mT, 4),
        {"inputs": (torch.randn(3, 3, 8, 16),)},
        True,
    ),
}


@pytest.mark.parametrize("name", OF_OPERATORS)
def test_conditions_of_operators_do_no_harm(name: str) -> None:
    function, how, has_any = OF_OPERATORS[name]
    program = program_of(function, **how)
    for either in (program, saved_and_loaded(program)):
        result, branch = beyond_program_guards(either, without_guards(either), {"x": either.example_inputs[0][0]})
        assert branch is None
        assert bool(result.found) == has_any
        assert not result.untried


def test_a_file_is_compared_beyond_the_conditions_of_operators(tmp_path: Path) -> None:
    program = program_of(OF_OPERATORS["a map of one element"][0])
    report = export(program, (), tmp_path / "m.onnx")
    assert report.parity is not None
    assert report.parity

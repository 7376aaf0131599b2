"""Conditions on lengths that a trace takes for granted: a file that is wrong beyond one is not written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampled import long
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from nnorm_export import ParityError, export, load
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d
from nnorm_export.models.guards import beyond_guards

AUTO: Any = Dim.AUTO
HEIGHT, WIDTH, LENGTH = Dim("h", min=2, max=64), Dim("w", min=2, max=64), Dim("s", min=2, max=4096)
IMAGES = {0: Dim("n", min=1), 2: HEIGHT, 3: WIDTH}
ROWS = {0: Dim("n", min=1), 1: LENGTH}


class Net(nn.Module):
    """A normalization, and a function of its result and of the input's lengths."""

    def __init__(self, norm: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.function = norm, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm(x))


class OfRows(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm(x.transpose(1, 2)).transpose(1, 2))


def of_images(function: Callable[[Tensor], Tensor], width: int = 8) -> tuple[nn.Module, Tensor]:
    return Net(BatchNormalNorm2d(3), function).eval(), torch.randn(3, 3, 8, width)


def of_rows(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    return OfRows(BatchNormalNorm1d(4), function).eval(), torch.randn(8, 6, 4)


def doubled_if(condition: Callable[[Any], bool]) -> Callable[[Tensor], Tensor]:
    return lambda y: y * 2 if condition(y.shape) else y


BRANCHES = {
    "taller": (of_images(doubled_if(lambda s: s[2] > s[3])), IMAGES, r"x\.shape\[2\] <= x\.shape\[3\]"),
    "area": (of_images(doubled_if(lambda s: s[2] * s[3] > 1000)), IMAGES, r"x\.shape\[2\]\*x\.shape\[3\] <= 1000"),
    "perimeter": (of_images(doubled_if(lambda s: s[2] + s[3] < 12)), IMAGES, r"x\.shape\[2\] \+ x\.shape\[3\] >= 12"),
    "aspect": (of_images(doubled_if(lambda s: s[2] >= 2 * s[3])), IMAGES, r"x\.shape\[2\] < 2\*x\.shape\[3\]"),
    "taller and great": (of_images(doubled_if(lambda s: s[2] > s[3] and s[2] * s[3] > 1000)), IMAGES, "x"),
    "high and wide": (of_images(doubled_if(lambda s: s[2] > 10 and s[3] > 20)), {0: "n", 2: "h", 3: "w"}, "x"),
    "short and narrow": (of_images(doubled_if(lambda s: s[2] < 7 and s[3] < 6)), {0: "n", 2: "h", 3: "w"}, "x"),
    "rounded down": (of_images(doubled_if(lambda s: int(s[2] * 0.7) > 20)), {0: "n", 2: "h", 3: "w"}, r"math\.trunc\("),
    "rounded up": (of_images(doubled_if(lambda s: math.ceil(s[2] / 3) > 9)), {0: "n", 2: "h", 3: "w"}, "ceil"),
    "a quotient by 0": (of_images(doubled_if(lambda s: s[2] % (s[3] // 4) == 1)), {0: "n", 2: "h", 3: "w"}, "x"),
    "a product that is a number": (of_images(doubled_if(lambda s: s[2] * s[3] == 3000)), IMAGES, r"!= 3000"),
    "a sum that is a number": (of_images(doubled_if(lambda s: s[2] + s[3] == 70)), IMAGES, r"!= 70"),
    "square": (
        of_images(doubled_if(lambda s: s[2] == s[3])),
        {0: AUTO, 2: AUTO, 3: AUTO},
        r"x\.shape\[2\] == x\.shape\[3\]",
    ),
    "square by names": (of_images(doubled_if(lambda s: s[2] == s[3])), {0: "n", 2: "h", 3: "w"}, r"x\.shape\[2\] == x"),
    "square by half": (
        of_images(doubled_if(lambda s: s[2] == s[3])),
        {0: "n", 2: AUTO, 3: WIDTH},
        r"\] == x\.shape\[2\]",
    ),
    "not square": (
        of_images(doubled_if(lambda s: s[2] == s[3]), 9),
        {0: AUTO, 2: AUTO, 3: AUTO},
        r"x\.shape\[2\] != x",
    ),
    "twice as wide": (
        of_images(doubled_if(lambda s: 2 * s[2] == s[3]), 16),
        {0: "n", 2: "h", 3: "w"},
        r"\(2\*x\.shape\[2\]\)",
    ),
    "as high as many": (of_rows(doubled_if(lambda s: s[0] == s[1] + 2)), {0: "n", 1: "s"}, r"x\.shape\[0\]"),
    "one row": (of_rows(doubled_if(lambda s: s[1] == 1)), {0: "n", 1: "s"}, r"x\.shape\[1\] >= 2"),
    "one sample": (of_rows(doubled_if(lambda s: s[0] < 2)), {0: AUTO}, r"x\.shape\[0\] >= 2"),
    "a row for many": (of_rows(lambda y: y if y.shape[0] == 1 else y - 1), {0: "n", 1: AUTO}, r"x\.shape\[0\] >= 2"),
    "tokens": (of_rows(doubled_if(lambda s: s[0] * s[1] > 512)), ROWS, r"x\.shape\[0\]\*x\.shape\[1\] <= 512"),
    "longer than the batch": (of_rows(doubled_if(lambda s: s[1] > s[0])), ROWS, r"x\.shape\[1\] <= x\.shape\[0\]"),
    "named": (of_rows(doubled_if(lambda s: s[1] > 300)), {0: "batch", 1: "seq"}, r"x\.shape\[1\] <= 300"),
    "auto": (of_rows(doubled_if(lambda s: s[1] > 300)), {0: AUTO, 1: AUTO}, r"x\.shape\[1\] <= 300"),
    "odd": (of_rows(doubled_if(lambda s: s[1] % 2 == 1)), {0: AUTO, 1: AUTO}, r"x\.shape\[1\] % 2\) != 1"),
}


SLOW = {"square by half", "not square", "as high as many", "a sum that is a number", "rounded up", "short and narrow"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BRANCHES]
)
def test_a_branch_on_lengths_is_refused_by_its_condition(name: str, tmp_path: Path) -> None:
    (model, x), shapes, guard = BRANCHES[name]
    (tmp_path / "m.onnx").write_bytes(b"older")
    with pytest.raises(ParityError, match=f"it would be right only where .*{guard}") as refused:
        export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(shapes,))
    assert "choose with torch.where" in str(refused.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), [("torchscript", "m.pt"), long("aoti", "m.pt2")])
def test_formats_without_guards(target: str, name: str, tmp_path: Path) -> None:
    (model, x), shapes, _ = BRANCHES["taller"]
    with pytest.raises(ParityError, match="it would be right only where"):
        export(model, (x,), tmp_path / name, target=target, dynamic_shapes=(shapes,))


def test_a_program_checks_its_guards_when_it_runs(tmp_path: Path) -> None:
    (model, x), shapes, _ = BRANCHES["taller"]
    assert export(model, (x,), tmp_path / "m.pt2", target="pt2", dynamic_shapes=(shapes,)).parity


def square_by(shapes: dict[int, Any], function: Callable[[Tensor], Tensor], width: int = 8) -> tuple[Any, Any]:
    return of_images(function, width), shapes


EQUAL = {
    "a Dim": square_by({0: AUTO, 2: HEIGHT, 3: HEIGHT}, doubled_if(lambda s: s[2] == s[3])),
    "a name": square_by({0: "n", 2: "s", 3: "s"}, doubled_if(lambda s: s[2] == s[3])),
    "a name, and a condition that never holds": square_by({0: "n", 2: "s", 3: "s"}, doubled_if(lambda s: s[2] > s[3])),
    "its double": square_by({0: AUTO, 2: HEIGHT, 3: 2 * HEIGHT}, doubled_if(lambda s: 2 * s[2] == s[3]), 16),
    "the operators": square_by({0: AUTO, 2: AUTO, 3: AUTO}, lambda y: y + y.transpose(2, 3)),
}


@pytest.mark.parametrize("by", EQUAL)
def test_axes_that_are_equal_by_declaration_or_by_operators(by: str, tmp_path: Path) -> None:
    (model, x), shapes = EQUAL[by]
    report = export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(shapes,))
    assert report.parity
    y = torch.randn(2, 3, 5, 5 * x.shape[3] // 8)
    np.testing.assert_allclose(load(report.path)(y.numpy())[0], model(y).detach(), rtol=1e-5, atol=1e-6)


def test_inputs_whose_axes_the_trace_made_equal(tmp_path: Path) -> None:
    class Two(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return self.norm(x) * (2 if x.shape[2] == y.shape[2] else 1) + y.mean()

    model, x = Two(BatchNormalNorm2d(3), nn.Identity()).eval(), torch.randn(2, 3, 6, 5)
    shapes = {0: AUTO, 2: AUTO, 3: AUTO}
    with pytest.raises(ParityError, match=r"right only where x\.shape\[2\] == y\.shape\[2\]"):
        export(model, (x, torch.randn(2, 3, 6, 4)), tmp_path / "m.onnx", dynamic_shapes=(shapes, shapes))


RIGHT: dict[str, tuple[tuple[nn.Module, Tensor], Any]] = {
    "U-Net": (
        of_images(lambda y: F.interpolate(F.avg_pool2d(y, 2), scale_factor=2) + y),
        {0: AUTO, 2: AUTO, 3: AUTO},
    ),
    "pairs": (of_rows(lambda y: y.view(y.shape[0], y.shape[1] // 2, 2, 4).sum(2)), {0: AUTO, 1: AUTO}),
    "positions": (of_rows(lambda y: y + torch.linspace(0, 1, 64)[: y.shape[1], None]), {0: AUTO, 1: AUTO}),
    "windows": (of_rows(lambda y: y.unfold(1, 3, 1).sum(-1)), {0: AUTO, 1: AUTO}),
    "a softmax over one row": (of_rows(lambda y: y.softmax(1)), {0: "n", 1: "s"}),
    "no number for one sample": (of_rows(lambda y: y / y.std(0)), {0: AUTO, 1: AUTO}),
    "a path that changes nothing": (of_rows(lambda y: y * 2 if y.shape[1] > 300 else y + y), {0: "n", 1: "s"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_conditions_that_do_no_harm(name: str, tmp_path: Path) -> None:
    (model, x), shapes = RIGHT[name]
    report = export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(shapes,))
    assert report.parity


@pytest.mark.parametrize("name", ["named", "one row"])
def test_ranges_in_which_the_condition_holds(name: str, tmp_path: Path) -> None:
    (model, x), _, _ = BRANCHES[name]
    shapes = {0: Dim("n", min=1), 1: Dim("s", min=2, max=300)}
    assert export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(shapes,)).parity


@pytest.mark.slow
def test_the_search_for_lengths_leaves_the_buffers_of_the_trace_alone(tmp_path: Path) -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__(BatchNormalNorm2d(3), doubled_if(lambda s: s[2] * s[3] > 1000))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counts().eval()
    with pytest.raises(ParityError, match="it would be right only where"):
        export(model, (torch.randn(3, 3, 8, 8),), tmp_path / "m.onnx", dynamic_shapes=(IMAGES,))
    assert model.calls == 0


def test_conditions_of_four_axes(tmp_path: Path) -> None:
    class Larger(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            larger = x.shape[2] * x.shape[3] > y.shape[2] * y.shape[3]
            return self.norm(x) * (2 if larger else 1) + y.mean()

    model, shapes = Larger(BatchNormalNorm2d(3), nn.Identity()).eval(), {0: AUTO, 2: AUTO, 3: AUTO}
    with pytest.raises(ParityError, match="it would be right only where"):
        export(
            model, (torch.randn(2, 3, 6, 5), torch.randn(2, 3, 7, 8)), tmp_path / "m.onnx", dynamic_shapes=(shapes,) * 2
        )


TOO_LARGE = doubled_if(lambda s: s[2] * s[3] > 30_000_000)


def test_a_condition_that_only_great_inputs_break_is_said(tmp_path: Path) -> None:
    (model, x), shapes = of_images(TOO_LARGE), {0: "n", 2: "h", 3: "w"}
    report = export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(shapes,))
    assert re.fullmatch(r"x\.shape\[\d\]\*x\.shape\[\d\] <= 30000000", "".join(report.untried))
    assert f"not compared beyond the condition {report.untried[0]}: inputs are too large" in str(report)
    with pytest.raises(ParityError, match="it was not compared beyond the condition"):
        export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(shapes,), strict=True)


def test_others_may_be_as_large_as_the_example() -> None:
    model, x = Net(nn.Identity(), doubled_if(lambda s: s[2] * s[3] > 250_000)), torch.ones(1, 12, 498, 498)
    program = torch.export.export(model, (x,), dynamic_shapes=({2: AUTO, 3: AUTO},))
    result = beyond_guards(program, model, {"x": x}, {"x": {2: AUTO, 3: AUTO}})
    assert result.untried  # a little more than the example
    x = torch.ones(1, 12, 510, 510)
    program = torch.export.export(model, (x,), dynamic_shapes=({2: AUTO, 3: AUTO},))
    result = beyond_guards(program, model, {"x": x}, {"x": {2: AUTO, 3: AUTO}})
    assert result.found
    assert not result.untried


def test_ranges_that_forbid_great_inputs(tmp_path: Path) -> None:
    model, x = of_images(TOO_LARGE)
    report = export(model, (x,), tmp_path / "m.onnx", dynamic_shapes=(IMAGES,), strict=True)
    assert report.untried == []

"""An exported program with dynamic axes is compared at other lengths than those of its example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_network import randomized
from torch import Tensor, nn
from torch.export import Dim

from nnorm_export import InputError, ParityError, export, export_program, freeze, layers
from nnorm_export.models import arguments, dynamic_axes
from nnorm_export.models.program_axes import at_other_lengths


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNormalNorm(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        joined: Tensor = self.norm(torch.cat([x, y], 1))
        return joined


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), randomized(layers.BatchNormalNorm1d(6)))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), layers.GroupNormalNorm(6, 2), nn.MaxPool2d(2))


CASES = [
    (linear, [(5, 4)], ({0: Dim("batch")},), [[(1, 4)], [(6, 4)]]),
    (linear, [(5, 4)], ({0: Dim("batch", min=2, max=5)},), [[(2, 4)], [(4, 4)]]),
    (linear, [(5, 4)], None, []),
    (convolutional, [(2, 3, 8, 8)], ({0: Dim("n"), 2: 2 * Dim("h")},), [[(1, 3, 8, 8)], [(3, 3, 8, 8)]]),
    (
        Joined,
        [(2, 3, 4), (2, 5, 4)],
        ({0: Dim("n"), 1: Dim("s")}, {0: Dim("n"), 1: Dim("t")}),
        [[(1, 1, 4), (1, 1, 4)], [(3, 5, 4), (3, 8, 4)]],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shapes", "dynamic_shapes", "others"), CASES)
def test_other_lengths_of_a_program(make: Any, shapes: Any, dynamic_shapes: Any, others: Any) -> None:
    args = tuple(torch.randn(shape) for shape in shapes)
    program = torch.export.export(freeze(make()), args, dynamic_shapes=dynamic_shapes)
    module = program.module()
    names = ["x", "y"] if make is Joined else ["input"]
    found = at_other_lengths(program, module, dict(zip(names, args, strict=True)))
    assert [[tuple(tensor.shape) for tensor in example.values()] for _, example in found] == others


@pytest.mark.slow
@pytest.mark.parametrize(("write", "name"), [(export, "m.onnx"), (export_program, "m.pt2")])
def test_a_program_is_compared_at_other_lengths(write: Any, name: str, tmp_path: Path) -> None:
    program = torch.export.export(freeze(linear()), (torch.randn(5, 4),), dynamic_shapes=({0: Dim("batch")},))
    report = write(program, (), tmp_path / name)
    assert report.parity
    assert report.parity.outputs[0].rows == 5 + 1 + 6


@pytest.mark.slow
def test_a_file_that_is_right_for_the_example_alone_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, 4)
    program = torch.export.export(freeze(linear()), (x,), dynamic_shapes=({0: Dim("batch")},))
    from nnorm_export.exporting.formats import onnx as exporting  # noqa: PLC0415 - export() is a function of the package

    translate = exporting.translate

    def careless(traced: Any, opset: int) -> Any:
        """Adds to the output what is 0 for a batch of five alone."""
        model = translate(traced, opset)
        ir = exporting.ir
        output = model.graph.outputs[0]
        shape = ir.node("Shape", [model.graph.inputs[0]], attributes={"start": 0, "end": 1})
        five = ir.node("Constant", [], attributes={"value_floats": [5.0]})
        batch = ir.node("Cast", [shape.outputs[0]], attributes={"to": 1})
        rest = ir.node("Sub", [batch.outputs[0], five.outputs[0]])
        total = ir.node("Add", [output, rest.outputs[0]])
        total.outputs[0].name, total.outputs[0].type, total.outputs[0].shape = "changed", output.type, output.shape
        model.graph.extend([shape, five, batch, rest, total])
        model.graph.outputs[0] = total.outputs[0]
        return model

    monkeypatch.setattr(exporting, "translate", careless)
    with pytest.raises(ParityError, match="was not written"):
        export(program, (), tmp_path / "m.onnx")


STRINGS = ({0: "b", 1: "s"}, {0: "b", 1: "t"})


def test_strings_name_axes_as_in_torch_onnx_export() -> None:
    example = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, 5, 4)}
    assert arguments.axis_names(example, STRINGS) == {(0, 0): "b", (0, 1): "s", (1, 0): "b", (1, 1): "t"}
    assert arguments.axis_names(example, {"x": ("b", None, None), "y": None}) == {(0, 0): "b"}
    assert arguments.for_torch(STRINGS) == ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 2
    batch = Dim("batch")
    for shapes in (None, {}, {"x": {0: batch}, "y": None}):
        assert arguments.for_torch(shapes) == shapes
    program = torch.export.export(
        freeze(Joined()), tuple(example.values()), dynamic_shapes=arguments.for_torch(STRINGS)
    )
    assert program.range_constraints


def test_other_lengths_of_axes_that_strings_name() -> None:
    example = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, 5, 4)}
    ((lengths, resized),) = dynamic_axes.at_other_lengths(example, STRINGS)
    assert lengths == {"b": 3, "s": 5, "t": 8}
    assert [tuple(tensor.shape) for tensor in resized.values()] == [(3, 5, 4), (3, 8, 4)]
    equal = {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}  # of a model that adds them
    ((lengths, _),) = dynamic_axes.at_other_lengths(equal, ({0: "b"}, {0: "c"}))
    assert lengths == {"b": 3, "c": 3}


def test_axes_of_one_string_have_one_length() -> None:
    one = {"x": torch.randn(1, 3)}
    assert dynamic_axes.widened(one, {"x": {0: "b"}})["x"].shape == (2, 3)
    example = {"x": torch.randn(2, 3), "y": torch.randn(2, 5)}
    with pytest.raises(InputError, match="dynamic_shapes: s is 3 in axis 1 of x and 5 in axis 1 of y"):
        dynamic_axes.widened(example, ({1: "s"}, {1: "s"}))

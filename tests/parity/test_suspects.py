"""A comparison that fails names inputs that the file ignores, and operators that exporters or runtimes get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper, save
from torch import Tensor, nn

from nnorm_export import ParityError, export, verify
from nnorm_export.exporting import translate

_FLOAT, _INT64, _UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8


def _file(path: Path, nodes: list[Any], *, kind: int = _FLOAT, inputs: tuple[str, ...] = ("x",)) -> Path:
    shape = ["n", 4]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name in inputs],
        [helper.make_tensor_value_info("y", kind, shape)],
        [helper.make_tensor("one", kind, [1], [1]), helper.make_tensor("four", _INT64, [1], [4])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, unused: Tensor) -> Tensor:
        return torch.where(mask > 0, x, 0.0)


node = helper.make_node
_FOUND: dict[str, tuple[list[Any], int, str]] = {
    "shift": (
        [node("BitShift", ["x", "one"], ["y"], name="shift", direction="RIGHT")],
        _UINT8,
        "BitShift (the node shift): exporters shift uint8 as int8",
    ),
    "floored quotient": (
        [node("Div", ["x", "one"], ["q"], name="d"), node("Floor", ["q"], ["y"], name="floor")],
        _FLOAT,
        "Floor (the node floor): a quotient is rounded before it is floored",
    ),
    "remainders": (
        [node("Mod", ["x", "one"], ["r"], fmod=1, name="m"), node("Mod", ["r", "one"], ["y"], fmod=1, name="n")],
        _FLOAT,
        "Mod (the node m and 1 more): its remainder",
    ),
    "order": ([node("TopK", ["x", "four"], ["y", "i"], name="top")], _FLOAT, "TopK (the node top): runtimes put equal"),
}


@pytest.mark.parametrize("case", _FOUND)
def test_operators_are_named(case: str, tmp_path: Path) -> None:
    nodes, kind, suspect = _FOUND[case]
    x = torch.rand(3, 4) + 1 if kind == _FLOAT else torch.randint(3, 90, (3, 4), dtype=torch.uint8)
    report = verify(_file(tmp_path / "m.onnx", nodes, kind=kind), Doubled(), x)
    assert not report
    assert [found for found in report.suspects if found.startswith(suspect)] == report.suspects
    assert f"suspect: {suspect}" in str(report)
    assert report.to_json()["suspects"] == report.suspects


def test_inputs_that_are_ignored(tmp_path: Path) -> None:
    """PyTorch ignores the last input too."""
    path = _file(tmp_path / "m.onnx", [node("Mul", ["x", "one"], ["y"])], inputs=("x", "mask", "unused"))
    x, mask = torch.randn(3, 4), torch.tensor([[1.0, 0.0, 1.0, 0.0]]).repeat(3, 1)
    report = verify(path, Masked(), (x, mask, torch.randn(3, 4)))
    assert report.suspects == [
        "the file ignores the input mask, which changes PyTorch's result; export it with an example in which mask "
        "matters, such as a mask that is not all ones"
    ]


def test_an_input_of_which_the_file_holds_the_value(tmp_path: Path) -> None:
    path = _file(tmp_path / "m.onnx", [node("Shape", ["x"], ["s"]), node("Expand", ["one", "s"], ["y"])])
    assert "the file ignores the input x" in str(verify(path, Doubled(), torch.randn(3, 4)))


@pytest.mark.parametrize("nodes", [[node("Add", ["x", "one"], ["y"])], [node("Mul", ["x", "one"], ["y"])]])
def test_other_files_have_no_suspect(nodes: list[Any], tmp_path: Path) -> None:
    report = verify(_file(tmp_path / "m.onnx", nodes), Doubled(), torch.randn(3, 4))
    assert not report
    assert report.suspects == []


def test_files_that_are_equal_have_no_suspect(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "x"], ["d"]), node("TopK", ["d", "four"], ["v", "i"]), node("Add", ["x", "x"], ["y"])]
    report = verify(_file(tmp_path / "m.onnx", nodes), Doubled(), torch.randn(3, 4))
    assert report
    assert report.suspects == []


def test_export_names_them_with_their_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quotient(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x // 0.1

    monkeypatch.setattr(translate, "with_exact_operators", lambda program: program)
    with pytest.raises(ParityError, match=r"suspect: Floor \(in layer 0\): a quotient is rounded before"):
        export(nn.Sequential(Quotient()), torch.ones(3, 4), tmp_path / "m.onnx")

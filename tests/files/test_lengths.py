"""The lengths of its dynamic axes at which a file is right: written, shown, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from nnorm_export import (
    ExportReport,
    InputError,
    ModelFileError,
    change_form,
    export,
    freeze,
    load,
    optimize,
    write_repository,
)
from nnorm_export.files.inspection import describe
from nnorm_export.files.lengths import described, from_json, refuse_others
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.layers import LayerNormalNorm

AUTO: Any = Dim.AUTO
FLOAT = np.dtype("float32")


class Positions(nn.Module):
    """A table of 300 positions, from which torch.export finds the greatest length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = LayerNormalNorm(4), nn.Parameter(torch.linspace(0, 1, 300)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.table[: x.shape[1]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    model, x = Positions().eval(), torch.randn(3, 6, 4)
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    return export(model, (x,), path, dynamic_shapes=({0: Dim("n", min=1, max=8), 1: "seq"},))


def rows(length: int, batch: int = 2) -> np.ndarray[Any, Any]:
    return np.zeros((batch, length, 4), np.float32)


def test_a_range_that_torch_found_is_said_and_kept(written: ExportReport, tmp_path: Path) -> None:
    assert written.lengths == describe(written.path).lengths == {"n": (1, 8), "seq": (1, 300)}
    assert "n 1..8, seq 1..300" in str(written)
    repository = write_repository(written.path, tmp_path)
    assert '# right for the lengths "seq 1..300"' in repository.config
    assert "max_batch_size: 8" in repository.config
    assert any("is right for n 1..8, seq 1..300" in note for note in repository.notes)


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
def test_other_lengths_are_refused(written: ExportReport, runtime: str) -> None:
    runner = load(written.path, runtime)
    for length in (1, 300, 300):
        assert runner(rows(length))[0].shape == (2, length, 4)
    refused = r"axis 1 of input 'x' \(seq\) has the length 301, and the file is right for 1 to 300"
    for _ in range(2):
        with pytest.raises(InputError, match=refused):
            runner(rows(301))
    with pytest.raises(InputError, match="the length 9, and the file is right for 1 to 8"):
        runner(rows(5, batch=9))


def test_files_that_are_made_from_it_keep_the_range(written: ExportReport, tmp_path: Path) -> None:
    change_form(written.path, tmp_path / "p.onnx", "primitives")
    optimize(written.path, tmp_path / "o.onnx")
    for name in ("p.onnx", "o.onnx"):
        with pytest.raises(InputError, match="is right for 1 to 300"):
            load(tmp_path / name)(rows(301))


@pytest.mark.parametrize(("target", "name"), [("torchscript", "m.pt"), ("pt2", "m.pt2")])
def test_files_of_pytorch_have_it_in_their_note(target: str, name: str, tmp_path: Path) -> None:
    model, x = Positions().eval(), torch.randn(3, 6, 4)
    report = export(model, (x,), tmp_path / name, target=target, dynamic_shapes=({0: "n", 1: "seq"},))
    assert report.lengths == describe(report.path).lengths == {"seq": (1, 300)}
    with pytest.raises(InputError, match="is right for 1 to 300"):
        load(report.path)(rows(301))


def test_axes_that_the_operators_make_equal(tmp_path: Path) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) @ x

    x = torch.randn(3, 6, 6)
    report = export(Square(), (x,), tmp_path / "m.onnx", dynamic_shapes=({0: "n", 1: "h", 2: "w"},))
    assert described(report.lengths) == ["w the same in all axes"]
    with pytest.raises(InputError, match="the file takes one length of w in all axes"):
        load(report.path)(np.zeros((2, 5, 6), np.float32))


def test_the_range_of_a_branch_in_a_program(tmp_path: Path) -> None:
    class Branch(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * 2 if x.shape[1] > 40 else self.norm(x)

    program = torch.export.export(
        freeze(Branch().eval()), (torch.randn(3, 6, 4),), dynamic_shapes=({0: AUTO, 1: AUTO},)
    )
    report = export(program, (), tmp_path / "m.onnx")
    assert [*report.lengths.values()] == [(1, 40)]
    with pytest.raises(InputError, match="is right for 1 to 40"):
        load(report.path)(rows(41))


def test_a_batch_of_any_size_has_no_range(tmp_path: Path) -> None:
    report = export(LayerNormalNorm(4).eval(), torch.randn(3, 4), tmp_path / "m.onnx")
    assert report.lengths == {}
    assert "nnorm_export.lengths" not in {prop.key for prop in onnx.load(report.path).metadata_props}


LENGTHS: dict[str, tuple[int, int | None]] = {"s": (3, 5), "t": (1, None)}


@pytest.mark.parametrize(
    ("shapes", "lengths", "message"),
    [
        ([("s",)], [(3,)], None),
        ([("s",)], [(2,)], "has the length 2, and the file is right for 3 to 5"),
        ([("2*s",)], [(10,)], None),
        ([("2*s",)], [(12,)], "has the length 12, and the file is right for 6 to 10"),
        ([("2*s",)], [(7,)], r"has the length 7, and must be 2\*s"),
        ([("s + 1", "s")], [(5, 4)], None),
        ([("s + 1", "s")], [(5, 5)], "takes one length of s in all axes"),
        ([("t",), ("u", "t")], [(9,), (2, 9)], None),
        (
            [("t",), ("u", "t")],
            [(9,), (2, 8)],
            "axis 1 of input '1' has the length 8, and axis 0 of input '0' makes t 9",
        ),
        ([("u", "u")], [(1, 2)], None),
        ([(None, 4)], [(9, 4)], None),
        ([("s*t", "s//2")], [(9, 4)], None),
    ],
)
def test_lengths(shapes: list[Any], lengths: list[tuple[int, ...]], message: str | None) -> None:
    infos = [TensorInfo(str(number), FLOAT, shape) for number, shape in enumerate(shapes)]
    feed = {str(number): np.zeros(each, FLOAT) for number, each in enumerate(lengths)}
    if message is None:
        refuse_others(LENGTHS, infos, feed)
        return
    with pytest.raises(InputError, match=message):
        refuse_others(LENGTHS, infos, feed)


@pytest.mark.parametrize(
    "text", ["[]", '{"s": 3}', '{"s": [-1, 4]}', '{"s": [5, 4]}', '{"s": [true, 4]}', '{"s": [1.5, null]}', "{"]
)
def test_lengths_that_others_have_changed(text: str, written: ExportReport, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lengths|JSON|line 1"):
        from_json(text)
    model = onnx.load(written.path)
    next(prop for prop in model.metadata_props if prop.key == "nnorm_export.lengths").value = text
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match="its metadata is damaged"):
        describe(tmp_path / "m.onnx")

"""A comparison that compares nothing fails with the reason: no rows, no finite elements, NaN, constant outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import edited, predicate_of
from onnx import numpy_helper
from torch import Tensor, nn

from nnorm_export import ParityError, bisect, export, replay, verify
from nnorm_export.layers import BatchNormalNorm1d
from nnorm_export.parity.verdict.compare_outputs import compare_output
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.testing import assert_parity

NAN, INF = float("nan"), float("inf")


class Net(nn.Sequential):
    def __init__(self, head: float = 1.0) -> None:
        super().__init__(nn.Linear(4, 6), BatchNormalNorm1d(6), nn.Linear(6, 3))
        with torch.no_grad():
            self[2].weight.mul_(head)
        self.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def path(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(model, torch.randn(5, 4), tmp_path_factory.mktemp("files") / "m.onnx").path


def diverged(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] = NAN  # type: ignore[index, operator]


@pytest.mark.parametrize("criterion", ["budget", "allclose"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x * NAN, "Net itself gives NaN in 15 of 15 elements; look for NaN"),
        (lambda x: torch.cat([x[:4], x[4:] * NAN]), "Net itself gives NaN in 3 of 15"),
        (lambda x: x * INF, "Net itself gives NaN"),
        (lambda x: x[:0], "it is empty; give at least one row"),
    ],
    ids=["nan", "one row of nan", "infinite", "empty"],
)
def test_inputs(
    change: Callable[[Tensor], Tensor], reason: str, criterion: str, path: Path, model: nn.Module, tmp_path: Path
) -> None:
    x = change(torch.randn(5, 4))
    report = verify(path, model, x, criterion=criterion, certificate=tmp_path / "c")
    assert not report
    assert not (tmp_path / "c").exists()
    assert reason in report.outputs[0].note
    assert "NOT COMPARED" in str(report)
    assert report.outputs[0].budget_share is report.outputs[0].top1_agreement is None
    with pytest.raises(AssertionError, match="is not shown to compute what Net computes"):
        assert_parity(path, model, x, criterion=criterion)
    found = bisect(path, model, x)
    assert (bool(found), found.culprit) == (False, None)
    assert "nothing was compared" in found.verdict


@pytest.mark.slow
def test_a_diverged_checkpoint_and_a_head_of_zeros_are_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    nan, constant = Net(), Net(head=0.0)
    diverged(nan)
    for model, reason in ((nan, "Net itself gives NaN"), (constant, "it does not depend on the input, and no other")):
        for x in (torch.randn(5, 4), torch.randn(1, 4), torch.zeros(1, 4)):
            with pytest.raises(ParityError, match=rf"(?s)m.onnx was not written: nothing was compared.*{reason}"):
                export(model, x, tmp_path / "m.onnx")
            written = export(model, x, tmp_path / "unverified.onnx", verify=False).path
            assert reason in verify(written, model, x, certificate=tmp_path / "c").outputs[0].note
            assert "nothing was compared" in bisect(written, model, x).verdict
    assert not (tmp_path / "c").exists()


class Outputs(nn.Module):
    """A function of a BatchNormalNorm's result."""

    def __init__(self, of: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.norm, self.of = BatchNormalNorm1d(3).eval(), of

    def forward(self, x: Tensor) -> object:
        return self.of(self.norm(x))


MASK = torch.tensor([[0.0, -INF, 0.0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "passed", "notes"),
    [
        (lambda y: y + MASK, True, ["4 of 12 elements are infinite, and must be so in both"]),
        (lambda y: y * INF, False, ["Outputs itself gives no finite element"]),
        (lambda y: (y, torch.full((2, 2), 3.0)), True, ["", "it does not depend on the input"]),
        (lambda y: (y, torch.tensor(y.shape[1])), True, ["", "it does not depend on the input"]),
        (lambda y: (y * 0, y.argmax(1)), False, ["it does not depend on the input, and no other output does", ""]),
        (lambda y: (y > -INF).long(), False, ["it does not depend on the input, and no other output does"]),
        (lambda y: y.argmax(1), True, [""]),
    ],
    ids=["mask", "infinite", "anchors", "shape", "zeros and classes", "constant integers", "classes"],
)
def test_outputs(of: Callable[[Tensor], object], passed: bool, notes: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Outputs(of)
    x = torch.rand(4, 3) + 0.5
    report = verify(export(model, x, tmp_path / "m.onnx", verify=False).path, model, x)
    assert bool(report) is passed
    assert [output.note[: len(note)] for output, note in zip(report.outputs, notes, strict=True)] == notes


@pytest.mark.parametrize("rows", [1, 5], ids=["one row", "equal rows"])
def test_a_constant_file_is_found_by_changed_inputs(rows: int, path: Path, model: nn.Module, tmp_path: Path) -> None:
    """The file returns for every input what is right for this one."""
    x = torch.randn(1, 4).expand(rows, 4)
    proto = onnx.load(path)
    weight = next(tensor for tensor in proto.graph.initializer if list(tensor.dims) in ([3, 6], [6, 3]))
    bias = next(tensor for tensor in proto.graph.initializer if list(tensor.dims) == [3])
    weight.CopyFrom(numpy_helper.from_array(np.zeros(tuple(weight.dims), np.float32), weight.name))
    bias.CopyFrom(numpy_helper.from_array(model(x)[0].detach().numpy(), bias.name))
    onnx.save(proto, tmp_path / "constant.onnx")
    assert verify(path, model, x)
    assert not verify(tmp_path / "constant.onnx", model, x, certificate=tmp_path / "none")
    assert verify(path, model, x, certificate=tmp_path / "c")
    assert predicate_of(tmp_path / "c")["data_sets"] == 2
    assert replay(path, tmp_path / "c")


def test_replay_of_constants_fails(path: Path, model: nn.Module, tmp_path: Path) -> None:
    """A certificate that shows nothing, made by hand for a file whose results are constant."""
    folder = tmp_path / "c"
    verify(path, model, torch.randn(5, 4), certificate=folder)
    zeros = torch.zeros(5, 4)
    results = {
        "test_data_set_0/input_0.pb": zeros,
        "test_data_set_0/output_0.pb": model(zeros),
        "float64_0/output_0.pb": copy.deepcopy(model).double()(zeros.double()),
    }
    for name, values in results.items():
        (folder / name).write_bytes(numpy_helper.from_array(values.detach().numpy()).SerializeToString())
    with edited(folder) as certificate:
        certificate["data_sets"] = 1
    report = replay(path, folder)
    assert (bool(report), report.outputs[0].compared) == (False, False)


@pytest.mark.slow
def test_a_model_that_takes_no_other_input_is_compared_on_this_one(tmp_path: Path) -> None:
    class Particular(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.jit.is_tracing() and not torch.compiler.is_compiling():
                assert bool((x == 1).all())
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Particular(), torch.ones(1, 4)
    path = export(model, x, tmp_path / "m.onnx", verify=False).path
    report = verify(path, model, x)
    assert report
    assert "it may be constant; give more rows" in report.outputs[0].note
    assert "no other output does" in verify(path, model, torch.ones(5, 4)).outputs[0].note


@pytest.mark.parametrize(
    ("criterion", "dtype", "has_float64", "passed"),
    [
        ("budget", np.float32, False, False),
        ("budget", np.float16, False, False),
        ("budget", np.float32, True, True),
        ("budget", np.float64, False, True),
        ("allclose", np.float32, False, True),
    ],
)
def test_an_infinity_that_float64_does_not_show_is_not_equal(
    criterion: str, dtype: type, has_float64: bool, passed: bool
) -> None:
    """Another result, 600 times as great, would overflow too."""
    y = np.array([1.0, INF, 2.0], dtype)
    parity = compare_output(
        "y", y, y, y.astype(np.float64) if has_float64 else None, Criterion.of(criterion, None, None)
    )
    assert parity.passed is passed
    assert ("does not run in float64, which would show whether they are meant or overflow" in parity.note) is not passed


def test_empty_parts_are_not_compared() -> None:
    empty = np.zeros((0, 3), np.float32)
    for float64 in (None, empty.astype(np.float64)):
        assert not compare_output("y", empty, empty, float64).passed

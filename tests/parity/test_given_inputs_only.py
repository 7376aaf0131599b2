"""Where a model takes no changed inputs, or is unstable on them, the report, its JSON and the certificate say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import predicate_of
from function_module import Function
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from nnorm_export import ParityError, export, replay, verify

X = torch.softmax(torch.linspace(-1, 1, 20).view(4, 5), 1).sort(1).values
ONLY = "compared on the given inputs only, because "


def scaled_by_its_greatest(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and not torch.equal(x, X):
        raise ValueError("not these probabilities")
    return x * x.max()


def infinite_elsewhere(x: Tensor) -> Tensor:
    return x * x.max() / float(torch.allclose(x, X.to(x.dtype), atol=1e-4))


def unstable_elsewhere(x: Tensor) -> Tensor:
    is_given = bool((x[:, 1:] >= x[:, :-1]).all()) and float(x.sum()) > 3.9
    return x * x.max() if is_given else x * x.max() + ((x - 1e8) + 1e8)


def any_probabilities(x: Tensor) -> Tensor:
    return x * x.max()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that holds the greatest of the given numbers."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 5]) for name in "xy")
    greatest = numpy_helper.from_array(np.float32(X.max()), "greatest")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "greatest"], ["y"])], "g", [x], [y], [greatest])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (scaled_by_its_greatest, "the model refuses others (not these probabilities)"),
        (infinite_elsewhere, "the model returns NaN, infinity or nothing for others"),
        (unstable_elsewhere, "PyTorch is unstable on others"),
    ],
)
def test_it_is_said(of: Callable[[Tensor], Tensor], reason: str, path: Path, tmp_path: Path) -> None:
    report = verify(path, Function(of), (X,), certificate=tmp_path / "c")
    assert report
    for text in (report.given_only, str(report), report.to_json()["given_only"]):
        assert f"{ONLY}{reason}: a number that the file keeps of them does not show. Verify the file on more" in text
    assert predicate_of(tmp_path / "c")["given_only"] == report.given_only
    assert replay(path, tmp_path / "c").given_only == report.given_only


def test_nothing_is_said_where_changed_inputs_were_compared(path: Path) -> None:
    report = verify(path, Function(any_probabilities), (X,))
    assert not report
    assert report.given_only == ""


@pytest.mark.slow
def test_tokens_with_a_fixed_beginning_and_end(tmp_path: Path) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and not bool(((ids[:, 0] == 1) & (ids[:, -1] == 2)).all()):
                raise ValueError("from 1 to 2")
            return self.table(ids)

    ids = torch.tensor([[1, 5, 7, 2], [1, 3, 4, 2]])
    model = Tokens().eval()
    report = export(model, ids, tmp_path / "m.onnx").parity
    assert report is not None
    assert f"{ONLY}the model refuses others (from 1 to 2)" in str(report)
    with pytest.raises(ParityError, match=r"s\.onnx was not written: compared on the given inputs only.*strict=True"):
        export(model, ids, tmp_path / "s.onnx", strict=True)
    assert not (tmp_path / "s.onnx").exists()

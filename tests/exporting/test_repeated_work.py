"""What an export does once and not again: the perturbed runs of a row, the lines of source of a node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._traceback import CapturedTraceback

from nnorm_export import export
from nnorm_export.exporting.request import Request, freeze_source
from nnorm_export.exporting.trace import exporting_state, trace
from nnorm_export.layers import BatchNormalNorm2d
from nnorm_export.parity.reference.perturbation import flip_last_bits
from nnorm_export.parity.reference.pytorch_model import PyTorchModel


class Centered(nn.Module):
    """Subtracts the mean over the batch, so that a row depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class RowsButOne(nn.Module):
    """Computes rows, and the number of rows: what a batch of another size returns is not rows of this one's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.shape[0]


@pytest.fixture
def perturbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches of the examples that were run with random last bits."""
    batches = []
    original = PyTorchModel.perturbed_runs

    def perturbed_runs(self: PyTorchModel, example: dict[str, Any], result: Any) -> Any:
        batches.append(len(next(iter(example.values()))))
        return original(self, example, result)

    monkeypatch.setattr(PyTorchModel, "perturbed_runs", perturbed_runs)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "batch", "expected"),
    [
        pytest.param(nn.Identity(), 2, [2, 2], id="rows, and changed ones"),
        pytest.param(nn.Identity(), 1, [1, 1], id="a single row, and a changed one"),
        pytest.param(nn.Identity(), 8, [8, 1, 3, 8], id="eight rows have fewer runs than one or three need"),
        pytest.param(Centered(), 2, [2, 1, 3, 2], id="a row depends on the others"),
        pytest.param(RowsButOne(), 2, [2, 1, 3, 2], id="a row depends on the batch"),
    ],
)
def test_rows_of_the_first_batch_are_perturbed_once(
    layer: nn.Module, batch: int, expected: list[int], perturbed: list[int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormalNorm2d(4), layer).eval()
    report = export(model, torch.randn(batch, 3, 8, 8), tmp_path / "model.onnx")
    assert report.parity
    assert perturbed == expected  # the last: of changed inputs


@pytest.mark.slow
def test_decompositions_record_no_stacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch records a stack for each node of a decomposition whose own node has none: a third of an export's time."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormalNorm2d(4), nn.Hardswish()).eval()
    request = Request(model=model, args=torch.randn(2, 3, 8, 8), path=tmp_path / "m.onnx", verify=False)
    frozen = freeze_source(request)
    recorded = []
    with exporting_state():
        program = trace(frozen).program
        extract = CapturedTraceback.extract
        stacks = SimpleNamespace(extract=lambda *args, **kwargs: recorded.append(1) or extract(*args, **kwargs))
        monkeypatch.setattr("torch.fx.proxy.CapturedTraceback", stacks)
        decomposed = program.run_decompositions()
    assert len(recorded) <= len(program.graph.nodes), "at most one for each, and none inside a decomposition"
    lines = [node.meta.get("stack_trace", "") for each in (program, decomposed) for node in each.graph.nodes]
    assert not any(".py" in line for line in lines), "they name files of this machine"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_last_bits_are_flipped_in_half_of_the_elements_and_flipped_back(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    tensors = [torch.randn(1000, dtype=dtype), special, torch.randn(7, 5, dtype=dtype).T, torch.tensor(0.3).to(dtype)]
    before = [tensor.clone() for tensor in tensors]
    flip_last_bits(tensors, 1)
    changed = tensors[0] != before[0]
    assert 400 < int(changed.sum()) < 600
    np.testing.assert_allclose(tensors[0].double(), before[0].double(), rtol=float(torch.finfo(dtype).eps))
    assert torch.equal(special.view(torch.uint8), before[1].view(torch.uint8))
    flip_last_bits(tensors, 1)
    assert all(torch.equal(a, b) for a, b in zip(tensors[::2], before[::2], strict=True))

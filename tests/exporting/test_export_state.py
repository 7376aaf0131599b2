"""Models whose forward changes more than its result: buffers, other attributes, its inputs, the mode of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nnorm_export import ExportError, export, export_program, export_torchscript, load, verify
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.names import TORCHSCRIPT_METHODS


class Cache(nn.Module):
    """A step of a decoder whose keys are in a buffer: the first call looks right without what later ones need."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)
        self.register_buffer("keys", torch.zeros(3, 4))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.keys[position] = self.norm(x)
        seen = torch.arange(3)[:, None] <= position
        return torch.where(seen, self.keys, torch.zeros(())).sum(0, keepdim=True)


class Stream(nn.Module):
    """Adds the result of the call before, which it keeps in a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) + self.last
        self.last = y.mean(0)
        return y


class InPlaceStream(Stream):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) + self.last
        self.last += 1
        return y


class Late(Stream):
    """The first call makes the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        last = torch.zeros(4) if self.last is None else self.last
        y = self.norm(x) + last
        self.last = y.mean(0)
        return y


class First(Late):
    """Keeps what it computed in the first call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None:
            self.last = x.mean()
        return self.norm(x) - self.last


class Pair(Late):
    """Keeps its state in a tuple, as that of an LSTM."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if self.last is None else self.norm(x) + self.last[0]
        self.last = (y.mean(),)  # type: ignore[assignment]
        return y


class Counting(nn.Module):
    """Changes buffers that no result depends on: a count, and one that is written before it is read."""

    calls: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scratch = x.mean(0)
        return self.norm(x) + self.scratch


STEP = (torch.randn(1, 4), torch.tensor([0]))


@pytest.mark.parametrize(
    ("model", "inputs", "path"),
    [
        (Cache(), STEP, "keys"),
        (Stream(), STEP[:1], "last"),
        (Late(), STEP[:1], "last"),
        (First(), STEP[:1], "last"),
        (Pair(), STEP[:1], r"last\[0\]"),
    ],
    ids=["buffer", "attribute", "late", "first", "tuple"],
)
@pytest.mark.parametrize("write", [export, export_program, export_torchscript])
def test_state_that_a_result_depends_on_is_refused(
    write: Callable[..., Any], model: nn.Module, inputs: tuple[Tensor, ...], path: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"forward changes {path}, and its result depends on what an earlier call"):
        write(model.eval(), inputs, tmp_path / "m.pt2", dynamic_shapes={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [export, export_program, export_torchscript])
def test_a_tensor_that_torch_does_not_know(write: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="forward writes to last, which is neither a parameter nor a buffer"):
        write(InPlaceStream().eval(), STEP[:1], tmp_path / "m.pt2", dynamic_shapes={})
    kept = export_program(InPlaceStream().eval(), STEP[:1], tmp_path / "m.pt2", operators="kept", verify=False)
    assert kept.path.exists()


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.mean(0))
        return x + self.total


def test_state_of_an_exported_program_is_refused(tmp_path: Path) -> None:
    with torch.no_grad():
        program = torch.export.export(nn.Sequential(nn.Identity(), Adding()).eval(), (torch.randn(2, 4),))
    for each in (program, program.run_decompositions({})):
        for compare in (True, False):
            with pytest.raises(ExportError, match=r"forward changes 1\.total, and its result"):
                export(each, (), tmp_path / "m.onnx", verify=compare)


def test_pt2_and_scripts_keep_state_from_the_models_own_on(tmp_path: Path) -> None:
    files = [
        export_program(Adding().eval(), (torch.ones(2, 4),), tmp_path / "m.pt2", verify=False).path,
        *(
            export_torchscript(
                Adding().eval(), torch.ones(2, 4), tmp_path / f"{method}.pt", method=method, verify=False
            ).path
            for method in TORCHSCRIPT_METHODS
        ),
    ]
    for path in files:
        runner, model = load(path), Adding().eval()
        for _ in range(3):
            x = np.ones((2, 4), np.float32)
            np.testing.assert_array_equal(runner(x)[0], model(torch.from_numpy(x)).numpy())


@pytest.mark.slow
def test_a_buffer_that_no_result_depends_on_is_no_state(tmp_path: Path) -> None:
    model = Counting().eval()
    assert export(model, torch.randn(3, 4), tmp_path / "m.onnx").parity
    assert model.calls == 0


class Scratch(nn.Module):
    """Overwrites a buffer before it reads it, and makes a table when it is needed."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)
        self.register_buffer("scratch", torch.zeros(4))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.zero_()
        self.scratch.add_(x.mean(0))
        if self.table is None:
            self.table = torch.arange(4.0)
        return self.norm(x) + self.scratch + self.table


@pytest.mark.slow
@pytest.mark.parametrize("write", [export, export_program, export_torchscript])
def test_a_buffer_that_is_overwritten_before_it_is_read_is_no_state(write: Callable[..., Any], tmp_path: Path) -> None:
    assert write(Scratch().eval(), torch.randn(3, 4), tmp_path / "m.pt2").parity


class Written(Stream):
    """Writes to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.zeros(4), requires_grad=False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) + self.last
        self.last.copy_(y.mean(0))
        return y


def test_a_trace_keeps_buffers_alone(tmp_path: Path) -> None:
    for model in (InPlaceStream(), Written()):
        with pytest.raises(ExportError, match=r"forward (changes|writes to) last"):
            export_torchscript(model.eval(), STEP[:1], tmp_path / "m.pt", verify=False)
    expanded = Counting().eval()
    expanded.register_buffer("ones", torch.ones(1).expand(4))
    assert export_torchscript(expanded, torch.randn(3, 4), tmp_path / "m.pt").parity


class CacheAmongInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[0] = self.norm(x)[0]
        return cache.sum(0, keepdim=True)


class ReturnedCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = CacheAmongInputs()

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(x, cache), cache


@pytest.mark.slow
def test_an_input_that_is_changed_in_place(tmp_path: Path) -> None:
    inputs = (torch.randn(1, 4), torch.zeros(3, 4))
    with pytest.warns(UserWarning, match="forward changes its input cache in place, and an ONNX file does not"):
        export(CacheAmongInputs().eval(), inputs, tmp_path / "m.onnx", dynamic_shapes={})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = export(ReturnedCache().eval(), inputs, tmp_path / "m.onnx", dynamic_shapes={})
    assert verify(report.path, ReturnedCache().eval(), inputs)


class GradientsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = LayerNormalNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        return self.norm(self.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize(("write", "name"), [(export, "m.onnx"), (export_program, "m.pt2")], ids=["onnx", "pt2"])
def test_gradients_that_forward_turns_on(write: Callable[..., Any], name: str, tmp_path: Path) -> None:
    assert write(GradientsOn().eval(), torch.randn(3, 4), tmp_path / name).parity

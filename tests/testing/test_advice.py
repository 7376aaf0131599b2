"""A failed assertion of parity says how to find the layer, in a shell and in the test."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import nnorm_export
from nnorm_export import layers
from nnorm_export.testing import assert_parity
from nnorm_export.testing.assertions import _factory


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(6, width), layers.LayerNormalNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


class Needing(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


INPUTS = torch.linspace(-2, 3, 24).reshape(4, 6)


def wrong(path: Path, **options: Any) -> Path:
    """A file of Net whose normalization adds another bias."""
    nnorm_export.export(Net().eval(), INPUTS, path, verify=False, **options)
    proto = onnx.load(path)
    biases = [tensor for tensor in proto.graph.initializer if tensor.name == "norm.bias"]
    for bias in biases or proto.graph.initializer:
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + bias.name.endswith("bias"), bias.name))
    onnx.save(proto, path)
    return path


def message(path: Path, model: nn.Module, **options: str) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        assert_parity(path, model, INPUTS, **options)
    return str(caught.value).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"runtime": "reference"}])
def test_the_commands_find_the_layer(options: dict[str, str], tmp_path: Path) -> None:
    path, model = wrong(tmp_path / "m.onnx"), Net().eval()
    *_, run, command, in_the_test, line = message(path, model, **options)
    assert (run, in_the_test) == ("To find the layer that differs, run", "or, in the test,")
    given = ["-m", f"{__name__}:Net", "-c", "CHECKPOINT", "-i", "DATA"]
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert shlex.split(command) == ["nnorm-export", "bisect", str(path), *given, *flags]
    found = eval(line.strip().removeprefix("print"), {"nnorm_export": nnorm_export, "model": model, "inputs": INPUTS})
    assert [layer.path for layer in found.layers if layer.own is not None and not layer.own.passed] == ["norm"]


@pytest.mark.slow
def test_where_no_layer_is_to_blame_none_is_looked_for(tmp_path: Path) -> None:
    inlined = message(wrong(tmp_path / "m.onnx", form="primitives"), Net().eval())
    other = Net().eval()
    with torch.no_grad():
        other.linear.weight *= 2
    others_weights = message(wrong(tmp_path / "m.onnx"), other)
    assert not any("bisect" in line for line in (*inlined, *others_weights))
    assert "made from other weights" in others_weights[-1]


@pytest.mark.parametrize(
    ("model", "factory"),
    [
        (Net(), f"{__name__}:Net"),
        (Needing(3), "MODULE:FACTORY"),
        (nn.Sequential(), "MODULE:FACTORY"),
        (type("Local", (Net,), {"__qualname__": "build.<locals>.Local"})(), "MODULE:FACTORY"),
    ],
)
def test_the_factory_is_named_where_it_builds_a_model(model: nn.Module, factory: str) -> None:
    assert _factory(type(model)) == factory

"""probe(): every branch of every operator is reached, and a fault that no ordinary data shows is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from sampled import long
from small_network import Network, randomized
from torch import nn
from typer.testing import CliRunner

from nnorm_export import ModelFileError, bisect, export, layers, probe, verify
from nnorm_export.cli import app
from nnorm_export.domain import OPERATORS, Step
from nnorm_export.domain.batch_normal_norm import BATCH_NORMAL_NORM

RUNTIMES = ["onnxruntime", "reference"]


def with_epilogues() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.BatchNormalNorm2d(5), layers.BatchNormalNorm2d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = (self.second(self.first(x).relu()) + x).relu()
            return y

    return randomized(Block()).eval()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("dtype", ["fp32", long("fp16"), "fp64"])
def test_every_branch_of_every_operator(dtype: str, runtime: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = randomized(Network()).eval()
    for model, x in ((network, torch.randn(4, 3, 8, 6)), (with_epilogues(), torch.randn(3, 5, 4, 3))):
        path = export(model, x, tmp_path / "m.onnx", dtype=dtype, verify=False).path
        report = probe(path, runtime=runtime)
        assert report, [str(layer.parity) for layer in report.layers if not layer.parity.passed]
        assert [layer.missed for layer in report.layers] == [()] * len(report.layers)
        assert {layer.implementation for layer in report.layers} == {"kernel" if runtime == "onnxruntime" else "body"}
    assert [layer.op_type for layer in report.layers] == ["BatchNormalNormRelu", "BatchNormalNormAddRelu"]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_epilogue_that_is_only_declared(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """export(), probe() and bisect() ask the declaration: an epilogue needs no code in them."""
    steps = Step("Sub", np.subtract, operand="subtrahend"), Step("Tanh", np.tanh)
    operator = BATCH_NORMAL_NORM.followed_by(*steps)
    monkeypatch.setitem(OPERATORS, operator.op_type, operator)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = layers.BatchNormalNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norm(self.linear(x)) - x)

    torch.manual_seed(0)
    model, x = randomized(Block()).eval(), torch.randn(8, 6)
    path = export(model, x, tmp_path / "m.onnx").path
    probed, compared = probe(path, runtime=runtime), bisect(path, model, x, runtime=runtime)
    assert [layer.op_type for layer in probed.layers] == ["BatchNormalNormSubTanh"]
    assert probed, probed.layers[0].parity
    assert probed.layers[0].missed == ()
    assert compared, compared.verdict
    assert compared.layers[0].own is not None
    monkeypatch.setitem(OPERATORS, operator.op_type, BATCH_NORMAL_NORM.followed_by(steps[0], Step("Tanh", np.sin)))
    assert not probe(path, runtime=runtime)
    assert not bisect(path, model, x, runtime=runtime)


def test_rows_that_are_too_short_say_what_they_cannot_reach(tmp_path: Path) -> None:
    path = export(layers.LayerNormalNorm(2), torch.randn(4, 2), tmp_path / "m.onnx").path
    (layer,) = probe(path).layers
    assert layer.parity.passed
    assert "η₊ = 0" in layer.missed


@pytest.mark.parametrize("layer", [layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6)], ids=["batch", "layer"])
def test_a_fault_that_ordinary_data_does_not_show(
    layer: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")  # the fault is in the body: |h| ends at 2.2
    torch.manual_seed(0)
    model = nn.Sequential(layer).eval()
    x = torch.rand(8, 6)
    path = export(model, x, tmp_path / "m.onnx").path
    proto = onnx.load(path)
    body = proto.functions[0].node
    index, node = next((index, node) for index, node in enumerate(body) if "nnorm__h" in node.output)
    node.output[list(node.output).index("nnorm__h")] = "whole_h"
    bounds = [
        onnx.helper.make_node("Constant", [], [name], value=onnx.helper.make_tensor("", 1, [], [value]))
        for name, value in (("least", -2.2), ("greatest", 2.2))
    ]
    clip = onnx.helper.make_node("Clip", ["whole_h", "least", "greatest"], ["nnorm__h"])
    for offset, extra in enumerate((*bounds, clip)):
        body.insert(index + 1 + offset, extra)
    onnx.save(proto, path)
    assert verify(path, model, x)
    report = probe(path)
    assert not report
    assert report.layers[0].implementation == "body"


def test_what_has_no_nodes_is_refused(tmp_path: Path) -> None:
    path = export(layers.LayerNormalNorm(4), torch.randn(3, 4), tmp_path / "m.onnx", form="primitives").path
    with pytest.raises(ModelFileError, match="its form is 'primitives', in which no normalization is a node by itself"):
        probe(path)


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "probed_nets.py").write_text(
        "from torch import nn\nfrom nnorm_export import layers\n"
        "def build():\n    return nn.Sequential(layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = CliRunner().invoke
    assert run(app, ["export", "-m", "probed_nets:build", "-i", "8,6", "-o", "m.onnx"]).exit_code == 0
    shown = run(app, ["verify", "m.onnx", "-m", "probed_nets:build", "--probes"])
    assert shown.exit_code == 0, shown.output
    assert "7 of 7" in shown.stdout
    probes = json.loads(run(app, ["verify", "m.onnx", "-m", "probed_nets:build", "--probes", "--json"]).stdout)[
        "probes"
    ]
    assert probes["passed"] is True
    assert [layer["op_type"] for layer in probes["layers"]] == ["BatchNormalNorm", "LayerNormalNorm"]

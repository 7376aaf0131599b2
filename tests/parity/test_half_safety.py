"""float16_risks(): each reason by a layer that has it, and none where there is nothing to fear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_network import Network, randomized
from torch import nn
from typer.testing import CliRunner

from nnorm_export import InputError, float16_risks, layers
from nnorm_export.cli import app


class Amplified(nn.Module):
    def __init__(self, norm: nn.Module, gain: float) -> None:
        super().__init__()
        self.norm, self.gain = norm, gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x * self.gain)
        return y


def test_nothing_to_fear() -> None:
    assert float16_risks(randomized(Network()), torch.randn(4, 3, 8, 6)) == []
    path: Any = "model.onnx"
    with pytest.raises(InputError, match=r"float16_risks takes a torch\.nn\.Module, got str; build the model"):
        float16_risks(path, torch.randn(4, 3, 8, 6))
    frozen = nn.InstanceNorm2d(4, track_running_stats=True)  # takes no statistics of its input
    assert float16_risks(Amplified(frozen, 1e3), torch.randn(3, 4, 5, 5)) == []


@pytest.mark.parametrize(
    ("norm", "shape", "gain", "unsafe", "sums"),
    [
        (layers.LayerNormalNorm(64), (3, 64), 1e5, "its input reaches", "the sum of 64 squares reaches"),
        (layers.LayerNormalNorm(64), (3, 64), 100.0, "", "the sum of 64 squares reaches"),
        (nn.LayerNorm(64), (3, 64), 1e-3, "", "a variance is"),
        (layers.GroupNormalNorm(4, 2), (3, 4, 5), 1e3, "", "the sum of 10 squares reaches"),
        (layers.InstanceNormalNorm2d(4), (3, 4, 5, 5), 1e3, "", "the sum of 25 squares reaches"),
        (layers.EvoNormS0(4, 2), (3, 4, 5), 1e3, "", "the sum of 10 squares reaches"),
        (nn.InstanceNorm1d(4), (4, 25), 1e3, "", "the sum of 25 squares reaches"),
        (layers.BatchNormalNorm1d(4), (3, 4), 1e6, "its output reaches", ""),
    ],
)
def test_reasons(norm: nn.Module, shape: tuple[int, ...], gain: float, unsafe: str, sums: str) -> None:
    torch.manual_seed(0)
    risk, *others = float16_risks(Amplified(norm, gain), torch.randn(shape))
    assert risk.path == "norm"
    assert [other.path for other in others] == ([""] if gain > 65504 else [])  # where the gain is
    assert risk.layer == type(norm).__name__
    assert any(reason.startswith(unsafe) for reason in risk.unsafe) if unsafe else not risk.unsafe
    assert any(reason.startswith(sums) for reason in risk.sums) if sums else not risk.sums
    if "overflow" in " ".join(risk.sums):  # and so it does: the sum is infinite in float16
        values = torch.randn(shape) * gain
        assert torch.isinf(values.half().square().sum(dtype=torch.float16))


def test_bad_inputs() -> None:
    with pytest.raises(InputError, match="Network does not run on these inputs"):
        float16_risks(Network(), torch.randn(4, 5, 8, 6))


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud_nets.py").write_text(
        "import torch\nfrom torch import nn\nfrom nnorm_export import layers\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Linear(6, 64), layers.LayerNormalNorm(64))\n"
        "    model[0].weight.data.mul_(1e5)\n    return model\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = CliRunner().invoke
    assert run(app, ["export", "-m", "loud_nets:build", "-i", "8,6", "-o", "m.onnx"]).exit_code == 0
    listed = run(app, ["verify", "m.onnx", "-m", "loud_nets:build", "--float16"])
    assert listed.exit_code == 0, listed.output
    assert "its input reaches" in listed.stdout
    assert "the sum of 64 squares" in " ".join(listed.stdout.split())
    assert '"float16_risks"' in run(app, ["verify", "m.onnx", "-m", "loud_nets:build", "--float16", "--json"]).stdout
    for criterion, code, words in (
        ("allclose", 0, "allclose at torch.testing's tolerances"),
        ("budget", 0, "budget: at most 10 times"),
        ("hope", 2, "'hope' is not one of budget, allclose"),
    ):
        verified = run(app, ["verify", "m.onnx", "-m", "loud_nets:build", "--criterion", criterion])
        assert (verified.exit_code, words in verified.output) == (code, True), verified.output
    both = run(app, ["verify", "m.onnx", "-m", "loud_nets:build", "--criterion", "budget", "--rtol", "1"])
    assert (both.exit_code, "rtol and atol go with the criterion allclose" in both.stderr) == (2, True)

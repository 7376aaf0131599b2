"""Inputs, weights and numbers in forward beyond float16's range are named, with their layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import InputError, ParityError, bisect, export, float16_risks, verify
from nnorm_export.float16_range import about_float16
from nnorm_export.layers import BatchNormalNorm1d, LayerNormalNorm
from nnorm_export.parity.reference.pytorch_model import PyTorchModel


class Masked(nn.Module):
    """Scores with a mask of 0 and 1 that is filled, multiplied by a buffer, or added."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = LayerNormalNorm(8), how
        self.register_buffer("big", torch.tensor(-1e9))
        self.register_buffer("causal", torch.full((8,), -1e9).where(torch.arange(8) > 4, 0.0))
        self.register_buffer("unused", torch.tensor(1e9))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.how == "fill":
            x = x.masked_fill(mask == 0, -1e9)
        elif self.how == "alpha":
            x = torch.add(x, 1 - mask, alpha=-1e9)
        elif self.how == "buffer":
            x = x + (1 - mask) * self.big
        elif self.how == "causal":
            x = x + self.causal + (1 - mask) * -1e9
        elif self.how == "cast":
            x = (x.float() * 1e6).to(x.dtype)
        elif self.how == "cast mask":
            x = x + torch.full((8,), -1e9, dtype=torch.float32).where(mask == 0, 0.0).to(x.dtype)
        elif self.how == "input":
            x = x + mask
        else:
            x = x * 1e6
        y: Tensor = self.norm(x.softmax(-1))
        return y


class Network(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.masked, self.head = Masked(how), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.head(self.masked(x, mask))
        return y


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    mask = (torch.rand(4, 8) > 0.4).float()
    mask[:, 0] = 1
    return torch.randn(4, 8), mask


@pytest.mark.parametrize(
    ("how", "named", "at_risk"),
    [
        ("fill", "the number -1e+09 (masked_fill) in layer masked", "its forward has the number -1e+09 (masked_fill)"),
        ("alpha", "the number -1e+09 (add) in layer masked", "its forward has the number -1e+09 (add)"),
        ("buffer", "masked.big, which reaches -1e+09", "its big reaches -1e+09"),
        ("scale", "the number 1e+06 (mul) in layer masked", "its forward has the number 1e+06 (mul)"),
        ("cast", "the number CAST (cast to float16) in layer masked", "its forward has the number"),
        ("cast mask", "", ""),
        ("causal", "", ""),
        ("input", "", ""),
    ],
)
def test_names(how: str, named: str, at_risk: str, inputs: tuple[Tensor, Tensor]) -> None:
    model = Network(how).eval()
    reference = PyTorchModel(model, torch.float16, ())
    x, mask = (each.half() for each in inputs)
    named = named.replace("CAST", f"{1e6 * float(x.flatten()[x.abs().argmax()]):g}")
    assert reference.beyond_float16({"x": x, "mask": mask}).names(masks=False) == ([named] if named else [])
    assert PyTorchModel(model, torch.bfloat16, ()).beyond_float16({"x": x, "mask": mask}).names(masks=True) == []
    risks = [risk for risk in float16_risks(model, inputs) if risk.unsafe]
    assert [(risk.path, risk.layer) for risk in risks] == ([("masked", "Masked")] if at_risk else [])
    assert all(reason.startswith(at_risk) for risk in risks for reason in risk.unsafe)


def test_masks_are_named_last(inputs: tuple[Tensor, Tensor]) -> None:
    reference = PyTorchModel(Network("causal").eval(), torch.float16, ())
    x, mask = (each.half() for each in inputs)
    assert reference.beyond_float16({"x": x, "mask": mask}).names(masks=True) == [
        "masked.causal, which reaches -1e+09",
        "the number -1e+09 (mul) in layer masked",
    ]


def test_a_scale_of_small_numbers(inputs: tuple[Tensor, Tensor]) -> None:
    x, mask = inputs
    (risk,) = float16_risks(Network("scale").eval(), (x * 1e-3, mask))
    assert (risk.path, risk.unsafe) == ("masked", ())
    assert risk.sums == ("its forward has the number 1e+06 (mul), and float16 overflows above 65504",)


@pytest.mark.parametrize("how", ["fill", "alpha"])
def test_what_pytorch_refuses(how: str, inputs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model, path = Network(how).eval(), tmp_path / "m.onnx"
    refused = (
        r"Network does not run in float16\. Beyond .*the number -1e\+09 .*in layer masked\. .*finfo\(x\.dtype\)\.min"
    )
    export(model, inputs, path, dtype="fp16", verify=False)
    with pytest.raises(InputError, match=refused):
        verify(path, model, inputs)
    with pytest.raises(InputError, match=refused):
        bisect(path, model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["buffer", "scale"])
def test_a_file_that_fails(how: str, inputs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model, path = Network(how).eval(), tmp_path / "m.onnx"
    named = {"buffer": "masked.big, which reaches -1e+09", "scale": "the number 1e+06 (mul) in layer masked"}[how]
    export(model, inputs, path, dtype="fp16", verify=False)
    report, found = verify(path, model, inputs), bisect(path, model, inputs)
    assert not report
    assert not found
    assert report.beyond_float16 == found.beyond_float16 == [named]
    for text in (str(report), found.verdict):
        assert about_float16([named]) in text


@pytest.mark.slow
@pytest.mark.parametrize("norm", [BatchNormalNorm1d(4), LayerNormalNorm(4)])
def test_an_input(norm: nn.Module, tmp_path: Path) -> None:
    model, path, x = nn.Sequential(norm, nn.Linear(4, 3)).eval(), tmp_path / "m.onnx", torch.randn(6, 4)
    x[2, 1] = 1e6
    named = r"Beyond float16's range of ±65504: input input, which reaches 1e\+06\. Scale inputs"
    with pytest.raises(ParityError, match=named) as raised:
        export(model, x, path, dtype="fp16")
    assert "the frozen model does not compute" not in str(raised.value)
    export(model, x, path, dtype="fp16", verify=False)
    report = verify(path, model, x)
    assert not report
    assert report.beyond_float16 == ["input input, which reaches 1e+06"]
    assert "input input, which reaches 1e+06" in bisect(path, model, x).verdict
    assert verify(path, model, x.clamp(max=100)).beyond_float16 == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_a_mask_that_is_an_input(number: float, inputs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model, (x, mask) = Network("input").eval(), inputs
    added = torch.zeros_like(mask).masked_fill(mask == 0, number)
    report = export(model, (x, added), tmp_path / "m.onnx", dtype="fp16")
    named = [] if number == -torch.inf else [f"input mask, which reaches {number:.4g}"]
    assert report.parity is not None
    assert report.parity.beyond_float16 == named
    assert about_float16(named, fails=False) in str(report)

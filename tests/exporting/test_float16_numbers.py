"""Numbers beyond float16's range: masks become its greatest numbers, others are computed with as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnorm_export import ParityError, export, layers, load
from nnorm_export.exporting.passes.float16_numbers import with_numbers_of_float16
from nnorm_export.float16_range import GREATEST

LEAST = float(torch.finfo(torch.float32).min)
Forward = Callable[["Scores", Tensor, Tensor], Tensor]


class Scores(nn.Module):
    """What ``function`` makes of scores, products of two inputs, and of a mask that is 1 where a key is kept."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)
        self.register_buffer("big", torch.tensor(-1e9))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.function(self, x, mask)


class Attention(nn.Module):
    """A layer with a norm after a softmax, inside of a model."""

    def __init__(self, number: float = -1e9) -> None:
        super().__init__()
        self.query, self.norm, self.number = nn.Linear(8, 8), layers.LayerNormalNorm(8), number

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2) / 8
        weights = (scores + ((1.0 - mask) * self.number)[:, None]).softmax(-1)
        y: Tensor = self.norm(weights @ x)
        return y


class Network(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.head = attention, nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.head(self.attention(x, mask))
        return y


def _inputs(rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    mask = (torch.rand(rows, 8) > 0.4).float()
    mask[:, 0] = 1
    return torch.randn(rows, 8), mask


def _in_branches(model: Scores, x: Tensor, mask: Tensor) -> Tensor:
    def first(x: Tensor, mask: Tensor) -> Tensor:
        return x + (1 - mask) * -1e9

    def second(x: Tensor, mask: Tensor) -> Tensor:
        return x - (1 - mask) * 1e10

    y: Tensor = torch.cond(mask.sum() > 3, first, second, (x, mask))
    return y.softmax(-1)


def _attention(model: Scores, x: Tensor, mask: Tensor) -> Tensor:
    q = x[None, None]
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=((1 - mask) * -1e9)[:, :4].expand(4, 4)[None, None])
    return y[0, 0]


def _mask_and_value(model: Scores, x: Tensor, mask: Tensor) -> Tensor:
    added = (1 - mask) * 1e-5 * -1e5
    return (x + added).softmax(-1) + added


MASKS: dict[str, tuple[Forward, list[float]]] = {
    "product": (lambda _, x, m: (x + (1.0 - m) * -1e9).softmax(-1), [-1e9]),
    "difference": (lambda _, x, m: (x - (1.0 - m) * 1e9).softmax(-1), [1e9]),
    "float32's least": (lambda _, x, m: (x + (1.0 - m) * LEAST).softmax(-1), [LEAST]),
    "tensor": (lambda _, x, m: (x + (1 - m) * torch.tensor(-1e9)).softmax(-1), [-1e9]),
    "condition": (lambda _, x, m: (x + (m == 0).to(x.dtype) * -1e12).softmax(-1), [-1e12]),
    "offset": (lambda _, x, m: (x + (m * 1e5 - 1e5)).softmax(-1), [1e5, 1e5]),
    "where": (lambda _, x, m: torch.where(m > 0, x, -1e9).softmax(-1), [-1e9]),
    "where of a tensor": (lambda _, x, m: torch.where(m > 0, x, torch.tensor(-1e9)).softmax(-1), [-1e9]),
    "shapes": (lambda _, x, m: (x[:, None] + ((1 - m) * -1e9)[:, None].expand(-1, 2, -1)).softmax(-1), [-1e9]),
    "in place": (lambda _, x, m: (x * 1).add_((1 - m) * -1e9).softmax(-1), [-1e9]),
    "scaled sum": (lambda _, x, m: ((x + (1 - m) * -1e9) / 3).softmax(-1), [-1e9]),
    "padding": (lambda _, x, m: (x + F.pad((1 - m[:, 1:]) * -1e9, (1, 0), value=-7e4)).softmax(-1), [-1e9, -7e4]),
    "fill": (lambda s, x, m: s.linear(x).masked_fill(m == 0, -1e9).softmax(-1), [-1e9]),
    "tensor of one number": (lambda _, x, m: (x + torch.full_like(x, -1e9).where(m == 0, 0.0)).softmax(-1), [-1e9]),
    "alpha": (lambda s, x, m: torch.add(s.linear(x), 1 - m, alpha=-1e9).softmax(-1), [-1e9]),
    "branches": (_in_branches, [-1e9, 1e10]),
    "attention": (_attention, [-1e9]),
}

VALUES: dict[str, tuple[Forward, list[float]]] = {
    "scale": (lambda s, x, m: s.linear(x * 1e-3 * 1e6), [1e6]),
    "scale in place": (lambda s, x, m: s.linear((x * 1e-3).mul_(1e6)), [1e6]),
    "scale as a tensor": (lambda s, x, m: s.linear(x * 1e-3 * torch.tensor(1e6)), [1e6]),
    "quotient": (lambda s, x, m: s.linear(x * 1e4 / 1e5), [1e5]),
    "scores": (lambda s, x, m: (s.linear(x) * 1e-3 * 1e5 + m).softmax(-1), [1e5]),
    "temperature": (lambda s, x, m: (x * 1e-4 * 1e5).softmax(-1), [1e5]),
    "mask and value": (_mask_and_value, [-1e5]),
    "two of them": (lambda s, x, m: s.linear(x * 1e-3 * 1e6 / 1e5), [1e6, 1e5]),
    "logarithm": (lambda s, x, m: (x + (1 - m) * 1e-4 * -1e5).log_softmax(-1), [-1e5]),
}

UNTOUCHED: dict[str, Forward] = {
    "integers": lambda _, x, m: x + (torch.arange(8) * 100_000 % 7).to(x.dtype),
    "infinity": lambda _, x, m: x.masked_fill(m == 0, -torch.inf).softmax(-1),
    "infinity of where": lambda _, x, m: torch.where(m > 0, x, -torch.inf).softmax(-1),
    "comparison": lambda _, x, m: x * (x < 1e6),
    "rounded to the greatest": lambda _, x, m: x + m * 65510.0 * 0.0,
    "float32 inside": lambda _, x, m: (x.float() * 1e6).to(x.dtype),
    "least of its dtype": lambda _, x, m: x.masked_fill(m == 0, torch.finfo(x.dtype).min).softmax(-1),
}


def _rewritten(function: Forward, dtype: torch.dtype = torch.float16) -> tuple[Any, list[Any], Scores, Tensor]:
    """The program, the numbers found, the model, and what the program gives on the inputs."""
    torch.manual_seed(0)
    model = Scores(function).to(dtype).eval()
    inputs = tuple(each.to(dtype) for each in _inputs())
    program, found = with_numbers_of_float16(torch.export.export(model, inputs))
    with torch.no_grad():
        return program, found, model, program.module()(*inputs)


def _computed(model: Scores, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.to(dtype)(*(each.half().to(dtype) for each in _inputs()))
    return result


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    function, numbers = MASKS[name]
    program, found, model, result = _rewritten(function)
    assert [(each.value, each.is_mask) for each in found] == [(number, True) for number in numbers]
    text = str(program.graph_module.print_readable(print_output=False))
    assert all(f"{each.clamped:g}" in text and abs(each.clamped) == GREATEST for each in found)
    # float32, because PyTorch refuses some in float16, and adds infinities of both signs in others.
    torch.testing.assert_close(result.float(), _computed(model, torch.float32), rtol=0, atol=2e-3)


def test_the_layer_of_a_branch() -> None:
    model = Network(Scores(_in_branches)).half().eval()
    inputs = tuple(each.half() for each in _inputs())
    _, found = with_numbers_of_float16(torch.export.export(model, inputs))
    assert [each.path for each in found] == ["attention", "attention"]


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    function, numbers = VALUES[name]
    _, found, model, result = _rewritten(function)
    assert [(each.value, each.is_mask) for each in found] == [(number, False) for number in numbers]
    assert torch.equal(result, _computed(model, torch.float16))
    assert result.isfinite().all()


@pytest.mark.parametrize("name", UNTOUCHED)
def test_numbers_that_stay(name: str) -> None:
    _, found, model, result = _rewritten(UNTOUCHED[name])
    assert found == []
    assert torch.equal(result, _computed(model, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_float32s_range(dtype: torch.dtype) -> None:
    assert _rewritten(MASKS["product"][0], dtype)[1] == []


@pytest.mark.slow
@pytest.mark.core
def test_a_mask_inside_a_layer(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x, mask = torch.randn(3, 6, 8), (torch.rand(3, 6) > 0.4).float()
    mask[:, 0] = 1
    model, path = Network(Attention()).eval(), tmp_path / "m.onnx"
    report = export(model, (x, mask), path, dtype="fp16")
    (line,) = report.beyond_float16
    assert line == "the number -1e+09 (mul) in layer attention masks a softmax: the file has -65504"
    assert line in str(report)
    empty = mask.clone()
    empty[1] = 0  # PyTorch gives NaN in float16; any weights will do
    (found,) = load(path)(x.half().numpy(), empty.half().numpy())
    assert torch.from_numpy(found).isfinite().all()
    with torch.no_grad():
        expected = model(x, empty)[[0, 2]]
    torch.testing.assert_close(torch.from_numpy(found).float()[[0, 2]], expected, rtol=0, atol=0.05)


@pytest.mark.slow
def test_a_scale_that_overflows(tmp_path: Path) -> None:
    class Scaled(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.norm(self.query(x * 1e6) * mask[..., None])
            return y

    model, x, mask = Network(Scaled()).eval(), torch.randn(3, 6, 8), torch.ones(3, 6)
    named = (
        r"Beyond float16's range of ±65504: the number 1e\+06 \(mul\) in layer attention\. .*in float32, x\.float\(\)"
    )
    with pytest.raises(ParityError, match=named):
        export(model, (x, mask), tmp_path / "m.onnx", dtype="fp16")
    report = export(model, (x, mask), tmp_path / "m.onnx", dtype="fp16", verify=False)
    assert "the file computes there in float32" in report.beyond_float16[0]

"""convert_normal_norm(rms_norms=True): a LayerNormalNorm without a bias in the place of each RMSNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import export, layers
from nnorm_export.layers import convert_normal_norm

SIZE = 6


class LlamaRMSNorm(nn.Module):
    """As in transformers: in float32 whatever the input, ε under a name of its own."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class GemmaRMSNorm(nn.Module):
    """The weight is what is added to 1."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5LayerNorm(LlamaRMSNorm):
    """A name that says something else."""


class GatedRMSNorm(LlamaRMSNorm):
    """As in Mamba 2."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * nn.functional.silu(gate))


# The layer, ε, what is added to its weight.
RMS_NORMS: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "torch": (lambda: nn.RMSNorm(SIZE, eps=1e-4), 1e-4, 0.0),
    "torch, its own ε": (lambda: nn.RMSNorm(SIZE), torch.finfo(torch.float32).eps, 0.0),
    "torch, two axes": (lambda: nn.RMSNorm((2, 3), eps=1e-4), 1e-4, 0.0),
    "torch, half": (lambda: nn.RMSNorm(SIZE, eps=1e-4, dtype=torch.float16), 1e-4, 0.0),
    "torch, double": (lambda: nn.RMSNorm(SIZE, eps=1e-4, dtype=torch.float64), 1e-4, 0.0),
    "LLaMA": (LlamaRMSNorm, 1e-6, 0.0),
    "T5": (T5LayerNorm, 1e-6, 0.0),
    "Gemma": (GemmaRMSNorm, 1e-5, 1.0),
}


@pytest.mark.parametrize("name", RMS_NORMS)
def test_an_rms_norm_becomes_a_layer_normal_norm_without_a_bias(name: str) -> None:
    build, eps, offset = RMS_NORMS[name]
    old = build()
    nn.init.uniform_(old.weight, 0.5, 1.5)
    old.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"RMSNorm subtracts no mean, .* until it is trained, also where λ = 1"):
        model, report = convert_normal_norm(nn.Sequential(old).eval(), rms_norms=True, return_report=True)
    new = model[0]
    assert type(new) is layers.LayerNormalNorm
    assert [(entry.layer, entry.norm) for entry in report.converted] == [(type(old).__name__, "LayerNormalNorm")]
    assert (new.normalized_shape, new.bias, new.training) == (tuple(old.weight.shape), None, False)
    assert new.eps == pytest.approx(eps)
    assert (new.weight is old.weight) == (offset == 0)
    assert torch.equal(new.weight, old.weight + offset)
    assert (new.weight.dtype, new.weight.requires_grad) == (old.weight.dtype, False)
    # Unlike the RMSNorm, it subtracts the mean.
    x = torch.randn(3, *new.normalized_shape, dtype=old.weight.dtype)
    torch.testing.assert_close(new(x), new(x + 8), rtol=2e-2, atol=2e-2)


def test_without_a_weight() -> None:
    with pytest.warns(UserWarning, match="converted 1 of 1"):
        new = convert_normal_norm(nn.RMSNorm(SIZE, eps=1e-5, elementwise_affine=False), rms_norms=True)
    assert (new.weight, new.bias, new.normalized_shape) == (None, None, (SIZE,))


@pytest.mark.parametrize("build", [nn.RMSNorm, LlamaRMSNorm, GemmaRMSNorm])
def test_it_stays_unless_it_is_asked_for(build: Callable[[int], nn.Module]) -> None:
    model = nn.Sequential(build(SIZE), nn.LayerNorm(SIZE))
    before = model[0]
    with pytest.warns(UserWarning, match=r"kept 1 \w+ \(0\): it computes RMSNorm, .*rms_norms=True puts"):
        convert_normal_norm(model)
    assert model[0] is before
    assert type(model[1]) is layers.LayerNormalNorm


def test_what_computes_something_else_stays() -> None:
    class ScaledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 1.01 * super().forward(hidden_states)

    model = nn.Sequential(ScaledRMSNorm(), GatedRMSNorm())
    with pytest.warns(
        UserWarning, match=r"kept 1 ScaledRMSNorm \(0\): it computes neither.*1 GatedRMSNorm \(1\).*gate too"
    ):
        convert_normal_norm(model, rms_norms=True)


def test_second_derivatives_without_a_bias() -> None:
    layer = layers.LayerNormalNorm(SIZE, noise_train=0.0, bias=False, dtype=torch.float64)
    x = torch.randn(3, SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("training", [False, True])
def test_a_network_is_trained_and_exported(training: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, SIZE), LlamaRMSNorm(), nn.Linear(SIZE, SIZE), GemmaRMSNorm())
    with pytest.warns(UserWarning, match="converted 2 of 2"):
        model = convert_normal_norm(model, rms_norms=True)
    x = torch.randn(4, 5)
    if training:
        before = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
        assert not torch.equal(before[3].weight, model[3].weight)
    report = export(model.eval(), (x,), tmp_path / "m.onnx")
    assert report.parity
    assert [layer["op_type"] for layer in report.layers] == ["LayerNormalNorm"] * 2

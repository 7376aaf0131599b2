"""convert_normal_norm: layers of other libraries that compute what a norm of torch.nn does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nnorm_export import layers
from nnorm_export.layers import convert_normal_norm


class NormAct(nn.BatchNorm2d):
    """A batch norm with dropout and an activation behind it, as timm has them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)
        self.drop = nn.Dropout(0.5)
        self.act = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NormOfChannels(nn.Module):
    """A layer norm over the channels with names of its own, and parameters that broadcast."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(channels, 1, 1))
        self.g = nn.Parameter(torch.ones(channels, 1, 1))
        self.tiny = 1e-4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.tiny) * self.g + self.b


class FrozenNorm(nn.Module):
    """A batch norm whose statistics do not move, as detection networks have them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.5), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


class GroupNorm1(nn.GroupNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)


class FrozenNormWithItsEpsilonInTheCode(FrozenNorm):
    """As in transformers' DETR."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        del self.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + 1e-6).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


def subclass_without_changes(channels: int) -> nn.Module:
    return type("Mine", (nn.BatchNorm2d,), {})(channels)


LOOKALIKES = [
    (NormAct, layers.BatchNormalNorm2d, True),
    (FrozenNorm, layers.BatchNormalNorm2d, True),
    (FrozenNormWithItsEpsilonInTheCode, layers.BatchNormalNorm2d, True),
    (subclass_without_changes, layers.BatchNormalNorm2d, True),
    (LayerNorm2d, layers.LayerNormalNorm, False),
    (NormOfChannels, layers.LayerNormalNorm, False),
    (GroupNorm1, layers.GroupNormalNorm, False),
]


@pytest.mark.parametrize(("build", "expected", "is_batch"), LOOKALIKES)
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_that_computes_a_norm_of_torch_is_converted(
    build: Callable[[int], nn.Module], expected: type[nn.Module], is_batch: bool, training: bool
) -> None:
    """Whatever its class and its names; an activation behind it stays. With λ = 1 a batch norm computes what it did."""
    old = build(4)
    for parameter in old.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    x = torch.randn(2, 4, 5, 3)
    before = copy.deepcopy(old).eval()(x)
    old.train(training)
    model, report = convert_normal_norm(nn.Sequential(old), variant="paper", noise_train=0.0, return_report=True)
    assert [(entry.path, entry.norm) for entry in report.converted] == [("0", expected.__name__)]
    (norm,) = (layer for layer in model.modules() if isinstance(layer, layers.NormalNorm))
    assert type(norm) is expected
    if isinstance(old, FrozenNormWithItsEpsilonInTheCode):
        assert norm.eps == 1e-6
    assert norm.training is model[0].training is training
    after = model.eval()(x)
    assert after.shape == before.shape
    if is_batch:
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    else:  # λ comes from x: with the exponents of λ = 1 it would be what it was
        assert 1e-6 < float((after - before).detach().abs().max()) < 3


def test_the_submodules_behind_a_norm_stay_and_frozen_affines_do_not_train() -> None:
    act = NormAct(4)
    model = convert_normal_norm(nn.Sequential(act, FrozenNorm(4)))
    assert [name for name, _ in model[0].named_children()] == ["norm", "drop", "act"]
    assert model[0].act is act.act
    assert model[0].norm.weight is act.weight
    assert not model[1].weight.requires_grad

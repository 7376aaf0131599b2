"""convert_normal_norm and convert_norm: settings that are kept, and layers whose behavior would change."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import layers
from nnorm_export.layers import convert_norm, convert_normal_norm
from nnorm_export.layers.recognition import recognize


class Holder(nn.Module):
    """Two norms, which something else than a submodule holds too."""

    def __init__(self, hold: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.held = hold(self.second)


@pytest.mark.parametrize(
    ("hold", "where"),
    [
        (lambda norm: [nn.ReLU(), norm], r"held\[1\], in a plain list"),
        (lambda norm: {"a": (norm,)}, r"held\['a'\]\[0\], in a plain tuple"),
        (lambda norm: functools.partial(nn.functional.relu, norm), "held, in a plain partial"),
        (lambda norm: lambda x: norm(x) + 0, "held, in a function"),
        (lambda norm: norm.forward, "held, in a bound method"),
        (lambda norm: [nn.Sequential(norm)], r"held\[0\]\.0, in a plain list"),
    ],
)
def test_a_norm_that_is_held_elsewhere_too_is_kept(hold: Callable[[nn.Module], Any], where: str) -> None:
    """What holds it would go on calling the old layer."""
    model = Holder(hold)
    second = model.second
    with pytest.warns(UserWarning, match=rf"kept 1 BatchNorm1d \(second\): {where}"):
        _, report = convert_normal_norm(model, return_report=True)
    assert [entry.path for entry in report.converted] == ["first"]
    assert model.second is second
    with pytest.raises(ValueError, match=where):
        convert_norm(Holder(hold), layers.BMLV)


def test_a_norm_that_keeps_its_own_forward_is_replaced() -> None:
    """As a hook of Hugging Face's accelerate leaves it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    vars(model[1])["_old_forward"] = model[1].forward
    assert isinstance(layers.convert_normal_norm(model)[1], layers.LayerNormalNorm)


def test_a_list_of_blocks_is_no_obstacle() -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4)))
    model.order = [model[0]]
    _, report = convert_normal_norm(model, return_report=True)
    assert not report.kept
    assert isinstance(model.order[0][0], layers.BatchNormalNorm1d)


class AlwaysInEvaluation(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


def test_a_norm_whose_statistics_were_frozen_has_a_note() -> None:
    model = nn.Sequential(AlwaysInEvaluation(4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="1 of them: it used its running statistics in training too"):
        _, report = convert_normal_norm(model, return_report=True)
    assert [bool(entry.note) for entry in report.converted] == [True, False]


class DecayingNorm(nn.Module):
    """running = decay·running + (1 − decay)·batch."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.momentum, self.eps = decay, 1e-5
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean, variance = x.mean(0), x.var(0, correction=0)
            with torch.no_grad():
                self.running_mean.mul_(self.momentum).add_((1 - self.momentum) * mean)
                self.running_var.mul_(self.momentum).add_((1 - self.momentum) * x.var(0))
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


@pytest.mark.parametrize(
    ("build", "momentum"),
    [
        (lambda: DecayingNorm(0.9), 0.1),
        (lambda: DecayingNorm(0.5), 0.5),
        (lambda: DecayingNorm(0.999), 0.001),
        (lambda: nn.BatchNorm1d(4, momentum=0.03), 0.03),
        (lambda: nn.BatchNorm1d(4, momentum=None), None),
        (lambda: nn.BatchNorm1d(4, momentum=1.0), 1.0),
        (lambda: nn.BatchNorm1d(4, momentum=0.0), 0.0),
    ],
)
def test_running_statistics_move_as_those_of_the_layer(build: Callable[[], nn.Module], momentum: float | None) -> None:
    old = build()
    new = convert_normal_norm(nn.Sequential(copy.deepcopy(old)))[0]
    assert isinstance(new, layers.BatchNormalNorm1d)
    assert new.momentum == (momentum if momentum is None else pytest.approx(momentum, rel=1e-6))
    for x in (5 + torch.randn(8, 4), torch.randn(8, 4)):
        old(x), new(x)
    torch.testing.assert_close(new.running_mean, old.running_mean)
    torch.testing.assert_close(new.running_var, old.running_var)


class MedianNorm(DecayingNorm):
    """Its running mean is not an average of the means of batches."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.copy_(x.median(0).values)
            return (x - x.mean(0)) / torch.sqrt(x.var(0, correction=0) + self.eps) * self.weight + self.bias
        return super().forward(x)


def test_running_statistics_that_move_in_another_way_have_a_note() -> None:
    with pytest.warns(UserWarning, match="1 of them: its running statistics are not updated with a constant momentum"):
        convert_normal_norm(nn.Sequential(MedianNorm(0.1)))


def test_skip_and_only_take_every_path_of_a_shared_norm() -> None:
    def build() -> nn.Module:
        shared = nn.Sequential(nn.BatchNorm1d(4))
        return nn.ModuleDict({"a": shared, "b": shared, "c": nn.BatchNorm1d(4)})

    for options, expected in (
        ({"skip": ["b.*"]}, ["c"]),
        ({"skip": ["b"]}, ["c"]),
        ({"only": ["b"]}, ["a.0"]),
        ({"only": ["a"], "skip": ["b"]}, []),
    ):
        _, report = convert_normal_norm(build(), return_report=True, **options)
        assert [entry.path for entry in report.converted] == expected


class InSingle(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.type(torch.float32)).type(x.dtype)


def test_a_norm_that_computes_in_float32_only() -> None:
    model = nn.Sequential(InSingle(4), nn.ReLU(), InSingle(4, eps=1e-3))
    _, report = convert_normal_norm(model, return_report=True)
    assert not report.kept
    assert [model[0].eps, model[2].eps] == [1e-5, 1e-3]
    assert recognize(type("Scaled", (InSingle,), {"forward": lambda s, x: 1.001 * InSingle.forward(s, x)})(4)) is None


class Masked(nn.BatchNorm1d):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask)


def test_a_norm_that_takes_a_second_argument_is_kept() -> None:
    model = nn.Sequential(Masked(4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=r"kept 1 Masked \(0\): its forward takes mask too"):
        convert_normal_norm(model)
    assert type(model[0]) is Masked


def test_a_bias_trains_as_the_weight_beside_it_does() -> None:
    frozen = nn.LayerNorm(4, bias=False).requires_grad_(False)
    assert not convert_normal_norm(copy.deepcopy(frozen)).bias.requires_grad
    assert convert_normal_norm(nn.LayerNorm(4, bias=False)).bias.requires_grad
    batch = nn.BatchNorm1d(4).requires_grad_(False)
    batch.bias = None
    assert not convert_norm(batch, layers.BMLV).bias.requires_grad


def test_a_swap_keeps_epsilon_and_momentum() -> None:
    def swapped(to: Any, **options: Any) -> Any:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-2, momentum=0.01), nn.ReLU())
        return next(layer for layer in convert_norm(model, to, **options).modules() if isinstance(layer, to))

    for to in (layers.BMLV, layers.LMBV, layers.SwitchableNorm, layers.DecorrelatedBatchNorm2d):
        assert (swapped(to).eps, swapped(to).momentum) == (1e-2, 0.01)
    assert swapped(layers.RegNorm).eps == 1e-2
    assert swapped(layers.EvoNormS0, num_groups=2).eps == 1e-2
    assert swapped(layers.PreLayerNorm).eps == 1e-2
    normal = swapped(layers.DecorrelatedBatchNormalNorm2d)
    assert (normal.whiten.eps, normal.gaussianize.eps, normal.gaussianize.momentum) == (1e-2, 1e-2, 0.01)
    assert swapped(layers.BMLV, eps=1e-4, momentum=None).momentum is None
    # Other quantities: ε of a mean square that may be 0, and of the variance of an activation.
    assert swapped(layers.FilterResponseNorm).eps == 1e-6
    assert swapped(layers.ProxyNorm).eps == 0.03

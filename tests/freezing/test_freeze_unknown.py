"""Layers that look like known ones and compute something else: exported as they are, or refused by name and path."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fake_layers
import pytest
import torch
from test_freeze import randomized
from torch import Tensor, nn

from nnorm_export import FreezeError, freeze, layers


class LayerNorm(nn.LayerNorm):
    """Over channels, as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class InstanceNorm2d(nn.InstanceNorm2d):
    """With running statistics, if the user says so."""


@pytest.mark.parametrize(
    "layer",
    [LayerNorm(6), GroupNorm(2, 6), InstanceNorm2d(6, affine=True, track_running_stats=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_class_that_derives_from_torchs_norm_is_exported_as_it_is(layer: nn.Module) -> None:
    model, x = nn.Sequential(randomized(layer)).train(), torch.randn(2, 6, 3, 5)
    frozen = freeze(model)
    assert type(frozen[0]) is type(layer)
    torch.testing.assert_close(frozen(x), model.eval()(x), rtol=0, atol=0)


class Standardized(layers.BatchNormalNorm1d):
    def _standardize(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return x


class Normalized(layers.LayerNormalNorm):
    def _normalize(self, x: Tensor) -> Tensor:
        return super()._normalize(x) + x


class Shifted(layers.GroupNormalNorm):
    @property
    def delta(self) -> float:
        return 0.1


class Swish(layers.EvoNormS0):
    def _normalize(self, x: Tensor) -> Tensor:
        return 2 * super()._normalize(x)


class Residual:
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x  # type: ignore[misc]


class Mixed(Residual, layers.LayerNormalNorm): ...


class Authors(fake_layers.LayerNormalNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x


def namesake(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name, with a forward of its own."""
    return type(base.__name__, (Residual, base), {})


@pytest.mark.parametrize(
    ("layer", "method"),
    [
        (Standardized(6), "_standardize of BatchNormalNorm1d"),
        (Normalized(6), "_normalize of LayerNormalNorm"),
        (Shifted(6, 2), "delta of GroupNormalNorm"),
        (Swish(6, 2), "_normalize of EvoNormS0"),
        (Mixed(6), "forward of LayerNormalNorm"),
        (Authors(6), "forward of LayerNormalNorm"),
        (namesake(layers.LayerNormalNorm)(6), "forward of LayerNormalNorm"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_subclass_with_a_method_of_its_own_is_refused_by_path(layer: nn.Module, method: str) -> None:
    name = type(layer).__name__
    with pytest.raises(FreezeError, match=rf"layer body\.0 \({name}\): its class overrides {method}.*passthrough"):
        freeze(nn.ModuleDict({"body": nn.Sequential(layer)}))
    assert type(freeze(nn.Sequential(layer), passthrough=[name])[0]) is type(layer)


class Described(layers.BatchNormalNorm1d):
    """A constructor, a text and a helper of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-3)

    def extra_repr(self) -> str:
        return "described"

    def helper(self) -> int:
        return 1


def test_a_subclass_that_computes_the_same_is_frozen() -> None:
    layer = randomized(Described(6)).eval()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    x = torch.randn(4, 6)
    torch.testing.assert_close(freeze(layer)(x), layer(x), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("name", ["forward", "_normalize"])
@pytest.mark.parametrize("bind", [types.MethodType, functools.partial])
def test_a_method_that_was_assigned_to_the_instance_is_refused(name: str, bind: Callable[..., Any]) -> None:
    layer = layers.LayerNormalNorm(6)
    setattr(layer, name, bind(lambda _, x: 3 * x, layer))
    with pytest.raises(FreezeError, match=rf"layer 0 \(LayerNormalNorm\): {name} was assigned to this layer"):
        freeze(nn.Sequential(layer))


class Copied(fake_layers.BatchNorm1d):
    """As in a user's own copy of the authors' file: known by its name and attributes alone."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return (x - self.running_mean) / (self.running_var + self.eps).sqrt() * self.weight + self.bias


def copied(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """The authors' BatchNorm1d, of any base class, with ``forward``."""
    layer = randomized(fake_layers.BatchNorm1d(6))
    layer.__class__ = type("BatchNorm1d", (nn.Module,), {"forward": forward})
    return layer


def test_a_copy_of_the_authors_code_is_tried() -> None:
    assert type(freeze(copied(Copied.forward))) is nn.BatchNorm1d

    def single(self: Any, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return Copied.forward(self, x)

    assert type(freeze(copied(single))) is nn.BatchNorm1d
    changes: list[Callable[[Any, Tensor], Any]] = [
        lambda self, x: Copied.forward(self, x) + 0.01,
        lambda self, x: single(self, x) + 0.01,
        lambda self, x: (x - self.running_mean) / (self.running_var.sqrt() + self.eps**0.5) * self.weight + self.bias,
        lambda self, x: (Copied.forward(self, x), x),
        lambda self, x: Copied.forward(self, x)[:1],
    ]
    words = ["does not compute", "does not compute", "does not compute", "returns a tuple", "of shape .* frozen"]
    for change, reason in zip(changes, words, strict=True):
        with pytest.raises(FreezeError, match=rf"layer 0 \(BatchNorm1d\): .*{reason}"):
            freeze(nn.Sequential(copied(change)))


@dataclass
class Stage:
    norm: nn.Module


def calling(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return norm(x)

    return call


NORM = fake_layers.BatchNormalNorm2d(4)


@pytest.mark.parametrize(
    ("held", "where"),
    [
        ([[NORM]], r"\[0\]\[0\] .*plain list only"),
        ({"a": (NORM,)}, r"\['a'\]\[0\] .*plain tuple only"),
        (Stage(NORM), r"\.norm .*plain dataclass Stage only"),
        ([nn.Sequential(nn.ReLU(), NORM)], r"\[0\]\.1 .*plain list only"),
        (types.SimpleNamespace(norm=NORM), r"\.norm .*plain SimpleNamespace only"),
        (calling(NORM), r" .*held by a function"),
        (lambda x, norm=NORM: norm(x), r" .*held by a function"),
        (functools.partial(torch.utils.checkpoint.checkpoint, NORM), r" .*plain partial only"),
        (NORM.forward, r" .*held by a bound method"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_that_is_no_submodule_is_refused_by_its_attribute(held: Any, where: str) -> None:
    model = nn.Sequential(nn.Module())
    model[0].blocks = held
    with pytest.raises(FreezeError, match=rf"layer 0\.blocks{where}"):
        freeze(model)
    assert freeze(model, passthrough=["BatchNormalNorm2d"]) is not None


def test_what_leads_to_registered_layers_is_allowed() -> None:
    model = nn.Sequential(fake_layers.LayerNormalNorm(4))
    model.order = [[model[0]], {"first": model[0]}, model]
    model.call = model.forward
    assert type(freeze(model)[0]) is type(freeze(model).order[0][0])


def test_a_layer_that_is_too_large_to_be_compared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = randomized(fake_layers.LayerNormalNorm(8))
    monkeypatch.setattr("nnorm_export.freezing.verify_layer._MOST_ENTRIES", 15)
    with pytest.warns(UserWarning, match=r"layer 0 \(LayerNormalNorm\) has 16 entries, too many to be compared"):
        freeze(nn.Sequential(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freeze(nn.Sequential(layers.LayerNormalNorm(8)))

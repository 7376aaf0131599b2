"""freeze() and the code around a norm: attributes that it reads, weights that it computes, x far from 0."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from nnorm_export import FreezeError, export, export_torchscript, freeze, layers
from nnorm_export.freezing.attributes import about_gradients, explain
from nnorm_export.models.modules import eval_copy
from nnorm_export.operators import FrozenBatchNormalNorm


def far_from_zero(ratio: float, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A model whose first layer is a norm of raw columns with |μ|/σ = ``ratio``, and its input."""
    generator = torch.Generator().manual_seed(0)
    x = (ratio + torch.randn(256, 4, generator=generator)).to(dtype)
    model = nn.Sequential(layers.BatchNormalNorm1d(4, momentum=None), nn.Linear(4, 3)).to(dtype)
    model.train()(x)
    return model.eval(), x


def exact(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).double()(x.double())


@pytest.mark.parametrize("ratio", [-300, 3e3, 1e6])
def test_columns_far_from_zero_keep_their_digits(ratio: float) -> None:
    model, x = far_from_zero(ratio)
    frozen = freeze(model)
    torch.testing.assert_close(frozen(x).double(), exact(model, x), rtol=0, atol=1e-6)
    narrowed = freeze(copy.deepcopy(model).double()).float()  # float64 statistics, rounded to float32 later
    torch.testing.assert_close(narrowed(x).double(), exact(model, x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_columns_far_from_zero_in_half_precision(dtype: torch.dtype) -> None:
    model, x = far_from_zero(300)
    x = x.to(dtype)
    y = freeze(model)[0].to(dtype)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact(model[0], x), rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_a_column_far_from_zero_changes_no_other() -> None:
    model, x = far_from_zero(100)
    before = freeze(model)[0](x)
    model[0].running_mean[0] = 1e4
    after = freeze(model)[0]
    assert torch.equal(after.offset != 0, torch.tensor([True, False, False, False]))
    assert torch.equal(after(x)[:, 1:], before[:, 1:])


def test_columns_near_zero_have_no_offset() -> None:
    model, _ = far_from_zero(100)
    assert freeze(model)[0].offset is None
    assert "offset" not in freeze(model)[0].state_dict()
    constant = layers.BatchNormalNorm1d(4, standardize=False)
    constant.running_mean.fill_(1e6)
    assert freeze(constant).offset is None


def test_a_mean_that_float32_cannot_hold() -> None:
    layer = layers.BatchNormalNorm1d(2, dtype=torch.float64).eval()
    layer.running_mean.fill_(1e300)
    assert bool(torch.isfinite(freeze(layer)(layer.running_mean.expand(3, 2))).all())


@pytest.mark.slow
def test_columns_far_from_zero_are_one_subtraction_in_a_file(tmp_path: Path) -> None:
    model, x = far_from_zero(3000)
    assert export(nn.Sequential(model[0], nn.ReLU(), model[1]), x, tmp_path / "m.onnx").parity
    nodes = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert nodes == ["Sub", "BatchNormalNormRelu", "Gemm"]
    for method in ("trace", "script"):
        assert export_torchscript(model, x, tmp_path / "m.pt", method=method).parity


class Reading(nn.Module):
    """Its forward reads an attribute of its norm."""

    def __init__(self, norm: nn.Module, name: str) -> None:
        super().__init__()
        self.norm, self.name, self.fc = norm, name, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert getattr(self.norm, self.name) is not None
        return self.fc(self.norm(x).to(self.norm.weight.dtype))


@pytest.mark.parametrize(
    ("norm", "name", "value"),
    [
        (layers.BatchNormalNorm1d(4), "num_features", 4),
        (layers.BatchNormalNorm1d(4, eps=1e-3), "eps", 1e-3),
        (layers.LayerNormalNorm(4), "normalized_shape", (4,)),
        (layers.GroupNormalNorm(4, 2), "num_channels", 4),
        (layers.InstanceNormalNorm1d(4), "num_features", 4),
        (layers.FilterResponseNorm(4), "num_features", 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_constants_of_a_layer_stay(norm: nn.Module, name: str, value: Any) -> None:
    assert getattr(freeze(nn.Sequential(norm))[0], name) == value


def raised_by(model: nn.Module, x: Tensor) -> Exception:
    with pytest.raises((AttributeError, RuntimeError)) as raised:
        model(x)
    return raised.value


def test_what_a_frozen_layer_no_longer_has_is_named() -> None:
    model, x = freeze(Reading(layers.BatchNormalNorm1d(4), "running_mean")), torch.randn(3, 4)
    assert explain(model, raised_by(model, x)).startswith(
        "layer norm (BatchNormalNorm1d) is frozen and has no attribute 'running_mean', which the model's code reads"
    )
    model = freeze(Reading(layers.LayerNormalNorm(4), "eps").bfloat16())
    assert "If its code reads the dtype of a normalization's parameters" in explain(
        model, raised_by(model, x.bfloat16())
    )


def test_errors_that_freezing_does_not_cause_are_not_explained() -> None:
    model = freeze(nn.Sequential(layers.LayerNormalNorm(4), nn.Linear(4, 3)))
    assert not explain(model, raised_by(model, torch.randn(3, 4, dtype=torch.float64)))
    assert not explain(model, AttributeError("of something else"))


class Masked(nn.Module):
    """A parametrization with a tensor of its own, which ``to(torch.float64)`` does not convert."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = torch.tensor([[0.5, 2.0, 0.0, 1.0]])

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ (torch.eye(4) * self.direction)


def test_a_parametrization_with_a_tensor_of_its_own_is_computed_in_its_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), layers.LayerNormalNorm(4))
    parametrize.register_parametrization(model[0], "weight", Masked())
    frozen, x = freeze(model), torch.randn(3, 4)
    assert not parametrize.is_parametrized(frozen[0])
    torch.testing.assert_close(frozen(x), model.eval()(x), rtol=0, atol=2e-6)


def test_a_pruned_layer_is_told_to_be_made_permanent() -> None:
    model = nn.Sequential(nn.Linear(4, 4), layers.BatchNormalNorm1d(4))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model(torch.randn(3, 4))
    with pytest.raises(
        FreezeError, match=r"layer 0 \(Linear\).*call torch\.nn\.utils\.prune\.remove\(layer, 'weight'\)"
    ):
        freeze(model)
    prune.remove(model[0], "weight")
    assert type(freeze(model)[1]) is FrozenBatchNormalNorm


class Stuck(nn.Module):
    """A model whose train() leaves one layer in train mode."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), layer)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.inner[1].train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    "layer", [nn.Dropout(), nn.BatchNorm1d(6), nn.AlphaDropout(), nn.InstanceNorm1d(6, track_running_stats=True)]
)
def test_a_layer_that_stays_in_train_mode_is_named(layer: nn.Module) -> None:
    for copied in (freeze, eval_copy):
        with pytest.raises(FreezeError, match=rf"layer inner\.1 \({type(layer).__name__}\) stays in train mode"):
            copied(Stuck(layer))
    for harmless in (nn.ReLU(), nn.Dropout(0), nn.InstanceNorm1d(6)):
        freeze(Stuck(harmless))
    with pytest.raises(FreezeError, match=r"inner\.1 \(BatchNormalNorm1d\) stays in train mode"):
        eval_copy(Stuck(layers.BatchNormalNorm1d(6)))


def by_autograd(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.requires_grad_()
        return torch.autograd.grad(x.square().sum(), x)[0]


def by_backward(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        x.square().sum().backward()
    return x.grad


def by_func(self: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: y.square().sum())(x)


def within(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return torch.func.jacrev(torch.sin)(y)

    return inner(x)


@pytest.mark.parametrize(
    ("forward", "named"),
    [(by_autograd, "grad"), (by_backward, "backward, grad"), (by_func, "grad"), (within, "jacrev")],
)
def test_gradients_in_forward_are_named(forward: Any, named: str) -> None:
    layer = type("Saliency", (nn.Module,), {"forward": forward})()
    said = about_gradients(nn.Sequential(nn.ReLU(), layer))
    assert said.startswith(f"the forward of layer 1 (Saliency) computes gradients ({named})")
    assert about_gradients(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))) == ""

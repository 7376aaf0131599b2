"""The state of the layers: what reset_parameters() sets, and what later calls may change."""

from __future__ import annotations

from typing import Any

import family
import layer_zoo
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nnorm_export import layers
from nnorm_export.layers import estimate_statistics

FAMILY = [name for name in family.CASES if name not in ("BatchNorm2d, cumulative", "WeightStandardization")]
LAYERS = [*layer_zoo.EXAMPLES, *FAMILY]


def build(name: str, **options: Any) -> nn.Module:
    if name in layer_zoo.EXAMPLES:
        return layer_zoo.EXAMPLES[name][0](**options)
    return family.CASES[name].make(**options)


def make(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    return layer_zoo.make(name, **options) if name in layer_zoo.EXAMPLES else family.make(name, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_reset_parameters_gives_the_state_of_a_new_layer(name: str) -> None:
    layer = build(name, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.fill_(7)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    fresh, reset = build(name).state_dict(), layer.state_dict()
    assert reset.keys() == fresh.keys()
    for key, value in fresh.items():
        if not key.startswith("linear."):  # random, as torch.nn.Linear sets it
            assert torch.equal(reset[key], value), key


def test_reset_parameters_of_a_composite_resets_its_layers() -> None:
    layer = layers.DecorrelatedBatchNormalNorm2d(4, 2)
    fresh = {key: value.clone() for key, value in layer.state_dict().items()}
    layer(torch.randn(5, 4, 3, 3))
    layer.reset_parameters()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, fresh[key]), key


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_between_evaluation_and_backward(name: str) -> None:
    layer, x = make(name)
    expected, _ = make(name)
    expected.load_state_dict(layer.state_dict())
    expected.eval()(x).square().sum().backward()
    loss = layer.eval()(x).square().sum()
    layer.train()(x + 1)
    loss.backward()
    for (key, parameter), wanted in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad), key


def test_the_regularizer_goes_with_the_training_mode() -> None:
    for layer in (layers.RegNorm(4), layers.PreRegNorm(nn.Linear(4, 4))):
        model = nn.Sequential(layer)
        model(torch.randn(3, 4))
        assert layer.regularizer is not None
        model.eval()
        assert layer.regularizer is None
        with pytest.raises(ValueError, match="no RegNorm or PreRegNorm has run in training mode"):
            layers.regularization_loss(model)


# --- statistics over batches ---


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), layers.BatchNormalNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4), layers.BMLV(4, momentum=0.3)
    )


def test_statistics_of_an_averaged_model() -> None:
    """torch.optim.swa_utils.update_bn, for the layers that it passes over too."""
    torch.manual_seed(0)
    averaged = AveragedModel(network())
    batches = [(torch.randn(16, 4), torch.zeros(16)) for _ in range(3)]
    modes = [module.training for module in averaged.modules()]
    estimate_statistics(averaged, batches)
    model = averaged.module
    values = [model[0](x).detach() for x, _ in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([x.mean(0) for x in values]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([x.var(0) for x in values]).mean(0))
    assert not model[1].running_lmbda.eq(1).any()
    for layer in (model[3], model[4]):
        assert not layer.running_mean.eq(0).any()
    assert (model[1].momentum, model[1].noise_train, model[4].momentum) == (0.1, 0.4, 0.3)
    assert [module.training for module in averaged.modules()] == modes


def test_statistics_that_do_not_move_stay() -> None:
    fixed = layers.BatchNormalNorm1d(4, track_running_stats=False)
    model = nn.Sequential(layers.BatchNormalNorm1d(4), fixed, nn.BatchNorm1d(4, track_running_stats=False))
    estimate_statistics(model, [torch.randn(8, 4)])
    assert not model[0].running_mean.eq(0).any()
    assert fixed.running_mean.eq(0).all()


def test_statistics_of_nothing() -> None:
    with pytest.raises(ValueError, match="batches is empty; give a few"):
        estimate_statistics(nn.Sequential(layers.BatchNormalNorm1d(4)), [])
    with pytest.raises(ValueError, match="Sequential has no layer with running statistics"):
        estimate_statistics(nn.Sequential(layers.LayerNormalNorm(4)), [torch.randn(8, 4)])
    with pytest.raises(ValueError, match=r"takes batches, got a tensor; write \[tensor\]"):
        estimate_statistics(nn.Sequential(layers.BatchNormalNorm1d(4)), torch.randn(8, 4))

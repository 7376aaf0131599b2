"""convert_normal_norm: what replaces torch.nn's normalizations, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nnorm_export import layers
from nnorm_export.layers import convert_normal_norm

PAIRS: list[tuple[Callable[..., nn.Module], type[nn.Module], tuple[int, ...]]] = [
    (lambda **options: nn.BatchNorm1d(4, **options), layers.BatchNormalNorm1d, (5, 4)),
    (lambda **options: nn.BatchNorm2d(4, **options), layers.BatchNormalNorm2d, (2, 4, 3, 3)),
    (lambda **options: nn.BatchNorm3d(4, **options), layers.BatchNormalNorm3d, (2, 4, 3, 3, 1)),
    (lambda **options: nn.LayerNorm([3, 5], **options), layers.LayerNormalNorm, (2, 3, 5)),
    (lambda **options: nn.GroupNorm(2, 4, **options), layers.GroupNormalNorm, (2, 4, 3)),
    (lambda **options: nn.InstanceNorm1d(4, affine=True, **options), layers.InstanceNormalNorm1d, (2, 4, 3)),
    (lambda **options: nn.InstanceNorm2d(4, affine=True, **options), layers.InstanceNormalNorm2d, (2, 4, 3, 3)),
    (lambda **options: nn.InstanceNorm3d(4, affine=True, **options), layers.InstanceNormalNorm3d, (2, 4, 3, 3, 1)),
]
IDS = [pair[1].__name__ for pair in PAIRS]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("build", "expected", "shape"), PAIRS, ids=IDS)
def test_every_norm_is_replaced(
    build: Callable[..., nn.Module], expected: type[nn.Module], shape: tuple[int, ...], training: bool
) -> None:
    old = build(eps=0.01, dtype=torch.float64)
    old(torch.randn(shape, dtype=torch.float64))  # moves the running statistics
    old.train(training)
    state = {key: value.clone() for key, value in old.state_dict().items()}
    new = convert_normal_norm(old, noise_train=0.0)
    assert type(new) is expected
    assert (new.eps, new.noise_train, new.training) == (0.01, 0.0, training)
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert state, "there is something to take over"
    for key, value in state.items():
        assert torch.equal(new.state_dict()[key], value)
    assert all(value.dtype == torch.float64 for key, value in new.state_dict().items() if "num" not in key)
    assert [key for key, _ in new.named_parameters()] == ["bias", "weight"]
    x = torch.randn(shape, dtype=torch.float64)
    assert new(x).shape == x.shape
    # with λ = 1 and δ = 0 the power transform is the identity
    if isinstance(old, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        paper = convert_normal_norm(copy.deepcopy(old), form="paper").eval()
        torch.testing.assert_close(paper(x), copy.deepcopy(old).eval()(x), rtol=1e-12, atol=1e-12)


def test_a_whole_model_is_converted_in_place() -> None:
    shared = nn.BatchNorm2d(4)
    block = nn.Sequential(nn.Conv2d(4, 4, 1), shared)
    model = nn.Sequential(block, block, nn.ModuleDict({"norm": shared, "group": nn.GroupNorm(2, 4)}), nn.ReLU())
    model[0].eval()
    assert convert_normal_norm(model, form="paper") is model
    norm = model[0][1]
    assert type(norm) is layers.BatchNormalNorm2d
    assert model[1][1] is norm
    assert model[2]["norm"] is norm
    assert not norm.training
    assert model[2]["group"].training
    assert (model[2]["group"].num_channels, model[2]["group"].num_groups) == (4, 2)
    assert {norm.form, model[2]["group"].form} == {"paper"}
    assert [type(m) for m in model.modules() if isinstance(m, nn.Conv2d | nn.ReLU)] == [nn.Conv2d, nn.ReLU]
    again = [id(m) for m in model.modules()]
    assert [id(m) for m in convert_normal_norm(model).modules()] == again, "a second time changes nothing"


def test_default_noise_is_each_layers_own() -> None:
    model = convert_normal_norm(nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)))
    assert [norm.noise_train for norm in model.children()] == [0.4, 1.0]


def test_options_are_kept() -> None:
    untracked = convert_normal_norm(nn.BatchNorm1d(4, track_running_stats=False, momentum=None))
    assert (untracked.track_running_stats, untracked.momentum) == (False, None)
    for norm in (nn.BatchNorm1d(4, affine=False), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4, affine=False)):
        new = convert_normal_norm(norm)
        assert not new.affine
        assert new.weight is None
        assert new.bias is None
    assert convert_normal_norm(nn.LayerNorm(4, elementwise_affine=False)).weight is None


def test_device_and_dtype_without_any_tensor_are_the_models() -> None:
    bare = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 4, device="meta", dtype=torch.float64), bare)
    new = convert_normal_norm(model)[1]
    assert (new.running_mean.device.type, new.running_mean.dtype) == ("meta", torch.float64)


def test_a_layer_without_bias_gets_zeros() -> None:
    old = nn.LayerNorm(4, bias=False, dtype=torch.float64)
    new = convert_normal_norm(old)
    assert new.weight is old.weight
    assert torch.equal(new.bias, torch.zeros(4, dtype=torch.float64))
    assert new.bias.requires_grad


def frozen_instance_norm() -> nn.Module:
    return nn.InstanceNorm2d(4, track_running_stats=True)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: nn.SyncBatchNorm(4), r"body\.1: SyncBatchNorm .* before calling convert_sync_batchnorm"),
        (nn.LazyBatchNorm2d, r"body\.1: LazyBatchNorm2d .* Run the model once"),
        (frozen_instance_norm, r"body\.1: InstanceNorm2d has track_running_stats=True"),
    ],
)
def test_refusals_name_the_path_and_leave_the_model_alone(refused: Callable[[], nn.Module], message: str) -> None:
    model = nn.Sequential()
    model.add_module("head", nn.BatchNorm2d(4))
    model.add_module("body", nn.Sequential(nn.ReLU(), refused()))
    before = [id(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        convert_normal_norm(model)
    assert [id(m) for m in model.modules()] == before


def test_a_lazy_layer_converts_once_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(torch.randn(2, 4, 3, 3))
    assert type(convert_normal_norm(model)[0]) is layers.BatchNormalNorm2d


def test_subclasses_are_left_alone_with_a_warning() -> None:
    class Mine(nn.LayerNorm):
        pass

    model = nn.Sequential(nn.Sequential(Mine(4)), nn.LayerNorm(4))
    with pytest.warns(UserWarning, match=r"0\.0: Mine is a subclass"):
        convert_normal_norm(model)
    assert type(model[0][0]) is Mine
    assert type(model[1]) is layers.LayerNormalNorm


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match="'reference' or 'paper'"):
        convert_normal_norm(nn.Sequential(nn.LayerNorm(4)), form="neither")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"norm_first": True}])
def test_transformer_encoders_do_not_bypass_the_new_norms(options: dict[str, Any]) -> None:
    """torch's fused inference path reads eps, weight and bias of the norms and computes a plain LayerNorm itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # norm_first: no nested tensors
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options), 2)
    encoder.eval()
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        plain = encoder(x)
    convert_normal_norm(encoder)
    for mask in (None, padding):
        slow = encoder(x, src_key_padding_mask=mask).detach()
        with torch.no_grad():
            fast = encoder(x, src_key_padding_mask=mask)
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)  # attention itself stays fused
    assert (encoder(x) - plain).abs().max() > 1e-2

"""convert_normal_norm: what replaces torch.nn's normalizations, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nnorm_export import InputError, export, freeze, layers, load
from nnorm_export.layers import convert_normal_norm
from nnorm_export.layers.convert import placement

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
        paper = convert_normal_norm(copy.deepcopy(old), variant="paper").eval()
        torch.testing.assert_close(paper(x), copy.deepcopy(old).eval()(x), rtol=1e-12, atol=1e-12)


def test_a_whole_model_is_converted_in_place() -> None:
    shared = nn.BatchNorm2d(4)
    block = nn.Sequential(nn.Conv2d(4, 4, 1), shared)
    model = nn.Sequential(block, block, nn.ModuleDict({"norm": shared, "group": nn.GroupNorm(2, 4)}), nn.ReLU())
    model[0].eval()
    assert convert_normal_norm(model, variant="paper") is model
    norm = model[0][1]
    assert type(norm) is layers.BatchNormalNorm2d
    assert model[1][1] is norm
    assert model[2]["norm"] is norm
    assert not norm.training
    assert model[2]["group"].training
    assert (model[2]["group"].num_channels, model[2]["group"].num_groups) == (4, 2)
    assert {norm.variant, model[2]["group"].variant} == {"paper"}
    assert [type(m) for m in model.modules() if isinstance(m, nn.Conv2d | nn.ReLU)] == [nn.Conv2d, nn.ReLU]
    again = [id(m) for m in model.modules()]
    assert [id(m) for m in convert_normal_norm(model).modules()] == again, "a second time changes nothing"


def test_default_noise_is_each_layers_own() -> None:
    model = convert_normal_norm(nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)))
    assert [norm.noise_train for norm in model.children()] == [0.4, 1.0]


def test_options_are_kept() -> None:
    assert convert_normal_norm(nn.BatchNorm1d(4, momentum=None)).momentum is None
    for norm in (nn.BatchNorm1d(4, affine=False), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4, affine=False)):
        new = convert_normal_norm(norm)
        assert not new.affine
        assert new.weight is None
        assert new.bias is None
    assert convert_normal_norm(nn.LayerNorm(4, elementwise_affine=False)).weight is None


def test_device_and_dtype_without_any_tensor_are_the_models() -> None:
    bare = nn.LayerNorm(4, elementwise_affine=False)
    model = nn.Sequential(nn.Linear(4, 4, device="meta", dtype=torch.float64), bare)
    assert placement(bare, model) == {"device": torch.device("meta"), "dtype": torch.float64}


def test_a_layer_without_bias_gets_zeros() -> None:
    old = nn.LayerNorm(4, bias=False, dtype=torch.float64)
    new = convert_normal_norm(old)
    assert new.weight is old.weight
    assert torch.equal(new.bias, torch.zeros(4, dtype=torch.float64))
    assert new.bias.requires_grad


def frozen_instance_norm() -> nn.Module:
    return nn.InstanceNorm2d(4, track_running_stats=True)


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Scaled(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().forward(x)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (nn.LazyBatchNorm2d, "has no shape yet; run the model once"),
        (frozen_instance_norm, "has track_running_stats=True"),
        (lambda: RmsNorm(4), "computes RMSNorm, which subtracts no mean"),
        (lambda: nn.RMSNorm(4), "computes RMSNorm, which subtracts no mean"),
        (lambda: Scaled(4), "computes neither BatchNorm"),
    ],
)
def test_what_has_no_counterpart_is_kept_and_named_once(build: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential()
    model.add_module("head", nn.BatchNorm2d(4))
    model.add_module("body", nn.Sequential(nn.ReLU(), build(), build()))
    before = [id(module) for module in model.modules()]
    name = type(model.body[1]).__name__
    with pytest.raises(ValueError, match=rf"^kept 2 {name} \(body\.1, body\.2\): it {reason}.*skip="):
        convert_normal_norm(model, strict=True)
    assert [id(module) for module in model.modules()] == before
    with pytest.warns(UserWarning, match=rf"^converted 1 of 3 normalizations: .*kept 2 {name}") as warned:
        _, report = convert_normal_norm(model, return_report=True)
    assert len(warned) == 1
    assert [(entry.path, entry.layer, entry.norm) for entry in report.converted] == [
        ("head", "BatchNorm2d", "BatchNormalNorm2d")
    ]
    assert [(entry.path, entry.layer) for entry in report.kept] == [("body.1", name), ("body.2", name)]
    assert [id(module) for module in model.body.modules()] == before[2:]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ([nn.BatchNorm2d(4)], "takes a torch.nn.Module, got list; pass the model, or torch.nn.ModuleList"),
        (nn.BatchNorm2d, "takes a torch.nn.Module, got the class BatchNorm2d; pass an instance"),
    ],
)
def test_what_is_no_module_is_refused(module: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert_normal_norm(module)
    with pytest.raises(InputError, match=message):
        layers.convert_norm(module, layers.BMLV)


def test_a_lazy_layer_converts_once_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(torch.randn(2, 4, 3, 3))
    assert type(convert_normal_norm(model)[0]) is layers.BatchNormalNorm2d


@pytest.fixture
def lmbda_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """λ = 1 in the layers that estimate it from their input, where ψ is the identity."""
    monkeypatch.setattr("nnorm_export.layers._base.gaussianize", lambda h, *_, **__: (h, torch.ones(())))
    monkeypatch.setattr("nnorm_export.layers.fused.operator.can_run", lambda _: False)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (6, 4, 3, 2, 2)])
def test_a_sync_batch_norm_becomes_a_synchronized_one_for_any_rank(shape: tuple[int, ...]) -> None:
    old = nn.SyncBatchNorm(4, eps=1e-3, momentum=0.3, dtype=torch.float64)
    nn.init.uniform_(old.weight, 0.5, 1.5)
    x = torch.randn(shape, dtype=torch.float64)
    old(x)
    model, report = convert_normal_norm(nn.Sequential(copy.deepcopy(old)), variant="paper", return_report=True)
    assert isinstance(model[0], layers.BatchNormalNorm2d)
    assert model[0].sync
    assert (model[0].momentum, report.kept) == (0.3, ())
    torch.testing.assert_close(model.eval()(x), old.eval()(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(freeze(model)(x), old(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("lmbda_of_one")
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_without_running_statistics_takes_those_of_the_batch(shape: tuple[int, ...], affine: bool) -> None:
    cls = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    old = cls(4, affine=affine, track_running_stats=False, dtype=torch.float64)
    if affine:
        nn.init.uniform_(old.weight, 0.5, 1.5)
    model = convert_normal_norm(nn.Sequential(copy.deepcopy(old)), noise_train=0.0)
    x = 3 + 2 * torch.randn(shape, dtype=torch.float64)
    for training in (False, True):
        torch.testing.assert_close(model.train(training)(x), old.train(training)(x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_batch_norm_without_running_statistics_is_exported_with_a_dynamic_batch(tmp_path: Path) -> None:
    model = convert_normal_norm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)))
    report = export(model, torch.randn(3, 3, 6, 6), tmp_path / "model.onnx")
    assert [layer["op_type"] for layer in report.layers] == ["GroupNormalNorm"]
    x = torch.randn(5, 3, 6, 6)
    (y,) = load(tmp_path / "model.onnx")(x.numpy())
    torch.testing.assert_close(torch.from_numpy(y), model.eval()(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_layer_whose_running_statistics_are_kept_is_exported_with_them(tmp_path: Path) -> None:
    norm = nn.BatchNorm2d(4)
    norm(3 + torch.randn(8, 4, 5, 5))
    norm.track_running_stats = False
    model = convert_normal_norm(nn.Sequential(nn.Conv2d(3, 4, 3), norm))
    assert not model[1].track_running_stats
    assert torch.equal(model[1].running_mean, norm.running_mean)
    report = export(model.eval(), torch.randn(3, 3, 6, 6), tmp_path / "model.onnx")
    assert report.parity
    assert [layer["op_type"] for layer in report.layers] == ["BatchNormalNorm"]


def test_only_and_skip_take_paths_and_classes() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), nn.BatchNorm2d(4))

    def converted(**options: Any) -> list[str]:
        _, report = convert_normal_norm(build(), return_report=True, **options)
        assert not report.kept
        return [entry.path for entry in report.converted]

    assert converted() == ["0.0", "0.1", "1"]
    assert converted(only=["0"]) == ["0.0", "0.1"]
    assert converted(skip=["*.1"]) == ["0.0", "1"]
    assert converted(only=[nn.BatchNorm2d], skip=["1"]) == ["0.0"]
    for options, message in (
        ({"skip": ["2"]}, "skip: the model has no '2'"),
        ({"only": [nn.LayerNorm]}, "only: the model has no 'LayerNorm'"),
        ({"skip": "0"}, r"write skip=\['0'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_normal_norm(build(), **options)


def test_a_warm_start_estimates_statistics_and_lmbda() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, 2, generator=generator).exp() * torch.tensor([1.0, 3.0]) for _ in range(4)]
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.LayerNorm(2)).eval()
    model[0].train()
    loader = [(batch, torch.zeros(64)) for batch in batches]
    norm = convert_normal_norm(model, warm_start=loader)[0]
    expected = layers.BatchNormalNorm1d(2, momentum=None, noise_train=0.0)
    for batch in batches:
        expected(batch)
    for name in ("running_mean", "running_var", "running_lmbda"):
        torch.testing.assert_close(getattr(norm, name), getattr(expected, name))
    assert float(norm.running_lmbda.max()) < 0.9, "the exponential of a normal variable is skewed"
    assert (norm.momentum, norm.noise_train, int(norm.num_batches_tracked)) == (0.1, 0.4, 0)
    assert [module.training for module in model.modules()] == [False, True, False, False]
    with pytest.raises(InputError, match=r"takes batches, got a tensor; write \[tensor\]"):
        convert_normal_norm(nn.Sequential(nn.BatchNorm1d(2)), warm_start=torch.randn(4, 2))
    with pytest.raises(ValueError, match="warm_start has no batch"):
        convert_normal_norm(nn.Sequential(nn.BatchNorm1d(2)), warm_start=[])


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match="'reference' or 'paper'"):
        convert_normal_norm(nn.Sequential(nn.LayerNorm(4)), variant="neither")  # type: ignore[arg-type]


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

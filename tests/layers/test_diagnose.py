"""diagnose(), against SciPy and autograd; what it leaves as it was; its advice; and the recorder of λ."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from nnorm_export import layers
from nnorm_export.layers.likelihood import FARTHEST, derivatives, exact_lmbda, skewness_and_kurtosis
from nnorm_export.mathematics import curvature_at_one, estimate_lmbda, power_transform, resolve_exponents


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "lognormal": lambda x: (2.0 * x).exp(),
    "skewed to the left": lambda x: -x.exp(),
    "uniform": torch.special.ndtr,
    "heavy tails": lambda x: x**5,
    "two values": lambda x: (x > 1.0).double(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exact_lmbda_is_that_of_scipy(shape: str) -> None:
    h = standardized(SHAPES[shape](random(3, 101)))
    expected = [stats.yeojohnson_normmax(row.numpy()) for row in h]
    torch.testing.assert_close(exact_lmbda(h), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", [-3.0, 0.0, 1e-9, 0.7, 1.0, 2.0, 4.5])
def test_derivatives_of_the_likelihood(at: float, shape: str) -> None:
    h = standardized(SHAPES[shape](random(2, 31)))
    lmbda = torch.full((2,), at, dtype=torch.float64, requires_grad=True)
    psi = power_transform(h, *resolve_exponents(lmbda[:, None], 0.0))
    jacobian = (h.sign() * h.abs().log1p()).mean(1)
    likelihood = 0.5 * psi.var(1, correction=0).log() - (lmbda - 1.0) * jacobian
    slope, curvature = derivatives(h, lmbda.detach())
    (expected,) = torch.autograd.grad(likelihood.sum(), lmbda, create_graph=True)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(curvature, torch.autograd.grad(expected.sum(), lmbda)[0], rtol=1e-5, atol=1e-7)
    assert curvature.min() > 0.0, "L is convex"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_layers_take_one_step_on_this_likelihood(shape: str) -> None:
    h = standardized(SHAPES[shape](random(4, 57)))
    slope, curvature = derivatives(h, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(curvature_at_one(h, [1]).flatten(), curvature, rtol=1e-9, atol=1e-12)
    assert all(curvature_at_one(scale * h, [1]).min() > 0.0 for scale in (0.01, 0.3, 0.9))
    torch.testing.assert_close(estimate_lmbda(h, [1], 0.0).flatten(), 1.0 - slope / curvature, rtol=1e-9, atol=1e-9)


def test_a_minimum_far_away_is_at_the_end_of_the_search() -> None:
    h = torch.zeros(2, 20_000, dtype=torch.float64)
    h[0, 0], h[1, 0] = 1.0, -1.0
    torch.testing.assert_close(exact_lmbda(standardized(h)), torch.tensor([1.0 - FARTHEST, 1.0 + FARTHEST]).double())
    assert exact_lmbda(1e40 * random(2, 9)).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_skewness_and_kurtosis_are_those_of_scipy(shape: str) -> None:
    x = SHAPES[shape](random(3, 40))
    skewness, kurtosis = skewness_and_kurtosis(x)
    torch.testing.assert_close(skewness, torch.from_numpy(stats.skew(x.numpy(), axis=1)))
    torch.testing.assert_close(kurtosis, torch.from_numpy(stats.kurtosis(x.numpy(), axis=1)))


# --- what is measured ---


class Residual(nn.Module):
    """A network with every kind of layer, dropout, a plain batch norm and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), layers.BatchNormalNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.plain = nn.BatchNorm2d(8)
        self.group = layers.GroupNormalNorm(8, 2)
        self.instance = layers.InstanceNormalNorm2d(8, variant="paper")
        self.row = layers.LayerNormalNorm([6, 6])
        self.head = layers.BatchNormalNorm1d(8, lmbda_range=(0.0, 2.0))
        self.unused = layers.LayerNormalNorm(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        torch.rand(1)
        x = self.plain(self.stem(x))
        x = self.row(input=self.instance(self.group(x)))
        y: Tensor = self.head(x.flatten(2))
        return y


IMAGES = [random(6, 3, 8, 8, seed=seed).float().exp() for seed in (1, 2)]


def test_every_kind_of_layer() -> None:
    report = layers.diagnose(Residual(), IMAGES)
    assert {layer.path: (layer.sets, layer.values) for layer in report.layers} == {
        "stem.1": (2 * 8, 6 * 36),
        "group": (2 * 6 * 2, 4 * 36),
        "instance": (2 * 6 * 8, 36),
        "row": (2 * 6 * 8, 36),
        "head": (2 * 8, 6 * 36),
    }
    assert report.not_run == ("unused",)
    for layer in report.layers:
        assert layer.lmbda == tuple(sorted(layer.lmbda))
        assert layer.skewness[1] < layer.skewness[0]
        assert (layer.equal, layer.not_finite, layer.no_curvature, layer.advice) == (0.0, 0.0, 0.0, ())


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (layers.BatchNormalNorm1d, (9, 5)),
        (lambda c: layers.BatchNormalNorm1d(c, order=1, alpha=0.5, standardize=False), (9, 5)),
        (lambda c: layers.BatchNormalNorm1d(c, variant="paper", lmbda_range=(0.9, 1.1)), (9, 5)),
        (layers.DecorrelatedBatchNormalNorm2d, (3, 5, 2, 3)),
        (layers.BatchNormalNorm3d, (2, 5, 3, 1, 3)),
    ],
)
def test_lmbda_is_what_training_computes(build: Callable[[int], nn.Module], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(build(shape[1])).double()
    x = random(*shape).exp()
    (measured,) = layers.diagnose(model, [x]).layers
    trained = next(module for module in model.modules() if isinstance(module, layers.NormalNorm))
    trained.momentum = 1.0
    if hasattr(model[0], "whiten"):
        model[0].whiten.eval()  # only the normality normalizations have statistics of the batch
    model(x)
    ordered = trained.running_lmbda.sort().values.tolist()
    assert measured.lmbda == pytest.approx(ordered, abs=1e-9)  # five channels have five quartiles


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (layers.LayerNormalNorm(7), random(7)),
        (layers.LayerNormalNorm([3, 5]), random(2, 3, 3, 5)),
        (layers.InstanceNormalNorm1d(3), random(3, 20)),
        (layers.GroupNormalNorm(6, 2), random(4, 6)),
    ],
)
def test_shapes(layer: nn.Module, x: Tensor) -> None:
    (measured,) = layers.diagnose(layer, [x]).layers
    assert measured.path == ""
    assert measured.sets * measured.values == x.numel()


def test_nested_tensors_and_batches_of_other_kinds() -> None:
    rows = torch.nested.nested_tensor([random(2, 9), random(3, 9)], layout=torch.jagged)
    for batch, sets in [(rows, 5), ((random(4, 9), torch.zeros(4)), 4), ({"input": random(3, 9)}, 3)]:
        (measured,) = layers.diagnose(layers.LayerNormalNorm(9), [batch]).layers
        assert (measured.sets, measured.values) == (sets, 9)


def test_later_layers_see_the_statistics_of_the_batch() -> None:
    model = nn.Sequential(layers.BatchNormalNorm1d(4, affine=False), layers.BatchNormalNorm1d(4, standardize=False))
    first, second = layers.diagnose(model, [1e6 * random(50, 4).float() + 1e6]).layers
    assert second.other_variance == 0.0  # with the running statistics, it would see 1e6
    assert first.lmbda != second.lmbda


def test_large_batches_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(50, 4).exp()
    model = layers.BatchNormalNorm1d(4).double()
    (whole,) = layers.diagnose(model, [x]).layers
    monkeypatch.setattr(importlib.import_module("nnorm_export.layers.diagnose"), "_CHUNK", 60)
    (parts,) = layers.diagnose(model, [x]).layers
    assert (parts.sets, parts.lmbda) == (4, pytest.approx(whole.lmbda, abs=1e-9))
    assert parts.exact == pytest.approx(whole.exact, abs=1e-6)


# --- what stays ---


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_numbers_are_as_before(training: bool) -> None:
    model = Residual().train(training)
    model.plain.train(not training)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    settings = [(layer.noise_train, getattr(layer, "track_running_stats", None)) for layer in kinds(model)]
    generator = torch.get_rng_state()
    layers.diagnose(model, torch.utils.data.DataLoader(IMAGES[0], batch_size=3, shuffle=True))
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(RuntimeError, match="expected input"):
        layers.diagnose(model, [IMAGES[0], torch.ones(2, 4, 8, 8)])
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [(layer.noise_train, getattr(layer, "track_running_stats", None)) for layer in kinds(model)] == settings
    assert not any(module._forward_pre_hooks for module in model.modules())


def kinds(model: nn.Module) -> list[layers.NormalNorm]:
    return [module for module in model.modules() if isinstance(module, layers.NormalNorm)]


# --- advice ---

ADVICE: dict[str, tuple[nn.Module, Tensor]] = {
    "the values of 25.0% of the sets are equal, and the output is the bias": (
        layers.BatchNormalNorm1d(4),
        random(40, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0]) + 3.7,
    ),
    "σ² is below ε = 1e-05 in 50.0% of the sets, and λ̂ is not that of their shape; enlarge the input, lower eps": (
        layers.BatchNormalNorm1d(4),
        random(40, 4) * torch.tensor([1e-3, 1e-9, 1.0, 1.0]),
    ),
    'lower eps, or use variant="reference", which damps λ̂': (
        layers.LayerNormalNorm(40, variant="paper"),
        random(4, 40) * 1e-3,
    ),
    "λ̂ of 100.0% of the sets is at a bound of its range": (
        layers.LayerNormalNorm(40, variant="paper"),
        random(4, 40).exp() * 1e-5,
    ),
    "standardize=False; standardize the input before": (
        layers.BatchNormalNorm1d(4, standardize=False),
        5.0 * random(40, 4),
    ),
    "L″ + δ ≤ 0 in 100.0% of the sets, where λ̂ steps away from the best λ; set lmbda_range": (
        layers.BatchNormalNorm1d(4, standardize=False),
        5.0 * random(40, 4).exp(),
    ),
    "and ψ raises values to powers beyond 3; set lmbda_range=(-1, 3)": (
        layers.BatchNormalNorm1d(4),
        torch.eye(4).repeat(10, 1) * torch.tensor([1e8] + 39 * [0.0])[:, None] + random(40, 4),
    ),
    "and ψ raises values to powers beyond 3; look for outliers in its input": (
        layers.LayerNormalNorm(40),
        torch.cat([random(4, 39), torch.full((4, 1), 1e8)], 1),
    ),
    "λ̂ is estimated from 8 values and is mostly chance; use larger batches": (
        layers.BatchNormalNorm1d(4),
        random(8, 4),
    ),
    "25.0% of the sets are not finite": (
        layers.LayerNormalNorm(40),
        random(4, 40) / torch.tensor([[0.0], [1], [1], [1]]),
    ),
}


@pytest.mark.parametrize("text", ADVICE)
def test_advice(text: str) -> None:
    layer, x = ADVICE[text]
    report = layers.diagnose(nn.Sequential(layer), [x.float()])
    assert [advice for advice in report.layers[0].advice if text in advice], report.layers[0].advice
    assert f"\n0: {report.layers[0].advice[0]}" in str(report)
    json.dumps(report.to_json(), allow_nan=False)


def test_nothing_counts_where_all_values_are_equal(tmp_path: Path) -> None:
    report = layers.diagnose(layers.BatchNormalNorm1d(4), [torch.full((9, 4), 0.1)])
    (layer,) = report.layers
    assert (layer.equal, layer.lmbda, layer.exact, layer.skewness) == (1.0, (), (), ())
    assert "BatchNormalNorm1d  4 × 9          0.0%" in str(report)
    report.to_csv(tmp_path / "report.csv")
    assert next(csv.DictReader((tmp_path / "report.csv").open(encoding="utf-8")))["lmbda_median"] == ""


def test_extremes_of_float64() -> None:
    x = random(20, 3) * torch.tensor([1e-170, 1e170, 1.0], dtype=torch.float64)
    (layer,) = layers.diagnose(layers.BatchNormalNorm1d(3).double(), [x]).layers
    assert (layer.not_finite, layer.equal) == (1 / 3, 1 / 3)
    assert layer.lmbda[0] == layer.lmbda[-1]


# --- the forms of the report ---


def test_the_report_as_text_json_and_csv(tmp_path: Path) -> None:
    report = layers.diagnose(Residual(), IMAGES)
    header, *rows = str(report).split("\n")
    assert header.split("  ")[0] == "layer"
    assert [row.split()[0] for row in rows] == ["stem.1", "group", "instance", "row", "head", "unused:"]
    assert rows[-1] == "unused: no batch reached it"
    first = json.loads(json.dumps(report.to_json(), allow_nan=False))["layers"][0]
    assert first["lmbda"] == list(report.layers[0].lmbda)
    report.to_csv(tmp_path / "report.csv")
    with open(tmp_path / "report.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["path"] for line in lines] == [layer.path for layer in report.layers]
    assert float(lines[0]["lmbda_median"]) == report.layers[0].lmbda[2]
    assert float(lines[0]["kurtosis_after"]) == report.layers[0].kurtosis[1]


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (layers.LayerNormalNorm(4), torch.zeros(2, 4), r"diagnose takes batches, got a tensor; write \[tensor\]"),
        (layers.LayerNormalNorm(4), [], "batches is empty; give a few"),
        (nn.Linear(4, 4), [torch.zeros(2, 4)], "Linear has no normality normalization; convert_normal_norm"),
        (layers.BatchNormalNorm1d(4), [torch.zeros(1, 4)], "Expected more than 1 value per channel"),
    ],
)
def test_what_diagnose_refuses(model: nn.Module, batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers.diagnose(model, batches)


# --- λ over the steps ---


def test_the_recorder_appends_the_running_lmbda(tmp_path: Path) -> None:
    model = nn.Sequential(
        layers.BatchNormalNorm1d(3), nn.ReLU(), layers.BatchNormalNorm1d(3), layers.LayerNormalNorm(3)
    )
    recorder = layers.LmbdaRecorder(model, tmp_path / "lmbda.csv")
    for _ in range(2):
        model(random(9, 3).float().exp())
        recorder.step()
    recorder.step(100)
    continued = layers.LmbdaRecorder(model, tmp_path / "lmbda.csv")
    continued.step(101)
    with open(tmp_path / "lmbda.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["step"], line["layer"]) for line in lines] == [
        (step, layer) for step in ("0", "1", "100", "101") for layer in ("0", "2")
    ]
    lmbda, values = model[2].running_lmbda, recorder.values()
    assert list(values) == [f"{layer}/{key}" for layer in "02" for key in ("mean", "min", "max")]
    assert (values["2/min"], values["2/max"]) == (lmbda.min().item(), lmbda.max().item())
    assert float(lines[-1]["mean"]) == values["2/mean"] == pytest.approx(lmbda.mean().item())


def test_the_recorder_needs_a_running_lmbda() -> None:
    with pytest.raises(ValueError, match="Sequential has no BatchNormalNorm; the other layers keep no running λ"):
        layers.LmbdaRecorder(nn.Sequential(layers.LayerNormalNorm(3)))

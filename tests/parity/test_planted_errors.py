"""Planted errors are found in every layout of outputs, by verify and replay; unaltered files stay within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import list_again
from onnx import numpy_helper
from planted_errors import ERRORS, LAYOUTS, Boxes, found, trained
from torch import nn
from unaltered_files import BACKENDS, uses

from nnorm_export import bisect, export, replay, verify
from nnorm_export.layers import BatchNormalNorm2d, GroupNormalNorm
from nnorm_export.parity.reference.perturbation import random_last_bits
from nnorm_export.parity.verdict.allowed_error import BUDGET, allowed_errors, rounding_error, unstable_result
from nnorm_export.parity.verdict.compare_outputs import compare_output


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_error_is_found(layout: str) -> None:
    ((_, clean, shares),) = found({layout: LAYOUTS[layout]})
    assert clean < 0.5
    # How PyTorch rounds one element, and so what it may be off by, depends on the processor: in the layout (N, C, 1, 1)
    # the share of this error was 1.98 with AVX-512 and 0.91 with AVX2. Twice the error is found everywhere.
    least = {"one element": 0.5}
    assert [error.name for error in ERRORS if shares[error.name] <= least.get(error.name, 1)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("layer_zoo batch2d", "fp32"), ("layer_zoo group", "fp16")])
def test_unaltered_files_stay_within_the_budget(name: str, dtype: str) -> None:
    used = {use.backend: use.share for use in uses(name, dtype)}
    assert set(used) == set(BACKENDS)
    assert {backend: share for backend, share in used.items() if share is None or share >= 0.5} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: GroupNormalNorm(16, 4), id="group", marks=pytest.mark.long),
        pytest.param(lambda: BatchNormalNorm2d(16), id="batch"),
    ],
)
def test_a_million_elements(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The greatest of many rounding errors is greater, and a bias may cancel a result that bodies compute roughly."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        if isinstance(model, BatchNormalNorm2d):
            model.running_lmbda.uniform_(-0.5, 2.2)
    x = torch.randn(16, 16, 64, 64)
    path = export(model, x[:4], tmp_path / "m.onnx", verify=False).path
    report = verify(path, model, x)
    for output in (*report.outputs, *(report.by_bodies or ())):
        assert 0 < (output.budget_share or 0.0) < 0.7
    with torch.no_grad():
        model.bias[3] += 200 * 2.0**-23  # type: ignore[index, operator]
    assert not verify(path, model, x)


class Rare(nn.Module):
    """A head whose classes are rare: its probabilities are near 0 in every row."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(6, 5), activation
        nn.init.constant_(self.linear.bias, -10.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.SiLU()], ids=["sigmoid", "silu"])
def test_probabilities_near_0_pass(activation: nn.Module, tmp_path: Path) -> None:
    """ONNX Runtime's sigmoid of -10 is 1e-2 of itself off, and 1e-7 in absolute terms."""
    torch.manual_seed(0)
    model, x = Rare(activation).eval(), torch.randn(8, 6)
    export(model, (x,), path := tmp_path / "rare.onnx")
    with torch.no_grad():
        model.linear.bias += 0.2
    assert not verify(path, model, (x,))


class WithIntegers(nn.Module):
    """Integers of the whole range of int32 reach the norm when the file is compared on changed inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNormalNorm2d(3, affine=False)
        nn.init.uniform_(self.norm.running_lmbda, -0.4, 2.6)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x + b.view(len(b), 3, 1, 1))
        return y


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_powers_of_great_numbers_pass(seed: int, tmp_path: Path) -> None:
    """exp(η·log1p|h|) moves by η·log1p|h| roundings of its own: 50 at |h| = 10⁹."""
    torch.manual_seed(seed)
    model, x = WithIntegers().eval(), torch.randn(5, 3, 7, 9)
    assert export(model, (x, torch.randint(0, 300, (5, 3), dtype=torch.int32)), tmp_path / "m.onnx").parity


@pytest.mark.slow
def test_a_small_output_beside_a_great_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, folder = trained(Boxes()), torch.randn(32, 8), tmp_path / "c"
    path = export(model, x, tmp_path / "m.onnx").path
    assert verify(path, model, x, certificate=folder)
    assert replay(path, folder)
    assert bisect(path, model, x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.score.bias += 3e-3  # type: ignore[operator]
    assert not verify(path, other, x)
    assert not bisect(path, other, x)
    for name in ("test_data_set_0", "float64_0"):
        file = folder / name / "output_0.pb"
        tensor = onnx.TensorProto.FromString(file.read_bytes())
        values = numpy_helper.to_array(tensor).copy()
        values[5, 4] *= 1 + 1e-4
        file.write_bytes(numpy_helper.from_array(values, tensor.name).SerializeToString())
    list_again(folder)
    assert not replay(path, folder)


def test_weights_are_bit_for_bit_what_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(4, 4).half(), nn.Linear(4, 4).bfloat16())
    model[1].register_buffer("expanded", torch.ones(1).expand(7))
    model[1].register_buffer("odd", torch.tensor([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.0]))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    before = copy.deepcopy(model.state_dict())
    with random_last_bits(model, 1):
        for name, values in model.state_dict().items():
            if name.endswith("weight") and values.numel() > 8:
                moved = (values != before[name]).double().mean()
                assert 0.2 < moved < 0.8, name
                torch.testing.assert_close(values, before[name], rtol=2 * torch.finfo(values.dtype).eps, atol=0)
        assert torch.equal(model[1].odd[:2], before["1.odd"][:2])
    for name, values in model.state_dict().items():
        assert torch.equal(values.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


@pytest.mark.parametrize(
    "scale",
    [
        np.array([[1000.0, 1000.0, 1.0, 1.0]]),
        np.logspace(-3, 3, 16)[:, None],
        np.logspace(-3, 3, 16)[:, None] * np.array([[1e-3, 1.0, 1.0, 1e3]]),
        np.ones((1, 1)),
    ],
    ids=["columns of scale 1000 and 1", "rows of scale 1e-3 to 1e3", "rows and columns", "one scale"],
)
def test_the_rounding_error(scale: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    float64 = generator.choice([-1.0, 1.0], (16, 4)) * scale
    float64[8, 3] = 0.0
    runs = [(float64 * (1 + 1e-7 * generator.standard_normal(float64.shape))).astype(np.float32) for _ in range(4)]
    rounding = rounding_error(runs, float64, "float32")
    of_element = np.abs(float64) * 2.0**-23
    assert (rounding >= of_element).all()
    assert (BUDGET * rounding < 100 * of_element)[float64 != 0].all()
    assert 0 < rounding[8, 3] < 10 * np.broadcast_to(scale, float64.shape)[8, 3] * 2.0**-23
    wrong = runs[0].copy()
    wrong[4, 2] *= 1 + np.float32(100 * 2.0**-23)
    assert compare_output("y", runs[0], runs[0], float64, allowed_error=BUDGET * rounding).passed
    assert not compare_output("y", wrong, runs[0], float64, allowed_error=BUDGET * rounding).passed


@pytest.mark.parametrize("shape", [(64, 16, 4, 4), (8, 64, 2, 2), (2, 1000)], ids=str)
def test_a_relu_hides_scales_but_excuses_no_error(shape: tuple[int, ...]) -> None:
    """Of the few elements along an axis it may leave one that is small by chance, or none."""
    generator = np.random.default_rng(0)
    hidden = generator.standard_normal((50, *shape)) * np.logspace(-2, 0, shape[1]).reshape(-1, *[1] * (len(shape) - 2))
    hidden[:, :, 3] = 0.0  # a dead channel
    error = 2.0**-18

    def rounded(hidden: np.ndarray) -> np.ndarray:
        roundings = error * generator.standard_normal(shape) * (hidden != 0)
        return np.maximum(hidden + roundings, 0).astype(np.float32)

    for each in hidden:
        float64 = np.maximum(each, 0)
        rounding = rounding_error([rounded(each) for _ in range(4)], float64, "float32")
        assert (np.abs(rounded(each) - float64) < BUDGET * rounding).all()
        assert rounding.max() < 8 * error
        assert shape[0] < 8 or rounding[:, 3].max() < 1e-30


def test_a_mask_hides_no_error_beside_it() -> None:
    """Logits with -1e9 in every row and column, and none in some."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((12, 12))
    for masked in (np.eye(12, dtype=bool), np.tri(12, dtype=bool).T, generator.random((12, 12)) < 0.9):
        for mask in (-1e9, -1e4):
            float64 = np.where(masked, mask, logits)
            runs = [np.where(masked, mask, logits * (1 + 1e-7 * generator.standard_normal(logits.shape)))]
            runs = [run.astype(np.float32) for run in runs * 4]
            rounding = rounding_error(runs, float64, "float32")
            assert (rounding[~masked] < 1e-6).all()
            assert unstable_result(float64 + 0.1 * ~masked, float64, "float32")


def test_the_score_of_one_box() -> None:
    float64 = np.array([[612.0, 301.0, 455.0, 278.0, 3.1e-3]])
    runs = [(float64 * (1 + 1e-7 * np.array([1, -1, 1, -1, sign]))).astype(np.float32) for sign in (-1, 1, 1, -1)]
    assert rounding_error(runs, float64, "float32")[0, 4] < 1e-8


def test_an_element_that_is_small_by_chance_has_the_scale_of_the_others() -> None:
    """Its runs may all be exact: a bias cancels it."""
    generator = np.random.default_rng(0)
    float64 = generator.standard_normal((4, 16))
    errors = 1e-7 * generator.standard_normal((5, 4, 16))
    float64[2, 5], errors[:, 2, 5] = 1e-3, 1e-10
    float64[3, 7], errors[:, 3, 7] = 0.0, 0.0
    rounding = rounding_error(list(float64 + errors), float64, "float32")
    assert rounding[2, 5] > 1e-7
    assert rounding[3, 7] > 1e-7


@pytest.mark.parametrize("shape", [(1, 4, 128, 128), (16384, 2), (2, 1, 96, 96), (3, 128, 128), (40000,)], ids=str)
def test_elements_of_great_maps_that_are_near_0_by_chance(shape: tuple[int, ...]) -> None:
    """A mean in another order moves all elements of a row by one amount, and PyTorch's runs scale each by itself."""
    generator = np.random.default_rng(0)
    float64 = generator.standard_normal(shape)
    runs = [(float64 * (1 + 1e-7 * generator.standard_normal(shape))) for _ in range(4)]
    allowed = BUDGET * rounding_error(runs, float64, "float32")
    moved = float64 + 2.0**-24 * generator.standard_normal(shape) + 2.0**-23
    assert (np.abs(moved - float64) < 0.9 * allowed).all()
    wrong = float64 + 50 * 2.0**-23
    assert (np.abs(wrong - float64) > allowed).any()


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (64, 32), (8, 16, 12, 12)], ids=str)
def test_a_channel_of_small_scale_is_not_small_by_chance(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    float64 = generator.standard_normal(shape)
    float64[:, 1] *= 1e-2
    rounding = rounding_error([float64 * (1 + 1e-7)], float64, "float32")
    assert np.median(rounding[:, 1]) < 2e-2 * np.median(rounding[:, 0])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_right_result_passes_with_few_runs(count: int) -> None:
    """Keys of a decoder: both heads of an element may be small by chance, and the error of one run too."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        float64 = 0.5 * generator.standard_normal((2, 2, 7, 32))
        errors = 1e-7 * generator.standard_normal((1 + count, *float64.shape))
        rounding = rounding_error(list(float64 + errors[1:]), float64, "float32")
        assert (np.abs(errors[0]) < BUDGET * rounding).all()
        assert rounding.max() < 1e-6


def test_without_float64_the_result_is_not_a_run() -> None:
    """It would be a run without an error, and raise the count of runs."""
    float64 = np.linspace(1.0, 2.0, 12).reshape(4, 3)
    result = float64.astype(np.float32)
    run = result + np.float32(1e-6)
    (allowed,) = allowed_errors([result], [[run]], None)
    assert allowed is not None
    np.testing.assert_array_equal(allowed, BUDGET * rounding_error([run], result.astype(np.float64), "float32"))


def test_a_run_that_took_another_branch_hides_nothing() -> None:
    float64 = np.linspace(1.0, 2.0, 12).reshape(4, 3)
    result = float64.astype(np.float32)
    (allowed,) = allowed_errors([result], [[result], [result + np.float32(0.5)]], [float64])
    assert allowed is not None
    assert allowed.max() < BUDGET * 1e-6

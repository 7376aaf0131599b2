"""The training kernels for GPUs, against the formulas and the kernels for processors.

On a GPU, or in Triton's interpreter (`make test-gpu-training`), which computes with NumPy what the kernels say.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fused_cases import CASES, DELTA, NETWORK, assert_close, assert_seeds_reproduce, by_both, inputs_of, step_of
from sampled import every_second
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nnorm_export import layers
from nnorm_export.layers.fused import cpu, gpu, operator, trial
from nnorm_export.layers.fused.formulas import by_formulas
from nnorm_export.layers.fused.settings import Settings, lists_of
from nnorm_export.layers.fused.triton_kernels.mathematics import exponents, psi
from nnorm_export.layers.fused.triton_kernels.tiles import elements_of_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter would take half a minute for these two. The others divide a set when `small_parts` says so.
LONG = ("channels of long maps", "rows that are not kept")
HERE = [case for case in CASES if case not in LONG or DEVICE == "cuda"]
PARTS: dict[str, tuple[tuple[int, ...], Settings]] = {
    "channels of maps": ((2, 2, 31, 50), Settings(0, 2, 3100, 1e-5, DELTA, noise=0.4)),
    "channels of [N, C]": ((3100, 3), Settings(0, 3, 3100, 1e-5, DELTA, noise=0.4)),
    "rows": ((2, 1500), Settings(1500, 1, 1, 1e-5, DELTA, noise=0.4)),
    "groups": ((1, 4, 27, 60), Settings(3240, 2, 1620, 1e-5, 0.0, order=1, least=-15.0, greatest=17.0, noise=0.4)),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of a test, each by the kernel's name and its stage."""
    launches: list[str] = []
    launch = gpu._launch

    def recorded(kernel: str, *arguments: object, **options: object) -> None:
        launches.append(f"{kernel} {options.get('stage')}")
        launch(kernel, *arguments, **options)  # type: ignore[arg-type]

    assert operator.can_run(torch.ones(1, device=DEVICE))  # the trial, which is not the test's
    monkeypatch.setattr(gpu, "_launch", recorded)
    return launches


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LONGEST_ROW", 1)
    monkeypatch.setattr(gpu, "_LEAST_TILES", 1)


def on_device(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().to(DEVICE).requires_grad_() for tensor in inputs)


@triton.jit
def psi_kernel(h, lmbda, y, count: tl.constexpr):
    place = tl.arange(0, count)
    eta_pos, eta_neg = exponents(tl.load(lmbda + place), 0.0)
    tl.store(y + place, psi(tl.load(h + place), eta_pos, eta_neg))


# The interpreter rounds twice in a multiplication with addition; a GPU's error is a fifth of it.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-6), (torch.float64, 2e-14)], ids=str)
def test_psi_is_within_its_error_bound(dtype: torch.dtype, bound: float) -> None:
    count = 2**16 if DEVICE == "cuda" else 2**14
    sizes = 10.0 ** (torch.rand(count, dtype=torch.float64) * 12 - 7)
    h, lmbda = (sizes * torch.randn(count).sign()).to(dtype), (torch.rand(count, dtype=torch.float64) * 6 - 2).to(dtype)
    h[:4], lmbda[:4] = torch.tensor([0.5, -0.5, 0.0, 1.0]), torch.tensor([0.0, 2.0, 1.0, 1.0])
    y = torch.empty_like(h, device=DEVICE)
    psi_kernel[(1,)](h.to(DEVICE), lmbda.to(DEVICE), y, count)
    wide, exponent = np.longdouble(h.numpy()), np.longdouble(torch.where(h < 0, 2 - lmbda, lmbda).numpy())
    exponent[exponent == 0] = 1e-30
    expected = np.sign(wide) * np.expm1(exponent * np.log1p(abs(wide))) / exponent
    error = abs(np.longdouble(y.cpu().numpy()) - expected) / np.where(expected == 0, 1, abs(expected))
    assert error.max() < bound


@triton.jit
def place_kernel(step, places, offset: tl.constexpr):
    tile: tl.constexpr = (1, 16, 16, 4, False, tl.float32, offset)
    where = (tl.full([1, 1], 2, offset), tl.full([1, 1], True, tl.int1), 0, 0, 2**33)
    _, place, _ = elements_of_step(step, 3, where, (7, 5, 70, 1), tile)
    tl.store(places + tl.arange(0, 16)[None, :], place)


def test_places_beyond_32_bits() -> None:
    step, places = 2**27 + 5, torch.empty(16, dtype=torch.int64, device=DEVICE)
    place_kernel[(1,)](step, places, tl.int64)
    positions = [step // 16 * 1024 + 3 * 256 + step % 16 * 16 + i for i in range(16)]
    assert positions[0] > 2**32
    assert places.tolist() == [2 * 5 + position // 7 * 70 + position % 7 for position in positions]


@pytest.mark.parametrize("case", HERE)
def test_results_and_gradients_are_those_of_the_formulas(case: str, kernels: list[str]) -> None:
    shape, settings = CASES[case]
    assert_close(*by_both(on_device(inputs_of(shape, settings)), settings), 2e-13 if case in LONG else 2e-14)
    assert {launch.split()[0] for launch in kernels} >= {"forward", "backward"}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("case", every_second(PARTS))
def test_a_set_in_several_parts(case: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shape, settings = PARTS[case]
    if case == "channels of maps":
        monkeypatch.setattr(gpu, "_GREATEST_OFFSET", 0)  # as for 2³¹ elements
    assert_close(*by_both(on_device(inputs_of(shape, settings)), settings), 2e-13)  # of sums of thousands of elements
    stages = [launch for launch in kernels if not launch.startswith("draw_noise")]
    assert stages == [*(f"forward {stage}" for stage in range(5)), "backward 0", "backward 1"]


@pytest.mark.parametrize("case", ["channels of maps", "channels of [N, C]", "the paper's form", "rows", "groups"])
def test_float32_is_as_near_as_the_formulas(case: str) -> None:
    shape, settings = CASES[case]
    inputs = on_device(inputs_of(shape, settings))
    _, expected = by_both(inputs, settings)
    found, _ = by_both(tuple(tensor.detach().float().requires_grad_() for tensor in inputs), settings)
    assert_close(tuple(tensor.double() for tensor in found), expected, 2e-5)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["channels of maps", "channels of [N, C]", "rows", "groups"])
def test_statistics_and_noise_are_those_of_the_kernels_for_processors(case: str, dtype: torch.dtype) -> None:
    if not cpu.is_available():
        pytest.skip("the library of training kernels is not installed: NNORM_EXPORT_BUILD_LIBRARY=0")
    seed = torch.tensor(2**62 + 12345)
    for shape, settings in (CASES[case], PARTS[case]) if dtype == torch.float32 else (CASES[case],):
        x = inputs_of(shape, settings, dtype)[0].detach()
        y, statistics = gpu.forward(x.to(DEVICE), None, None, seed.to(DEVICE), settings)
        expected = cpu.forward(x, None, None, seed, settings)
        assert_close((y.cpu(),), (expected[0],), 5e-7 if settings.noise else 1e-14)
        # Two rows hold the rest of a rounded mean, which depends on the order of sums; the third one follows from them.
        rows = [row for row in range(len(statistics)) if row not in (0, 2)]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        assert_close(tuple(statistics.cpu()[rows]), tuple(expected[1][rows]), tolerance)
        z = gpu.noise(x.to(DEVICE), seed.to(DEVICE), settings).cpu()
        assert_close((z,), (cpu.noise(x, seed, settings),), 1e-6)
        assert 0.9 < float(z.std()) < 1.1


@pytest.mark.parametrize(
    ("dtype", "affine"), [(torch.float32, True), (torch.float16, False), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("name", every_second(NETWORK))
def test_layers_train_as_by_the_formulas(
    name: str, affine: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, kernels: list[str]
) -> None:
    build, shape = NETWORK[name]
    key = "elementwise_affine" if name.startswith("layer") else "affine"
    layer = build(noise_train=0.0, **{key: affine}).to(DEVICE)
    x, other = torch.randn(shape, device=DEVICE).to(dtype), copy.deepcopy(layer)
    found = step_of(layer, x)
    assert kernels == ["forward -1", "backward -1"]
    monkeypatch.setattr(operator, "can_run", lambda _: False)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for one, expected in zip(found, step_of(other, x), strict=True):
        torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance)
    assert len(kernels) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3),
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(3, 6, 4, 5),
    ],
    ids=["channels last", "transposed", "sliced", "expanded"],
)
def test_the_layout_of_a_map_changes_neither_result_nor_noise(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.randn(3, 6, 4, 5, device=DEVICE))
    layer = layers.BatchNormalNorm2d(6).to(DEVICE)
    other = copy.deepcopy(layer)
    torch.manual_seed(3)
    found = step_of(layer, x)
    torch.manual_seed(3)
    expected = step_of(other, x.contiguous())
    assert found[0].stride() == torch.empty_like(x).stride()
    for one, same in zip(found, expected, strict=True):
        torch.testing.assert_close(one, same)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_does_not_depend_on_the_other_rows(rows: int) -> None:
    settings = Settings(70, 1, 1, 1e-5, DELTA)
    x, weight, bias = on_device(inputs_of((9, 70), settings, torch.float32))
    y, statistics, _ = operator._forward(x, weight, bias, *lists_of(settings))
    alone, of_alone, _ = operator._forward(x[:rows], weight, bias, *lists_of(settings))
    assert torch.equal(alone, y[:rows])
    assert torch.equal(of_alone, statistics[:, :rows])
    gradients = (torch.autograd.grad(result.sum(), x)[0][:rows] for result in (y, alone))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 0.0])
def test_unusual_values_are_those_of_the_formulas(value: float, standardize: bool) -> None:
    settings = Settings(0, 3, 6, 1e-5, DELTA, standardize=standardize)
    x, weight, bias = inputs_of((6, 3), settings, torch.float32)
    with torch.no_grad():
        x[:, 1] = 4.0
        x[2, 0] = value
    x, weight, bias = on_device((x, weight, bias))
    found, expected = by_both((x, weight, bias), settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_seed_reproduces_a_step_and_nothing_is_drawn_without_noise() -> None:
    x = torch.randn(7, 6, device=DEVICE)
    assert_seeds_reproduce(layers.BatchNormalNorm1d(6).to(DEVICE), x)
    torch.manual_seed(0)
    expected = torch.rand(3, device=DEVICE)
    torch.manual_seed(0)
    step_of(layers.BatchNormalNorm1d(6, noise_train=0.0).to(DEVICE), x)
    assert torch.equal(torch.rand(3, device=DEVICE), expected)


@pytest.mark.parametrize("case", ["channels of [N, C]", "rows"])
def test_second_derivatives(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)
    inputs = on_device(inputs_of((4, *shape[1:]), settings))

    def second(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(each.pow(2).sum() for each in first), inputs)

    found = second(operator.normal_norm(*inputs, settings)[0])
    assert_close(found, second(by_formulas(*inputs, settings, None)), 1e-12)


def test_no_rows() -> None:
    x, weight, bias = on_device(inputs_of((0, 5), Settings(5, 1, 1, 1e-5, DELTA)))
    y, statistics, _ = operator._forward(x, weight, bias, *lists_of(Settings(5, 1, 1, 1e-5, DELTA)))
    assert y.shape == (0, 5)
    assert statistics.shape == (11, 0)
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in torch.autograd.grad(y.sum(), (x, weight, bias)))


def test_the_trial_may_begin_in_any_mode(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = ["forward -1", "backward -1", "draw_noise None"]
    monkeypatch.setattr(trial, "_PROBLEMS", trial._PROBLEMS[1:])
    layer, x = layers.LayerNormalNorm(6, noise_train=0.0).to(DEVICE), torch.randn(3, 6, device=DEVICE)
    expected = step_of(copy.deepcopy(layer), x)
    runs: list[Callable[[Tensor], Tensor]] = [
        torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True),
        lambda x: checkpoint(copy.deepcopy(layer), x, use_reentrant=False),
        lambda x: checkpoint(copy.deepcopy(layer), x, use_reentrant=True),
    ]
    for run in runs:
        monkeypatch.setattr(trial, "_passed", {})
        kernels.clear()
        x = x.detach().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error", category=RuntimeWarning)
            y = run(x)
        assert kernels[: len(tried)] == tried
        torch.testing.assert_close(y, expected[0])
        y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape))
        torch.testing.assert_close(x.grad, expected[1])


def test_transforms_have_no_trial(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_passed", {})
    layer, x = layers.LayerNormalNorm(6, noise_train=0.0).to(DEVICE), torch.randn(3, 6, device=DEVICE)
    torch.func.grad(lambda x: layer(x).pow(2).sum())(x)
    torch.func.vmap(layer)(x)
    torch.export.export(layer, (x,))
    assert kernels == []

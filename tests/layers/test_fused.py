"""The fused operator of training against the formulas and finite differences, by every set of instructions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fused_cases import CASES, DELTA, NETWORK, assert_close, assert_seeds_reproduce, by_both, inputs_of, step_of
from torch import Tensor

from nnorm_export import layers
from nnorm_export.errors import RuntimeMissingError
from nnorm_export.layers.fused import cpu, gpu, library, operator, trial
from nnorm_export.layers.fused.formulas import by_formulas
from nnorm_export.layers.fused.settings import DEVIATION, Settings, lists_of
from nnorm_export.library import TRAINING_FILE_NAME

pytestmark = pytest.mark.skipif(
    not library.is_available(), reason="the library of training kernels is not installed: NNORM_EXPORT_BUILD_LIBRARY=0"
)


@pytest.fixture(params=range(len(library.instruction_sets()) or 1), ids=library.instruction_sets() or ["none"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_chosen", request.param)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_formulas(case: str) -> None:
    shape, settings = CASES[case]
    assert_close(*by_both(inputs_of(shape, settings), settings), 2e-14)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", CASES)
def test_float32_is_as_near_as_the_formulas(case: str) -> None:
    shape, settings = CASES[case]
    inputs = inputs_of(shape, settings)
    y, *expected = by_both(inputs, settings)[1]
    narrow = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)
    found = by_both(narrow, settings)[0]
    assert_close(tuple(tensor.double() for tensor in found), (y, *expected), 2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("rows that are not kept", "a narrow range")])
def test_finite_differences(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)  # no gradient flows through the scale of the noise

    def run(*tensors: Tensor) -> Tensor:
        return operator.normal_norm(*tensors, settings)[0]

    assert torch.autograd.gradcheck(run, inputs_of(shape, settings), fast_mode=True)


@pytest.mark.parametrize("case", ["channels of [N, C]", "gradient step", "rows", "groups"])
def test_second_derivatives(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)

    def run(*tensors: Tensor) -> Tensor:
        return operator.normal_norm(*tensors, settings)[0]

    assert torch.autograd.gradgradcheck(run, inputs_of(shape, settings), fast_mode=True)


@pytest.mark.parametrize("case", ["channels of [N, C]", "rows", "groups"])
def test_third_derivatives(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)
    inputs = inputs_of(shape, settings)

    def third(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(each.pow(2).sum() for each in first), inputs, create_graph=True)
        return torch.autograd.grad(sum(each.pow(2).sum() for each in second), inputs)

    found = third(operator.normal_norm(*inputs, settings)[0])
    assert_close(found, third(by_formulas(*inputs, settings, None)), 1e-12)


@pytest.mark.parametrize("variant", ["reference", "paper"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NETWORK)
def test_layers_train_as_by_the_formulas(
    name: str, affine: bool, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = NETWORK[name]
    key = "elementwise_affine" if name.startswith("layer") else "affine"
    layer = build(noise_train=0.0, dtype=torch.float64, variant=variant, **{key: affine})
    x, other = torch.randn(shape, dtype=torch.float64), copy.deepcopy(layer)
    calls: list[Settings] = []
    normal_norm = operator.normal_norm
    monkeypatch.setattr(operator, "normal_norm", lambda *args: (calls.append(args[-1]), normal_norm(*args))[1])
    found = step_of(layer, x)
    assert len(calls) == 1
    monkeypatch.setattr(operator, "can_run", lambda _: False)
    for one, expected in zip(found, step_of(other, x), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORK)
def test_half_inputs_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    build, shape = NETWORK[name]
    layer, x = build(noise_train=0.0), torch.randn(shape).to(dtype)
    other = copy.deepcopy(layer)
    y, gradient, *rest = step_of(layer, x)
    expected, wide, *of_float = step_of(other, x.float())
    assert (y.dtype, gradient.dtype) == (dtype, dtype)
    torch.testing.assert_close(y, expected.to(dtype))
    torch.testing.assert_close(gradient.float(), wide, rtol=1e-2, atol=1e-2)
    assert all(tensor.dtype == same.dtype for tensor, same in zip(rest, of_float, strict=True))


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


# Each makes another layout of a tensor. Those of [N, C, L] with L = 1 are [N, C].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "channels last": _channels_last,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a slice of channels": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "a slice of samples": lambda x: _channels_last(x.repeat_interleave(2, 0))[::2],
    "a slice of elements, channels last": lambda x: _channels_last(x.repeat_interleave(2, -1))[..., ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 6, 4, 5), (2, 35, 2, 3, 4), (5, 17, 9), (37, 33)])
@pytest.mark.parametrize("of_gradient", ["contiguous", "channels last"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_changes_no_bit(layout: str, of_gradient: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    settings = Settings(0, shape[1], 1, 1e-5, DELTA, noise=0.4)
    x, weight, bias = inputs_of(shape, settings, dtype)
    upstream = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(shape).to(dtype)
    # Elements in the same order, one channel after the other in memory.
    reference = x.detach().movedim(1, 0).reshape(1, shape[1], -1).requires_grad_()
    other = LAYOUTS[layout](x.detach()).requires_grad_()
    results = []
    for of_x, gradient in ((reference, upstream.movedim(1, 0)), (other, LAYOUTS[of_gradient](upstream))):
        torch.manual_seed(3)
        y, statistics, seed = operator._forward(of_x, weight, bias, *lists_of(settings))
        gradients = torch.autograd.grad(y, (of_x, weight, bias), gradient.reshape(y.shape))
        results.append((y, gradients[0], operator.noise_of(of_x.detach(), settings, seed), statistics, *gradients[1:]))
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert found is not None
        of_same_shape = expected.reshape(found.movedim(1, 0).shape).movedim(0, 1) if found.shape == shape else expected
        assert torch.equal(found, of_same_shape)
    assert all(tensor.stride() == torch.empty_like(other).stride() for tensor in results[1][:3] if tensor is not None)


@pytest.mark.parametrize(
    "make", [lambda x: x.transpose(2, 3), lambda x: x[..., ::2], lambda x: x[:1].expand(3, 6, 4, 5)]
)
def test_inputs_that_are_not_dense(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.randn(3, 6, 4, 5))
    layer = layers.BatchNormalNorm2d(6, noise_train=0.0)
    other = copy.deepcopy(layer)
    for one, same in zip(step_of(layer, x), step_of(other, x.contiguous()), strict=True):
        torch.testing.assert_close(one, same)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("channels", [9, 35])  # less than a cache line, and more than two
def test_the_number_of_threads_changes_no_bit(channels: int, layout: str) -> None:
    settings = Settings(0, channels, 4900, 1e-5, DELTA, noise=0.4)
    x, *parameters = inputs_of((4, channels, 35, 35), settings, torch.float32)
    inputs = (LAYOUTS[layout](x.detach()).requires_grad_(), *parameters)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            torch.manual_seed(0)
            y = operator.normal_norm(*inputs, settings)[0]
            results.append((y, *torch.autograd.grad(y, inputs, torch.ones_like(y))))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for one, same in zip(result, results[0], strict=True):
            assert torch.equal(one, same)


def test_noise_is_standard_normal_and_the_same_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, seed = Settings(0, 2, 1, 1e-5, DELTA, noise=0.4), torch.tensor(2**62 + 5)
    drawn = []
    for number in range(len(library.instruction_sets())):
        monkeypatch.setattr(library, "_chosen", number)
        drawn.append(operator.noise_of(torch.empty(4, 2, 250, 100), settings, seed))
    z = drawn[0]
    assert z is not None
    assert all(other is not None and torch.equal(other, z) for other in drawn)
    narrow, wide = z.double(), operator.noise_of(torch.empty(4, 2, 250, 100, dtype=torch.float64), settings, seed)
    assert wide is not None
    assert torch.equal(narrow, wide)
    # Within five standard errors of 200,000 samples.
    errors = torch.tensor([1.0, 2.0, 15.0, 96.0], dtype=torch.float64).div(narrow.numel()).sqrt()
    moments = torch.stack([narrow.pow(power).mean() for power in (1, 2, 3, 4)])
    assert ((moments - torch.tensor([0.0, 1.0, 0.0, 3.0])).abs() < 5 * errors).all()
    assert len(narrow.unique()) > 0.99 * narrow.numel()
    flat = narrow.flatten()
    for lag in (1, 2, 4, 256, 512, 1024, 50_000):
        assert abs(float((flat[:-lag] * flat[lag:]).mean())) < 5 / len(flat) ** 0.5


@pytest.mark.usefixtures("instruction_set")
def test_the_scale_of_the_noise_does_not_count_without_noise() -> None:
    settings, seed = Settings(0, 3, 1, 1e-5, DELTA, deviation=True), torch.tensor(0)
    x, gradient = torch.randn(5, 3, 7), torch.randn(5, 3, 7)
    _, statistics = cpu.forward(x, None, None, seed, settings)
    expected = cpu.backward(gradient, x, None, statistics, seed, settings)
    statistics[DEVIATION] = torch.inf  # as that of values whose sum is infinite
    for found, same in zip(cpu.backward(gradient, x, None, statistics, seed, settings), expected, strict=True):
        assert torch.equal(found, same)


def test_a_seed_reproduces_a_step() -> None:
    assert_seeds_reproduce(layers.BatchNormalNorm2d(6), torch.randn(3, 6, 4, 5))


def test_what_is_kept_for_the_backward_pass() -> None:
    """x, the weight, and 11 numbers of each channel: no other tensor of the size of x."""
    kept: list[Tensor] = []
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layers.BatchNormalNorm2d(3)(x)
    assert sum(tensor.numel() >= x.numel() for tensor in kept) == 1
    assert sum(tensor.numel() for tensor in kept) < x.numel() + 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch2d", "layer"])
def test_compiled_training_has_one_node(name: str) -> None:
    build, shape = NETWORK[name]
    layer, x = build(noise_train=0.0), torch.randn(shape)
    other = copy.deepcopy(layer)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one, same in zip(step_of(compiled, x), step_of(other, x), strict=True):
        torch.testing.assert_close(one, same)
    torch.compile(copy.deepcopy(other), backend=backend, fullgraph=True)(x)
    assert graphs[0].count("nnorm_export.normal_norm") == 1
    assert "log1p" not in graphs[0]


class Doubled(layers.LayerNormalNorm):
    def _transform(self, h: Tensor, lmbda: Tensor) -> Tensor:
        return 2 * super()._transform(h, lmbda)


class Doubling:
    _transform = Doubled._transform


class WithMixin(Doubling, layers.LayerNormalNorm):
    pass


class OfBoth(layers.LayerNormalNorm, Doubling):  # the layer's own method is first
    pass


class OfDoubled(Doubled):
    pass


class Named(layers.LayerNormalNorm):
    def extra_repr(self) -> str:
        return "named"


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *((cls, "AddBackward0") for cls in (Doubled, WithMixin, OfDoubled)),
        *((cls, "normal_norm") for cls in (OfBoth, Named, layers.LayerNormalNorm)),
    ],
)
def test_a_class_that_changes_the_formulas_runs_by_them(cls: type[layers.LayerNormalNorm], name: str) -> None:
    assert name in type(cls(6)(torch.randn(4, 6)).grad_fn).__name__


def test_a_range_keeps_the_running_lmbda_from_sets_that_are_not_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layers.BatchNormalNorm1d(2, eps=0.0, noise_train=0.0)  # eps 0: the paper's form, which has a range
    other, x = copy.deepcopy(layer), torch.stack([torch.full((5,), 3.0), torch.arange(5.0)], 1)
    found = layer(x)
    monkeypatch.setattr(operator, "can_run", lambda _: False)
    torch.testing.assert_close(found, other(x), equal_nan=True)
    torch.testing.assert_close(layer.running_lmbda, other.running_lmbda)
    assert layer.running_lmbda.isfinite().all()


def test_eval_mode_and_traced_programs_have_the_formulas_operators() -> None:
    layer, x = layers.LayerNormalNorm(6), torch.randn(4, 6)
    program = torch.export.export(layer, (x,))  # in training mode
    assert not any("nnorm_export" in str(node.target) for node in program.graph.nodes)
    y = layer.eval()(x.requires_grad_())
    assert "nnorm_export" not in type(y.grad_fn).__name__


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("libnnorm_ort.so", TRAINING_FILE_NAME):
        (tmp_path / name).write_bytes(b"not a library")
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", str(tmp_path / "libnnorm_ort.so"))
    with pytest.raises(RuntimeMissingError, match=r"cannot be loaded: .*NNORM_EXPORT_LIBRARY=none"):
        library._library.__wrapped__()
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    assert library._library.__wrapped__() is None


def test_a_trial_finds_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert trial.passes_trial(cpu, device)
    for name, wrong, message in (
        ("backward", lambda *args: [1.001 * each for each in cpu.backward(*args)], "they differ by 0.001 of"),
        ("noise", lambda x, *_: x * float("nan"), "they differ by inf of"),
        ("forward", lambda *_: torch.ones(2).view(3), "RuntimeError: shape"),
    ):
        kernels = ModuleType("kernels")
        vars(kernels).update({each: getattr(cpu, each) for each in ("forward", "backward", "noise")} | {name: wrong})
        with pytest.warns(RuntimeWarning, match=f"failed their trial: {message}.*NNORM_EXPORT_LIBRARY=none"):
            assert not trial.passes_trial(kernels, device)
        assert not trial.passes_trial(kernels, device)  # once is enough
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(RuntimeWarning, match="a CUDA graph is captured"):
        assert not trial.passes_trial(ModuleType("kernels"), torch.device("cuda", 0))


@pytest.mark.parametrize(("version", "enough"), [("3.3.1", False), ("3.4.0", True), ("4.0.0", True), (None, False)])
def test_the_kernels_for_gpus_need_a_triton(version: str | None, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", version and SimpleNamespace(__version__=version, __spec__=version))
    assert gpu.is_available.__wrapped__() == enough
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    assert not gpu.is_available.__wrapped__()

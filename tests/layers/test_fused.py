"""The fused operator of training against the formulas and finite differences, by every set of instructions."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from nnorm_export import layers
from nnorm_export.layers.fused import library, operator
from nnorm_export.layers.fused.operator import Settings

pytestmark = pytest.mark.skipif(
    not library.is_available(), reason="the library of training kernels is not installed: NNORM_EXPORT_BUILD_LIBRARY=0"
)

DELTA = 1e-5**0.5
# name -> shape of x, settings. Awkward sizes: sets of one tile, of several, of more than is kept, of runs across tiles.
CASES: dict[str, tuple[tuple[int, ...], Settings]] = {
    "channels of maps": ((3, 5, 6, 9), Settings(0, 5, 162, 1e-5, DELTA, noise=0.4)),
    "channels of [N, C]": ((33, 19), Settings(0, 19, 33, 1e-5, DELTA, noise=0.4)),
    "channels of long maps": ((2, 2, 91, 97), Settings(0, 2, 17654, 1e-5, DELTA, noise=0.4)),
    "one channel of two values": ((2, 1), Settings(0, 1, 2, 1e-5, DELTA)),
    "gradient step": ((3, 5, 6), Settings(0, 5, 18, 1e-5, DELTA, order=1, alpha=0.7, noise=0.4)),
    "half a Newton step": ((3, 5, 6), Settings(0, 5, 18, 1e-5, DELTA, alpha=0.5)),
    "not standardized": ((4, 3, 5), Settings(0, 3, 20, 1e-5, DELTA, standardize=False, noise=0.4)),
    "the paper's form": ((5, 3, 4), Settings(0, 3, 20, 1e-5, 0.0, least=-15.0, greatest=17.0, noise=0.4)),
    "a narrow range": ((5, 3, 4), Settings(0, 3, 20, 1e-5, DELTA, least=0.95, greatest=1.02)),
    "rows": ((30, 19), Settings(19, 1, 1, 1e-5, DELTA, noise=1.0)),
    "rows of one": ((3, 1), Settings(1, 1, 1, 1e-5, DELTA)),
    "rows of several tiles": ((2, 3, 1500), Settings(1500, 1, 1, 1e-5, DELTA, noise=1.0)),
    "rows that are not kept": ((2, 17001), Settings(17001, 1, 1, 1e-5, 0.0)),
    "groups": ((3, 8, 5, 5), Settings(100, 2, 25, 1e-5, DELTA, noise=0.4)),
    "instances": ((3, 8, 45), Settings(45, 8, 45, 1e-5, DELTA, noise=0.4)),
}


@pytest.fixture(params=range(len(library.instruction_sets()) or 1), ids=library.instruction_sets() or ["none"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_chosen", request.param)


def _inputs(shape: tuple[int, ...], settings: Settings, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype) * 1.7 + 0.3
    weights = settings.period * (settings.length // settings.run) if settings.length else shape[1]
    parameters = torch.rand(weights, dtype=dtype) + 0.5, torch.randn(weights, dtype=dtype)
    return tuple(tensor.requires_grad_() for tensor in (x, *parameters))


def _both(inputs: tuple[Tensor, ...], settings: Settings) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """y and the gradients of the inputs, by the operator and by the formulas with the same noise."""
    torch.manual_seed(1)  # of the noise
    y, _, seed = operator._forward(*inputs, *settings)
    expected = operator.formula(*inputs, settings, operator.noise_of(inputs[0].detach(), settings, seed))
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().to(y.dtype).reshape(y.shape)
    return (y, *torch.autograd.grad(y, inputs, upstream)), (expected, *torch.autograd.grad(expected, inputs, upstream))


def _assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance * max(1.0, float(other.detach().abs().max())))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_formulas(case: str) -> None:
    shape, settings = CASES[case]
    _assert_close(*_both(_inputs(shape, settings), settings), 2e-14)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", CASES)
def test_float32_is_as_near_as_the_formulas(case: str) -> None:
    shape, settings = CASES[case]
    inputs = _inputs(shape, settings)
    y, *expected = _both(inputs, settings)[1]
    narrow = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)
    found = _both(narrow, settings)[0]
    _assert_close(tuple(tensor.double() for tensor in found), (y, *expected), 2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("rows that are not kept", "a narrow range")])
def test_finite_differences(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)  # no gradient flows through the scale of the noise

    def run(*tensors: Tensor) -> Tensor:
        return operator.normal_norm(*tensors, settings)[0]

    assert torch.autograd.gradcheck(run, _inputs(shape, settings), fast_mode=True)


@pytest.mark.parametrize("case", ["channels of [N, C]", "gradient step", "rows", "groups"])
def test_second_derivatives(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)

    def run(*tensors: Tensor) -> Tensor:
        return operator.normal_norm(*tensors, settings)[0]

    assert torch.autograd.gradgradcheck(run, _inputs(shape, settings), fast_mode=True)


@pytest.mark.parametrize("case", ["channels of [N, C]", "rows", "groups"])
def test_third_derivatives(case: str) -> None:
    shape, settings = CASES[case]
    settings = settings._replace(noise=0.0)
    inputs = _inputs(shape, settings)

    def third(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(each.pow(2).sum() for each in first), inputs, create_graph=True)
        return torch.autograd.grad(sum(each.pow(2).sum() for each in second), inputs)

    found = third(operator.normal_norm(*inputs, settings)[0])
    _assert_close(found, third(operator.formula(*inputs, settings, None)), 1e-12)


NETWORK: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "batch1d": (lambda **options: layers.BatchNormalNorm1d(6, **options), (7, 6)),
    "batch1d of sequences": (lambda **options: layers.BatchNormalNorm1d(6, **options), (7, 6, 5)),
    "batch2d": (lambda **options: layers.BatchNormalNorm2d(6, **options), (7, 6, 4, 5)),
    "batch3d": (lambda **options: layers.BatchNormalNorm3d(6, **options), (2, 6, 2, 3, 4)),
    "layer": (lambda **options: layers.LayerNormalNorm((4, 5), **options), (7, 6, 4, 5)),
    "group": (lambda **options: layers.GroupNormalNorm(6, 3, **options), (7, 6, 4, 5)),
    "instance": (lambda **options: layers.InstanceNormalNorm2d(6, **options), (7, 6, 4, 5)),
    "instance without a batch": (lambda **options: layers.InstanceNormalNorm2d(6, **options), (6, 4, 5)),
}


def _step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """y, the gradients and the buffers after a step."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None), *layer.buffers()]


@pytest.mark.parametrize("variant", ["reference", "paper"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NETWORK)
def test_layers_train_as_by_the_formulas(
    name: str, affine: bool, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = NETWORK[name]
    key = "elementwise_affine" if name == "layer" else "affine"
    layer = build(noise_train=0.0, dtype=torch.float64, variant=variant, **{key: affine})
    x, other = torch.randn(shape, dtype=torch.float64), copy.deepcopy(layer)
    calls: list[Settings] = []
    normal_norm = operator.normal_norm
    monkeypatch.setattr(operator, "normal_norm", lambda *args: (calls.append(args[-1]), normal_norm(*args))[1])
    found = _step(layer, x)
    assert len(calls) == 1
    monkeypatch.setattr(operator, "can_run", lambda _: False)
    for one, expected in zip(found, _step(other, x), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORK)
def test_half_inputs_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    build, shape = NETWORK[name]
    layer, x = build(noise_train=0.0), torch.randn(shape).to(dtype)
    other = copy.deepcopy(layer)
    y, gradient, *rest = _step(layer, x)
    expected, wide, *of_float = _step(other, x.float())
    assert (y.dtype, gradient.dtype) == (dtype, dtype)
    torch.testing.assert_close(y, expected.to(dtype))
    torch.testing.assert_close(gradient.float(), wide, rtol=1e-2, atol=1e-2)
    assert all(tensor.dtype == same.dtype for tensor, same in zip(rest, of_float, strict=True))


@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
def test_the_layout_of_a_map_changes_neither_result_nor_noise(form: torch.memory_format) -> None:
    x = torch.randn(3, 6, 4, 5)
    layer = layers.BatchNormalNorm2d(6)
    other = copy.deepcopy(layer)
    torch.manual_seed(3)
    expected = _step(layer, x)
    torch.manual_seed(3)
    found = _step(other, x.contiguous(memory_format=form))
    assert found[0].is_contiguous(memory_format=form)
    for one, same in zip(found, expected, strict=True):
        torch.testing.assert_close(one, same)


@pytest.mark.parametrize(
    "make", [lambda x: x.transpose(2, 3), lambda x: x[..., ::2], lambda x: x[:1].expand(3, 6, 4, 5)]
)
def test_inputs_that_are_not_dense(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.randn(3, 6, 4, 5))
    layer = layers.BatchNormalNorm2d(6, noise_train=0.0)
    other = copy.deepcopy(layer)
    for one, same in zip(_step(layer, x), _step(other, x.contiguous()), strict=True):
        torch.testing.assert_close(one, same)


def test_the_number_of_threads_changes_no_bit() -> None:
    settings = Settings(0, 9, 4900, 1e-5, DELTA, noise=0.4)
    inputs = _inputs((4, 9, 35, 35), settings, torch.float32)
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_pass_ends_its_threads_first(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, began, ended = threading.get_ident(), threading.Event(), []

    def part(*_: Any) -> int:
        if threading.get_ident() == caller:
            began.wait(10)
            raise error
        began.set()
        time.sleep(0.05)
        ended.append(True)
        return 0

    monkeypatch.setattr(library, "_library", lambda: SimpleNamespace(nnorm_training_run=part))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    problem = library.Problem(sets=64, segments=1, segment_length=1024, parts=16)
    with pytest.raises(error):
        library.run(problem, torch.float32, library.Pass.FORWARD)
    assert ended == [True]  # the part that it had begun, and no other


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


def test_a_seed_reproduces_a_step() -> None:
    layer, x = layers.BatchNormalNorm2d(6), torch.randn(3, 6, 4, 5)
    steps = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        steps.append(_step(copy.deepcopy(layer), x))
    assert all(torch.equal(one, other) for one, other in zip(steps[0], steps[1], strict=True))
    assert not torch.equal(steps[0][0], steps[2][0])


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


@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad"])
def test_transforms_of_functions_take_the_formulas(transform: str) -> None:
    layer = layers.LayerNormalNorm(6, noise_train=0.0, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    state = dict(layer.named_parameters())

    def loss(x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, state, (x,))
        return y.pow(3).sum()

    expected = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
    if transform == "jvp":
        _, slope = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(slope, expected.sum())
    elif transform == "grad":
        torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    else:
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_transforms_of_functions_of_the_parameters_take_the_formulas(
    transform: Callable[..., Any], compiled: bool
) -> None:
    layer, x = layers.LayerNormalNorm(6, noise_train=0.0, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    state = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(state: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, state, (x,))
        return y.pow(3).sum()

    run = transform(loss)
    found = (torch.compile(run, backend="eager") if compiled else run)(state)["weight"]
    y = layer(x).detach()  # weight 1, bias 0
    by_hand = 3 * y.pow(3).sum(0)
    if transform is torch.func.hessian:
        found, by_hand = found["weight"], torch.diag(2 * by_hand)
    torch.testing.assert_close(found, by_hand)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"), [("batch2d", (0,)), ("batch2d", (0, 2, 3)), ("group", (0, 2, 3)), ("instance", (0, 2, 3))]
)
def test_compiled_training_keeps_sizes_dynamic(name: str, axes: tuple[int, ...]) -> None:
    layer = NETWORK[name][0](noise_train=0.0)
    other, counter = copy.deepcopy(layer), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for samples, height, width in ((7, 4, 5), (9, 8, 7), (3, 11, 12)):
        x = torch.randn(samples, 6, *((height, width) if 2 in axes else (4, 5)), requires_grad=True)
        for axis in axes:
            torch._dynamo.mark_dynamic(x, axis)
        found, expected = (torch.autograd.grad(each(x).pow(3).sum(), x)[0] for each in (compiled, other))
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["channels of maps", "rows"])
def test_pytorch_accepts_the_operators(case: str) -> None:
    shape, settings = CASES[case]
    inputs = _inputs(shape, settings, torch.float32)
    y, statistics, seed = operator._forward(*inputs, *settings)
    torch.library.opcheck(operator._forward, (*inputs, *settings))
    backward = (torch.randn_like(y, requires_grad=True), *inputs[:2], statistics, seed)
    numbers = [float(value) for value in settings[operator._SIZES :]]
    torch.library.opcheck(operator._backward, (*backward, settings[: operator._SIZES], numbers))
    torch.library.opcheck(operator._noise, (y.detach(), seed, settings[: operator._SIZES]))


@pytest.mark.parametrize("name", ["batch2d", "layer", "group", "instance"])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_parameters_of_another_size_or_device_are_refused(name: str, which: str) -> None:
    build, shape = NETWORK[name]
    for wrong in (torch.ones(3), torch.ones(getattr(build(), which).shape, device="meta")):
        layer = build()
        setattr(layer, which, nn.Parameter(wrong))
        with pytest.raises(RuntimeError, match=r"must have [0-9]+ elements on the device of the input, cpu, got"):
            layer(torch.randn(shape))


class Distributed(Tensor):
    """A tensor that knows the operators of PyTorch alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "aten", func
        with no_dispatch():
            return func(*args, **(kwargs or {}))


def test_other_classes_of_tensors_take_the_formulas() -> None:
    layer, x = layers.LayerNormalNorm(6, noise_train=0.0), torch.randn(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(layer(x.as_subclass(Distributed)), layer(x))


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
    for one, same in zip(_step(compiled, x), _step(other, x), strict=True):
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


OLDEST = """
import torch
custom_op = torch.library.custom_op
def of_2_6(name, fn=None, /, *, mutates_args, device_types=None, schema=None):
    return custom_op(name, fn, mutates_args=mutates_args, device_types=device_types, schema=schema)
torch.library.custom_op = of_2_6
is_exporting = torch.compiler.is_exporting
del torch.compiler.is_exporting
from nnorm_export import layers
torch.compiler.is_exporting = is_exporting  # for the compiler of this version
layer, x = layers.LayerNormalNorm(6, noise_train=0.0), torch.randn(4, 6)
y = layer(x)
assert "normal_norm" in y.grad_fn.name()
torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), y)
"""


@pytest.mark.slow
def test_pytorch_2_6_has_fewer_arguments() -> None:
    subprocess.run([sys.executable, "-c", OLDEST], check=True)

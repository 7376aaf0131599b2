"""The fused operator of training in transforms, compiled graphs, threads and older versions of PyTorch."""

from __future__ import annotations

import copy
import ctypes
import os
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
from fused_cases import CASES, NETWORK, inputs_of, step_of
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from nnorm_export import layers
from nnorm_export.layers.fused import cpu, library, operator
from nnorm_export.layers.fused.settings import lists_of

pytestmark = pytest.mark.skipif(
    not library.is_available(), reason="the library of training kernels is not installed: NNORM_EXPORT_BUILD_LIBRARY=0"
)


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

    monkeypatch.setattr(library, "team_of_pytorch", lambda: None)
    monkeypatch.setattr(library, "_library", lambda: SimpleNamespace(nnorm_training_run=part))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    problem = library.Problem(sets=64, segments=1, segment_length=1024, parts=16)
    with pytest.raises(error):
        library.run(problem, torch.float32, library.Pass.FORWARD)
    assert ended == [True]  # the part that it had begun, and no other


@pytest.mark.parametrize("has_team", [True, False])
def test_a_pass_runs_in_the_threads_of_pytorch_or_of_the_pool(has_team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    team, asked = library.team_of_pytorch(), []
    if has_team and team is None:
        pytest.skip("this PyTorch runs its threads without OpenMP, so that the kernels cannot run in them")
    work, new_pool = (
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint),
        library._pool,
    )

    @work
    def counted(function: int, data: int, threads: int, flags: int) -> None:
        asked.append(("team", threads))
        work(team)(function, data, threads, flags)

    address = ctypes.cast(counted, ctypes.c_void_p).value
    monkeypatch.setattr(library, "team_of_pytorch", lambda: address if has_team else None)
    monkeypatch.setattr(library, "_pool", lambda threads: (asked.append(("pool", threads)), new_pool(threads))[1])
    layer, x = layers.BatchNormalNorm2d(70), torch.randn(4, 70, 16, 16)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            torch.manual_seed(1)
            results.append(layer(x))
    finally:
        torch.set_num_threads(threads)
    # 0: all threads, as in PyTorch's operators. The pool is asked for each thread beside the caller's.
    assert asked == ([("team", 0)] if has_team else [("pool", 3)] * 2)
    assert torch.equal(*results)


FORKED = """
import os, signal
import torch
from nnorm_export import layers
torch.set_num_threads(2)
layer, x = layers.LayerNormalNorm(64), torch.randn(1024, 64)
torch.manual_seed(1)
expected = layer(x).detach().numpy().tobytes()
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that waits for threads that it does not have, as PyTorch's own operators do
    torch.manual_seed(1)
    os._exit(0 if layer(x).detach().numpy().tobytes() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork a process")
def test_a_process_that_is_forked_after_a_pass_has_threads_too() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True)


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
def test_a_compiled_network_copies_no_map_for_its_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch was built without oneDNN, so that torch.compile leaves the layout of maps as it is")
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), layers.BatchNormalNorm2d(8, noise_train=0.0), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), layers.BatchNormalNorm2d(8, noise_train=0.0)),
    )
    other, x, strides = copy.deepcopy(network), torch.randn(2, 3, 8, 8), []
    for name, index in (("forward", 0), ("backward", 1)):
        run = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda *args, run=run, index=index: (strides.append(args[index].stride()), run(*args))[1]
        )
    found = step_of(torch.compile(network, fullgraph=True), x)
    assert [stride[1] for stride in strides] == [1, 1, 1, 1]
    for one, same in zip(found, step_of(other, x), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["channels of maps", "rows"])
def test_pytorch_accepts_the_operators(case: str) -> None:
    shape, settings = CASES[case]
    inputs = inputs_of(shape, settings, torch.float32)
    y, statistics, seed = operator._forward(*inputs, *lists_of(settings))
    torch.library.opcheck(operator._forward, (*inputs, *lists_of(settings)))
    backward = (torch.randn_like(y, requires_grad=True), *inputs[:2], statistics, seed)
    torch.library.opcheck(operator._backward, (*backward, *lists_of(settings)))
    torch.library.opcheck(operator._noise, (y.detach(), seed, lists_of(settings)[0]))


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

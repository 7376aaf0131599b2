"""The training kernels for GPUs compile for NVIDIA's and AMD's GPUs, which Triton does without one.

Python binds the arguments as for a launch, so that the types of numbers and the constants are those of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from fused_cases import DELTA
from triton.backends.compiler import GPUTarget

from nnorm_export.layers.fused import gpu, triton_kernels
from nnorm_export.layers.fused.settings import Settings, weights_of

pytestmark = pytest.mark.slow
TARGETS = {"sm_75": ("cuda", 75, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
MAPS = Settings(0, 64, 1, 1e-5, DELTA, noise=0.4)
PROBLEMS: dict[str, tuple[torch.Tensor, Settings]] = {
    "maps": (torch.empty(32, 64, 28, 28), MAPS),
    "maps, channels last, bfloat16": (
        torch.empty(32, 64, 28, 28, dtype=torch.bfloat16).to(memory_format=torch.channels_last), MAPS),
    "rows": (torch.empty(512, 768), Settings(768, 1, 1, 1e-5, DELTA, noise=0.4)),
    "groups, float16": (torch.empty(4, 64, 8, 8, dtype=torch.float16), Settings(512, 8, 64, 1e-5, DELTA)),
    "rows, float64": (
        torch.empty(8, 64, dtype=torch.float64), Settings(64, 1, 1, 1e-5, 0.0, least=-15.0, greatest=17.0)),
    "one number": (torch.empty(1, 1), Settings(0, 1, 1, 1e-5, DELTA, noise=0.4)),
}  # fmt: skip


class _Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.target)  # Triton keeps the target of a device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget(*TARGETS[self.target])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """The kernels of a test, compiled instead of launched."""
    found: list[Any] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.kernel = getattr(triton_kernels, name)

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *tensors, **options: found.append(self.kernel.warmup(*tensors, grid=grid, **options))

    for name in ("forward", "backward", "draw_noise"):
        monkeypatch.setattr(triton_kernels, name, Kernel(name))
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(request.node.callspec.params["target"]))
    yield found
    triton.runtime.driver._active = active


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        *(("sm_90", problem) for problem in PROBLEMS),
        *(("sm_75", "maps"), ("gfx942", "rows")),
    ],
)
def test_kernels_compile(target: str, problem: str, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, settings = PROBLEMS[problem]
    if target == "sm_75":
        monkeypatch.setattr(gpu, "_GREATEST_OFFSET", 0)  # as for 2³¹ elements
    weight = None if x.dtype == torch.float64 else torch.empty(weights_of(x, settings))
    seed = torch.zeros((), dtype=torch.int64)
    _, statistics = gpu.forward(x, weight, weight, seed, settings)
    gpu.backward(x, x, weight, statistics, seed, settings)
    gpu.noise(x, seed, settings)
    assert len(compiled) == (8 if problem.startswith("maps") else 3)
    for kernel in compiled:
        code = "cubin" if target.startswith("sm") else "hsaco"
        assert len(kernel.asm[code]) > 1000
        text = kernel.asm["ttir"]
        arguments = next(line for line in text.splitlines() if "tt.func public" in line)
        # The numbers of the settings keep their digits.
        assert arguments.count(": f64") == {"forward": 6, "backward": 2, "draw_noise": 0}[kernel.metadata.name]
        if x.dtype != torch.float64:
            assert "math.log" not in text  # in float32, logarithm and power are the package's own
            assert "math.exp" not in text

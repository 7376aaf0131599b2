"""The speed of an optimized file: two files take turns on the same inputs, a few times where they are slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nnorm_export.optimizing import speed
from nnorm_export.runtimes import TensorInfo

GIVEN = np.ones((5, 3), np.float32)


class Runner:
    """A file whose call takes some seconds."""

    inputs = (TensorInfo("x", np.dtype(np.float32), ("batch", 3)),)
    least_batch = ""

    def __init__(self, path: str, clock: Clock, seconds: float) -> None:
        self.path, self.clock, self.seconds = path, clock, seconds
        self.lengths: dict[str, Any] = {}

    def __call__(self, x: Any) -> None:
        self.clock.ran.append((self.path, x.shape))
        self.clock.now += self.seconds


class Clock:
    """Time that passes only while a file runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[tuple[str, tuple[int, ...]]] = []

    def opened(self, seconds: dict[str, float], options: list[Any]) -> Any:
        def load(path: str, **given: Any) -> Any:
            options.append(given)

            return Runner(path, self, seconds[path])

        return load


@pytest.mark.parametrize(
    ("seconds", "turns"), [(1e-3, 50), (0.05, 7), (9.0, 3)], ids=["quick", "until the time is over", "slow"]
)
@pytest.mark.parametrize(("inputs", "rows"), [(None, 8), ((GIVEN,), 5), ({"x": GIVEN}, 5)])
def test_files_take_turns(seconds: float, turns: int, inputs: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, options = Clock(), []
    monkeypatch.setattr(speed, "load", clock.opened({"a.onnx": 2 * seconds, "b.onnx": seconds}, options))
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    measured = speed.speed_of("b.onnx", "a.onnx", inputs)
    assert clock.ran == [("a.onnx", (rows, 3)), ("b.onnx", (rows, 3))] * (1 + turns)
    assert options == [{"intra_op_num_threads": 1}] * 2
    assert (measured.turns, measured.inputs) == (turns, {"x": [rows, 3]})
    assert measured.ratio == pytest.approx(2)
    assert (measured.original_ms, measured.optimized_ms) == pytest.approx((2000 * seconds, 1000 * seconds))
    assert str(measured).startswith(f"2.00 × as fast as the original, {1000 * seconds:.3g} ms for ")
    assert str(measured).endswith(f"(x [{rows}, 3]; one thread; {measured.processor})")

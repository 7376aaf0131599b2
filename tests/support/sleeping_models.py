"""Models that sleep, whose time is known: what a service of them does follows by hand."""

from __future__ import annotations

import time

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.runtimes import Runner

F = np.dtype(np.float32)
FEED = {"x": np.arange(21, dtype=F).reshape(7, 3)}
ROWS = [{"x": FEED["x"][[row]]} for row in range(7)]


class Sleeping(Runner):
    """y = 2·x after a sleep."""

    runtime = "sleep"

    def __init__(self, fixed: float = 0.002, each: float = 0.0005, axes: tuple[int | str, str] = ("n", "n")) -> None:
        self.inputs, self.outputs = [TensorInfo("x", F, (axes[0], 3))], [TensorInfo("y", F, (axes[1], 3))]
        self._fixed, self._each = fixed, each
        self.batches: list[list[float]] = []

    @property
    def implementations(self) -> dict[str, str]:
        return {}

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        self.batches.append(feed["x"][:, 0].tolist())
        time.sleep(self._fixed + self._each * len(feed["x"]))
        return [self._of(feed["x"])]

    def _of(self, x: Array) -> Array:
        return 2 * x


class Summing(Sleeping):
    def _of(self, x: Array) -> Array:
        return np.cumsum(x, axis=0)


class AtMostOneRow(Sleeping):
    def _of(self, x: Array) -> Array:
        if len(x) > 1:
            raise RuntimeError("one row, please")
        return x

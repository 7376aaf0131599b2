"""tract, in Rust. It reads no functions: files of the form ``primitives``, as ``target="tract"`` writes."""

from __future__ import annotations

from typing import Any

from nnorm_export.dtypes import Array, bits
from nnorm_export.runtimes.bodies_runner import BodiesRunner
from nnorm_export.runtimes.runner import refuse_disagreement
from nnorm_export.runtimes.runtime import Runtime


class TractRunner(BodiesRunner):
    """A model in tract, on one thread. Threads may share a runner: each call has a state of its own."""

    runtime = "tract"
    library = "tract"

    def _open(self) -> None:
        tract = RUNTIMES[0].imported("tract")
        self._runnable: Any = tract.onnx().load(self._file.path).into_model().into_runnable()

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        refuse_disagreement(self.inputs, feed)  # tract does not check, and would compute numbers from a longer axis
        return [tensor.to_numpy() for tensor in self._runnable.run([bits(array) for array in feed.values()])]


RUNTIMES = (Runtime(name=TractRunner.runtime, runner=TractRunner, packages=("tract",), extra="tract", opens_onnx=True),)

"""OpenCV's module dnn. It reads no functions: files of the form ``primitives``, as ``target="opencv"`` writes."""

from __future__ import annotations

from threading import Lock
from typing import Any

from nnorm_export.dtypes import Array, bits
from nnorm_export.errors import InputError
from nnorm_export.runtimes.bodies_runner import BodiesRunner
from nnorm_export.runtimes.runtime import Runtime


class OpenCVRunner(BodiesRunner):
    """A model in OpenCV. Threads may share a runner, and run one after the other: a network has one set of inputs.

    ``cv2.setNumThreads`` sets the threads of all networks of the process.
    """

    runtime = "opencv"
    library = "OpenCV"

    def _open(self) -> None:
        self._network: Any = RUNTIMES[0].imported("cv2").dnn.readNetFromONNX(str(self._file.path))
        self._lock = Lock()

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        if empty := [name for name, array in feed.items() if not array.size]:
            raise InputError(f"input {empty[0]} has no elements, of which OpenCV computes nothing")
        with self._lock:
            for name, array in feed.items():
                self._network.setInput(bits(array), name)
            results = self._network.forward([info.name for info in self.outputs])
            # float16 is returned as float32, and the next run writes into the same memory.
            return [result.astype(info.dtype) for info, result in zip(self.outputs, results, strict=True)]


RUNTIMES = (
    Runtime(
        name=OpenCVRunner.runtime,
        runner=OpenCVRunner,
        # There is no extra: these packages write to one folder, cv2, and pip would install one over another.
        packages=(
            "opencv-python-headless",
            "opencv-python",
            "opencv-contrib-python",
            "opencv-contrib-python-headless",
        ),
        opens_onnx=True,
    ),
)

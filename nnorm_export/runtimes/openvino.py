"""OpenVINO, on processors. It reads no functions: files of the form ``primitives``, as ``target="openvino"`` writes."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np

from nnorm_export.dtypes import Array, bits
from nnorm_export.runtimes.bodies_runner import BodiesRunner
from nnorm_export.runtimes.openvino_faults import faults_of
from nnorm_export.runtimes.runner import number_of_threads
from nnorm_export.runtimes.runtime import Runtime


class OpenVINORunner(BodiesRunner):
    """A model in OpenVINO. Threads may share a runner, and run one after the other.

    On processors with units for bfloat16 or float16 OpenVINO computes float32 files in these dtypes, unless it is told
    to compute in float32, as it is here.

    Args:
        path: an ONNX file without functions.
        intra_op_num_threads: the threads of a run; 0 lets OpenVINO decide.
    """

    runtime = "openvino"
    library = "OpenVINO"

    def __init__(self, path: str | Path, *, intra_op_num_threads: int = 0) -> None:
        self._threads = number_of_threads(intra_op_num_threads, self.library)
        super().__init__(path)

    def _open(self) -> None:
        self._openvino = RUNTIMES[0].imported("openvino")
        self._model = _core(self._openvino).read_model(str(self._file.path))
        self._lock = Lock()
        self._compile()

    def _compile(self) -> None:
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if self._threads:
            settings["INFERENCE_NUM_THREADS"] = self._threads
        self._compiled = _core(self._openvino).compile_model(self._model, "CPU", settings)
        self._request = self._compiled.create_infer_request()

    @cached_property
    def known_faults(self) -> list[str]:
        return faults_of(self._file.proto)

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        plain = {name: bits(array) for name, array in feed.items()}  # they live as long as what shares their memory
        given = {name: self._tensor(plain[name], array.dtype) for name, array in feed.items()}
        with self._lock:
            try:
                self._request.infer(given)
            except Exception:
                self._compile()  # what it was compiled to (2026.4) computes other numbers after a call that failed
                raise
            results = [np.array(tensor.data) for tensor in self._request.output_tensors]
        return [
            result.view(info.dtype) if info.dtype == ml_dtypes.bfloat16 else result
            for info, result in zip(self.outputs, results, strict=True)
        ]

    def _tensor(self, plain: Array, dtype: np.dtype[Any]) -> Any:
        if dtype == ml_dtypes.bfloat16:  # the array of bfloat16 itself would be taken for float16
            return self._openvino.Tensor(plain, plain.shape, self._openvino.Type.bf16)
        return self._openvino.Tensor(plain)


@cache
def _core(openvino: Any) -> Any:
    """OpenVINO's plugins, loaded once."""
    return openvino.Core()


RUNTIMES = (
    Runtime(
        name=OpenVINORunner.runtime, runner=OpenVINORunner, packages=("openvino",), extra="openvino", opens_onnx=True
    ),
)

"""ONNX Runtime."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from nnorm_export.errors import ModelFileError, RuntimeMissingError
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes import model_file
from nnorm_export.runtimes.base import Array, Runner, TensorInfo

_DTYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint64)": np.uint64,
    "tensor(uint32)": np.uint32,
    "tensor(uint16)": np.uint16,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def import_onnxruntime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 - an extra: this package works without it
    except ImportError:
        raise RuntimeMissingError(
            "ONNX Runtime is not installed: pip install 'nnorm_export[onnxruntime]' "
            "(or [onnxruntime-gpu]), or choose --runtime reference"
        ) from None
    return onnxruntime


def ran_by(names: Sequence[str], optimized: onnx.ModelProto) -> dict[str, str]:
    """Node name -> ``kernel`` where the node is left in the graph that ONNX Runtime runs, ``body`` where it is not."""
    kept = {node.name for node in optimized.graph.node if node.domain == DOMAIN}
    return {name: "kernel" if name in kept else "body" for name in names}


class OnnxRuntimeRunner(Runner):
    """A model in an ONNX Runtime session.

    Args:
        path: the model file.
        providers: execution providers in order of preference; default the CPU's.
        session_options: an ``onnxruntime.SessionOptions`` of the caller's; it is used as it is.
        intra_op_num_threads: threads of the session's pool; 0 lets ONNX Runtime decide.
    """

    runtime = "onnxruntime"

    def __init__(
        self,
        path: str | Path,
        *,
        providers: Sequence[str | tuple[str, dict[str, Any]]] = ("CPUExecutionProvider",),
        session_options: Any = None,
        intra_op_num_threads: int = 0,
    ) -> None:
        self._ort = import_onnxruntime()
        self._file = model_file.read(path)
        self._providers = list(providers)
        self._threads = intra_op_num_threads
        available = self._ort.get_available_providers()
        for provider in providers:
            name = provider if isinstance(provider, str) else provider[0]
            if name not in available:
                raise RuntimeMissingError(
                    f"this ONNX Runtime has no {name} (it has {', '.join(available)}); "
                    "the CUDA and TensorRT providers come with onnxruntime-gpu"
                )
        self._session = self._open(session_options or self._options())
        self.inputs = [self._info(arg) for arg in self._session.get_inputs()]
        self.outputs = [self._info(arg) for arg in self._session.get_outputs()]

    @cached_property
    def implementations(self) -> dict[str, str]:
        """Read off the graph that ONNX Runtime optimised: a node that is still there is run by a kernel."""
        names = [node.name for node in self._file.normalizations]
        if not names:
            return {}
        options = self._options()
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            self._open(options)
            optimized = onnx.load(options.optimized_model_filepath, load_external_data=False)
        return ran_by(names, optimized)

    def _options(self) -> Any:
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        return options

    def _open(self, options: Any) -> Any:
        try:
            return self._ort.InferenceSession(str(self._file.path), options, providers=self._providers)
        except Exception as error:  # ONNX Runtime's exceptions share no public base
            reason = str(error).strip()
            if not self._file.has_bodies:
                reason = (
                    f"the file is in the form '{self._file.form}', whose nnorm nodes have no bodies, and no kernel "
                    f"is registered for them; export the form 'portable' instead. ({reason})"
                )
            raise ModelFileError(
                f"{self._file.path}: ONNX Runtime {self._ort.__version__} cannot load it: {reason}"
            ) from error

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        values = {name: self._to_ort(array) for name, array in feed.items()}
        names = [info.name for info in self.outputs]
        results = self._session.run_with_ort_values(names, values)
        return [self._to_numpy(info, value) for info, value in zip(self.outputs, results, strict=True)]

    def _to_ort(self, array: Array) -> Any:
        if array.dtype == ml_dtypes.bfloat16:  # NumPy has no bfloat16, so its bits travel as uint16
            bits = np.ascontiguousarray(array).view(np.uint16)
            return self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
        return self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))

    def _to_numpy(self, info: TensorInfo, value: Any) -> Array:
        if info.dtype != ml_dtypes.bfloat16:
            array: Array = value.numpy()
            return array
        result = np.empty(value.shape(), np.uint16)
        ctypes.memmove(result.ctypes.data, value.data_ptr(), result.nbytes)
        return result.view(ml_dtypes.bfloat16)

    def _info(self, arg: Any) -> TensorInfo:
        if arg.type not in _DTYPES:
            raise ModelFileError(f"{self._file.path}: {arg.name} is {arg.type}, which nnorm_export does not pass on")
        return TensorInfo(arg.name, np.dtype(_DTYPES[arg.type]), tuple(arg.shape))

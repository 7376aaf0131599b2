"""load(): a model file opened in a runtime. ``RUNTIMES`` lists the runtimes by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnorm_export.errors import NnormExportError
from nnorm_export.runtimes.base import Runner, TensorInfo
from nnorm_export.runtimes.onnxruntime import OnnxRuntimeCudaRunner, OnnxRuntimeRunner
from nnorm_export.runtimes.reference import ReferenceRunner
from nnorm_export.runtimes.tensorrt import TensorRTRunner, is_engine

RUNTIMES: dict[str, Callable[..., Runner]] = {
    OnnxRuntimeRunner.runtime: OnnxRuntimeRunner,
    OnnxRuntimeCudaRunner.runtime: OnnxRuntimeCudaRunner,
    ReferenceRunner.runtime: ReferenceRunner,
    TensorRTRunner.runtime: TensorRTRunner,
}

DEFAULT_RUNTIME = OnnxRuntimeRunner.runtime


def load(path: str | Path, runtime: str | None = None, **options: Any) -> Runner:
    """Opens a model file in a runtime: ``runner = load("model.onnx"); logits, = runner(images)``.

    Args:
        path: an ONNX file, or an engine of TensorRT (``.plan``, ``.engine``).
        runtime: ``onnxruntime``, ``onnxruntime-cuda``, ``reference`` or ``tensorrt``; None takes ONNX Runtime on the
            CPU, and TensorRT for an engine.
        options: the runtime's own, see :class:`OnnxRuntimeRunner` and :class:`TensorRTRunner`.

    Raises:
        ModelFileError: the file is missing, not ONNX, or refused by the runtime.
        RuntimeMissingError: the runtime or a provider is not installed. Nothing else is tried in its stead.
    """
    name = runtime or (TensorRTRunner.runtime if is_engine(path) else DEFAULT_RUNTIME)
    if name not in RUNTIMES:
        raise NnormExportError(f"unknown runtime {name!r}; choose one of {', '.join(RUNTIMES)}")
    return RUNTIMES[name](path, **options)


__all__ = [
    "DEFAULT_RUNTIME",
    "RUNTIMES",
    "OnnxRuntimeCudaRunner",
    "OnnxRuntimeRunner",
    "ReferenceRunner",
    "Runner",
    "TensorInfo",
    "TensorRTRunner",
    "load",
]

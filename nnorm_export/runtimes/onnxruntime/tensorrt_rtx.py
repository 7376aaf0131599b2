"""ONNX Runtime with NVIDIA's provider for TensorRT-RTX, a library that ONNX Runtime loads after a registration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nnorm_export.errors import RuntimeMissingError, first_line
from nnorm_export.files.onnx_file import name_of
from nnorm_export.files.optimized_for import CPU
from nnorm_export.process import LOCK
from nnorm_export.runtimes.onnxruntime.providers import Provider
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner, import_onnxruntime
from nnorm_export.runtimes.runtime import Runtime, installed_version
from nnorm_export.tensorrt.rtx import why_no_gpu

PROVIDER = "NvTensorRTRTXExecutionProvider"

_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
_PACKAGES = (  # the first requires one of the others, which contain the library
    "onnxruntime-ep-nv-tensorrt-rtx",
    "onnxruntime-ep-nv-tensorrt-rtx-cu13",
    "onnxruntime-ep-nv-tensorrt-rtx-cu12",
)
_REMEDY = "pip install 'nnorm_export[onnxruntime-tensorrt-rtx]'"
_registered: set[str] = set()  # names of libraries, because ONNX Runtime refuses a second registration


class OnnxRuntimeTensorRTRtxRunner(OnnxRuntimeRunner):
    """A model in an ONNX Runtime session on an RTX card. The CPU runs the operators that TensorRT-RTX does not have.

    Bodies run the normalizations, because the provider takes no plugins. TensorRT-RTX fuses them with their neighbors.
    The first run compiles the kernels for the card.

    Args:
        path: the model file.
        provider_options: the provider's own, as NVIDIA documents them: ``{"nv_cuda_graph_enable": "1"}``.
        session_options, intra_op_num_threads, session_config: as of :class:`.OnnxRuntimeRunner`.

    Raises:
        ModelFileError: as of :class:`.OnnxRuntimeRunner`.
        RuntimeMissingError: ONNX Runtime, the provider, a driver or a card is missing.
    """

    runtime = "onnxruntime-tensorrt-rtx"
    default_providers: ClassVar[tuple[Provider, ...]] = (PROVIDER, CPU)

    def __init__(
        self,
        path: str | Path,
        *,
        provider_options: dict[str, str] | None = None,
        session_options: Any = None,
        intra_op_num_threads: int = 0,
        session_config: Mapping[str, str] | None = None,
    ) -> None:
        self._devices = _devices()
        self._provider_options = provider_options or {}
        super().__init__(
            path,
            session_options=session_options,
            intra_op_num_threads=intra_op_num_threads,
            session_config=session_config,
            kernels=None if session_options is not None else False,
        )

    @property
    def implementations(self) -> dict[str, str]:
        """Always bodies: a session has no kernels for this provider, and the provider takes no plugins."""
        return dict.fromkeys((name_of(node) for node in self._file.normalizations), "body")

    def _require_providers(self) -> None:
        """Do nothing: ``__init__`` has found the device."""

    def _new_session(self, options: Any) -> Any:
        if not options.has_providers():  # the caller's options may have providers
            options.add_provider_for_devices(self._devices, self._provider_options)
        return self._ort.InferenceSession(str(self._file.path), options)


def _devices() -> list[Any]:
    """The cards that the provider finds.

    Raises:
        RuntimeMissingError: as of :class:`OnnxRuntimeTensorRTRtxRunner`.
    """
    onnxruntime = import_onnxruntime()
    if not _installed():
        raise RuntimeMissingError(f"ONNX Runtime's provider for TensorRT-RTX is not installed: {_REMEDY}")
    if reason := why_no_gpu():
        raise RuntimeMissingError(f"ONNX Runtime's provider for TensorRT-RTX needs an RTX card, and {reason}")
    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise RuntimeMissingError(
            f"ONNX Runtime {onnxruntime.__version__} loads no libraries of providers; 1.23 and newer do: "
            "pip install --upgrade onnxruntime"
        )
    with LOCK:
        if PROVIDER not in _registered:
            try:
                library = importlib.import_module(_MODULE).get_library_path()
                onnxruntime.register_execution_provider_library(PROVIDER, library)
            except Exception as error:  # ONNX Runtime's exceptions share no public base
                raise RuntimeMissingError(
                    f"ONNX Runtime {onnxruntime.__version__} cannot load its provider for TensorRT-RTX: "
                    f"{first_line(error)}"
                ) from error
            _registered.add(PROVIDER)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        raise RuntimeMissingError(
            "ONNX Runtime's provider for TensorRT-RTX takes none of this machine's GPUs; it runs on RTX cards"
        )
    return devices[:1]


def _installed() -> str:
    return next(filter(None, map(installed_version, _PACKAGES)), "")


RUNTIMES = (
    Runtime(
        name=OnnxRuntimeTensorRTRtxRunner.runtime,
        runner=OnnxRuntimeTensorRTRtxRunner,
        packages=_PACKAGES,
        extra="onnxruntime-tensorrt-rtx",
        opens_onnx=True,
        check=_devices,
    ),
)

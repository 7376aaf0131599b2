"""ONNX Runtime with NVIDIA's provider for TensorRT-RTX, a library that ONNX Runtime loads after a registration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnorm_export.errors import RuntimeMissingError
from nnorm_export.files.onnx_file import name_of
from nnorm_export.files.optimized_for import CPU
from nnorm_export.runtimes.onnxruntime.plugin_providers import PluginProvider
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner, import_onnxruntime
from nnorm_export.runtimes.runtime import Runtime
from nnorm_export.tensorrt.rtx import why_no_gpu

PROVIDER = PluginProvider(
    names=("NvTensorRTRTXExecutionProvider",),
    title="TensorRT-RTX",
    module="onnxruntime_ep_nv_tensorrt_rtx",
    packages=(  # the first requires one of the others, which contain the library
        "onnxruntime-ep-nv-tensorrt-rtx",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13",
        "onnxruntime-ep-nv-tensorrt-rtx-cu12",
    ),
    devices="RTX cards",
)
_REMEDY = "pip install 'nnorm_export[onnxruntime-tensorrt-rtx]'"


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

    def __init__(
        self,
        path: str | Path,
        *,
        provider_options: dict[str, str] | None = None,
        session_options: Any = None,
        intra_op_num_threads: int = 0,
        session_config: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            path,
            providers=[(PROVIDER.names[0], provider_options or {}), CPU],
            session_options=session_options,
            intra_op_num_threads=intra_op_num_threads,
            session_config=session_config,
            kernels=None if session_options is not None else False,
        )

    @property
    def implementations(self) -> dict[str, str]:
        """Always bodies: a session has no kernels for this provider, and the provider takes no plugins."""
        return dict.fromkeys((name_of(node) for node in self._file.normalizations), "body")

    def _find_devices(self) -> dict[str, list[Any]]:
        return {PROVIDER.names[0]: _devices(), CPU: []}


def _devices() -> list[Any]:
    """The cards that the provider finds.

    Raises:
        RuntimeMissingError: as of :class:`OnnxRuntimeTensorRTRtxRunner`.
    """
    onnxruntime = import_onnxruntime()
    if not PROVIDER.installed:
        raise RuntimeMissingError(f"ONNX Runtime's provider for TensorRT-RTX is not installed: {_REMEDY}")
    if reason := why_no_gpu():
        raise RuntimeMissingError(f"ONNX Runtime's provider for TensorRT-RTX needs an RTX card, and {reason}")
    return PROVIDER.find_devices(onnxruntime)


RUNTIMES = (
    Runtime(
        name=OnnxRuntimeTensorRTRtxRunner.runtime,
        runner=OnnxRuntimeTensorRTRtxRunner,
        packages=PROVIDER.packages,
        extra="onnxruntime-tensorrt-rtx",
        opens_onnx=True,
        check=_devices,
    ),
)

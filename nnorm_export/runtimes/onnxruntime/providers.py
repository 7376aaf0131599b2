"""The execution providers that a session of ONNX Runtime is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnorm_export import library
from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.files.optimized_for import CPU
from nnorm_export.names import listed

CUDA = "CUDAExecutionProvider"
AZURE = "AzureExecutionProvider"  # in pip's onnxruntime; runs only operators of its own domain, on a server
Provider = str | tuple[str, dict[str, Any]]  # a name, or (name, options)


def checked(providers: Sequence[Provider]) -> list[Provider]:
    """The providers as a list. Raises NnormExportError unless each is a name or (name, options)."""
    given = listed(providers, "providers")
    for provider in given:
        is_pair = isinstance(provider, tuple) and len(provider) == 2 and isinstance(provider[1], dict)
        if not isinstance(provider[0] if is_pair else provider, str):
            raise NnormExportError(
                f"providers: {provider!r} is neither a name nor a tuple of a name and a dict of options"
            )
    return given


def names_of(providers: Sequence[Provider]) -> list[str]:
    return [provider if isinstance(provider, str) else provider[0] for provider in providers]


def on_cpu_alone(names: Sequence[str]) -> bool:
    """Whether a session with these providers runs every standard operator on the CPU."""
    return set(names) <= {CPU, AZURE}


def have_kernels(names: Sequence[str]) -> bool:
    """Whether the installed libraries have kernels for all providers. The CPU is always one of them."""
    return ({CPU, *names} - {AZURE}) <= providers_with_kernels()


def providers_with_kernels() -> set[str]:
    """The execution providers for which the installed libraries have kernels."""
    cuda = {CUDA} if library.find_cuda_library() is not None else set()
    return {CPU} | cuda if library.find_library() is not None else set()


def require_provider(ort: Any, name: str) -> None:
    available = ort.get_available_providers()
    if name not in available:
        raise RuntimeMissingError(
            f"this ONNX Runtime has no {name} (it has {', '.join(available)}); the CUDA and TensorRT providers come "
            "with onnxruntime-gpu: pip uninstall onnxruntime, whose folder it shares, and then "
            "pip install 'nnorm_export[onnxruntime-gpu]'"
        )

"""The execution providers that a session of ONNX Runtime is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnorm_export import library
from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.files.optimized_for import CPU
from nnorm_export.names import listed
from nnorm_export.runtimes.onnxruntime.plugin_providers import PluginProvider

CUDA = "CUDAExecutionProvider"
AZURE = "AzureExecutionProvider"  # in pip's onnxruntime; runs only operators of its own domain, on a server
Provider = str | tuple[str, dict[str, Any]]  # a name, or (name, options)
# The CUDA provider in a package of its own. Its first versions have the second name.
_CUDA_PLUGIN = PluginProvider(
    names=(CUDA, "CudaPluginExecutionProvider"),
    title="CUDA",
    module="onnxruntime_ep_cuda",
    packages=("onnxruntime-ep-cuda13", "onnxruntime-ep-cuda12"),
    devices="NVIDIA GPUs",
)


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


def find_devices(ort: Any, name: str) -> list[Any]:
    """The devices of a provider that is in a library of its own; none for a provider that ONNX Runtime contains.

    Raises:
        RuntimeMissingError: there is no such provider, or it takes no device of this machine.
    """
    available = ort.get_available_providers()
    if name in available:
        return []
    if name == CUDA and _CUDA_PLUGIN.installed:
        return _CUDA_PLUGIN.find_devices(ort)
    raise RuntimeMissingError(
        f"this ONNX Runtime has no {name} (it has {', '.join(available)}); the CUDA and TensorRT providers come "
        "with onnxruntime-gpu: pip uninstall onnxruntime, whose folder it shares, and then "
        "pip install 'nnorm_export[onnxruntime-gpu]'"
    )


def open_session(
    ort: Any, path: str | Path, options: Any, providers: Sequence[Provider], devices: Mapping[str, list[Any]]
) -> Any:
    """An ``onnxruntime.InferenceSession``, with what :func:`find_devices` found for each provider.

    Providers from libraries are added to ``options`` with their own options, unless these name providers already, as a
    caller's may. ONNX Runtime then runs on the CPU what they do not take.

    Raises:
        NnormExportError: beside a provider from a library there is another, which ONNX Runtime would leave out.
    """
    if not any(devices.values()):
        return ort.InferenceSession(str(path), options, providers=list(providers))
    if not options.has_providers():
        for provider in providers:
            name, given = (provider, {}) if isinstance(provider, str) else provider
            if devices[name]:
                rest = {key: value for key, value in given.items() if key != "device_id"}
                options.add_provider_for_devices([devices[name][int(given.get("device_id", 0))]], rest)
            elif name != CPU:
                raise NnormExportError(f"providers: {name} cannot stand beside one that is loaded from a library")
    return ort.InferenceSession(str(path), options)

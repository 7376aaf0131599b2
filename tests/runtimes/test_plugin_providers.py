"""Providers in libraries of their own where they cannot run: each reason is told. tests/gpu runs that of TensorRT-RTX.

No package registry has the CUDA provider's library yet, so the CPU's device stands for a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nnorm_export import NnormExportError, RuntimeMissingError, export, layers, load
from nnorm_export.runtimes import RUNTIMES
from nnorm_export.runtimes.onnxruntime import plugin_providers, providers, tensorrt_rtx

NAME = "onnxruntime-tensorrt-rtx"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    return export(nn.Sequential(layers.LayerNormalNorm(8)), torch.randn(2, 8), folder / "n.onnx", verify=False).path


def install(monkeypatch: pytest.MonkeyPatch, *, no_gpu: str, library: str = "", devices: tuple[Any, ...] = ()) -> None:
    module = SimpleNamespace(get_library_path=lambda: library)
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_nv_tensorrt_rtx", module)
    monkeypatch.setattr(plugin_providers, "installed_version", lambda package: "0.5.0")
    monkeypatch.setattr(tensorrt_rtx, "why_no_gpu", lambda: no_gpu)
    monkeypatch.setattr(plugin_providers, "_registered", set())
    if devices or not library:
        onnxruntime = pytest.importorskip("onnxruntime")
        monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda *_: None)
        monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: list(devices))


def test_a_package_that_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_providers, "installed_version", lambda package: "")
    with pytest.raises(RuntimeMissingError, match=r"pip install 'nnorm_export\[onnxruntime-tensorrt-rtx\]'"):
        load(path, NAME)
    (component,) = RUNTIMES[NAME].list_components()
    assert (component.found, "nnorm_export[onnxruntime-tensorrt-rtx]" in component.remedy) == ("", True)


def test_a_machine_without_a_driver(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, no_gpu="this machine has no NVIDIA driver (libcuda.so.1 is not found)")
    with pytest.raises(RuntimeMissingError, match=r"needs an RTX card, and this machine has no NVIDIA driver"):
        RUNTIMES[NAME].require()


def test_a_library_that_cannot_be_loaded(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own words, as where a library of the driver is missing."""
    library = tmp_path / "libprovider.so"
    library.write_bytes(b"not a library")
    install(monkeypatch, no_gpu="", library=str(library))
    with pytest.raises(RuntimeMissingError, match=r"cannot load its provider for TensorRT-RTX: .*libprovider\.so"):
        load(path, NAME)


def test_a_card_that_the_provider_does_not_take(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, no_gpu="", devices=(SimpleNamespace(ep_name="CPUExecutionProvider"),))
    with pytest.raises(RuntimeMissingError, match="takes none of this machine's GPUs"):
        load(path, NAME)


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The CUDA provider's package, as if it were installed. Returns the libraries that are registered, by name."""
    onnxruntime = pytest.importorskip("onnxruntime", minversion="1.23")
    registered: dict[str, str] = {}
    module = SimpleNamespace(get_library_path=lambda: "libprovider.so")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_cuda", module)
    monkeypatch.setattr(plugin_providers, "installed_version", lambda package: "0.1.0")
    monkeypatch.setattr(plugin_providers, "_registered", set())
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", registered.__setitem__)
    names = (providers.CUDA, providers.CPU)  # the CPU's device is one of this provider's
    monkeypatch.setattr(providers, "_CUDA_PLUGIN", dataclasses.replace(providers._CUDA_PLUGIN, names=names))
    return registered


def test_the_cuda_provider_in_a_library(path: Path, cuda_on_cpu: dict[str, str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8).numpy()
    runner = load(path, "onnxruntime-cuda")
    (result,), (expected,) = runner(x), load(path, "reference")(x)
    assert cuda_on_cpu == {"CUDAExecutionProvider": "libprovider.so"}
    assert np.abs(result - expected).max() < 1e-5
    load(path, "onnxruntime-cuda")
    load(path, providers=[("CUDAExecutionProvider", {"device_id": "0"}), "CPUExecutionProvider"])  # registered once


def test_another_provider_beside_one_in_a_library(path: Path, cuda_on_cpu: dict[str, str]) -> None:
    with pytest.raises(NnormExportError, match="AzureExecutionProvider cannot stand beside one that is loaded"):
        load(path, providers=["CUDAExecutionProvider", "AzureExecutionProvider"])

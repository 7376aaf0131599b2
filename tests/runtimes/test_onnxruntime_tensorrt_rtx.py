"""ONNX Runtime's provider for TensorRT-RTX where it cannot run: each reason is told. tests/gpu runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nnorm_export import RuntimeMissingError, export, layers, load
from nnorm_export.runtimes import RUNTIMES
from nnorm_export.runtimes.onnxruntime import tensorrt_rtx

NAME = "onnxruntime-tensorrt-rtx"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    return export(nn.Sequential(layers.LayerNormalNorm(8)), torch.randn(2, 8), folder / "n.onnx", verify=False).path


def install(monkeypatch: pytest.MonkeyPatch, *, no_gpu: str, library: str = "", devices: tuple[Any, ...] = ()) -> None:
    module = SimpleNamespace(get_library_path=lambda: library)
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_nv_tensorrt_rtx", module)
    monkeypatch.setattr(tensorrt_rtx, "installed_version", lambda package: "0.5.0")
    monkeypatch.setattr(tensorrt_rtx, "why_no_gpu", lambda: no_gpu)
    monkeypatch.setattr(tensorrt_rtx, "_registered", set())
    if devices or not library:
        onnxruntime = pytest.importorskip("onnxruntime")
        monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda *_: None)
        monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: list(devices))


def test_a_package_that_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_rtx, "installed_version", lambda package: "")
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

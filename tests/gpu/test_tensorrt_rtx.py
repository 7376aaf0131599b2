"""TensorRT-RTX itself, on an RTX card: engines by bodies and by plugins against PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from programs import run as run_program
from small_network import Network, randomized
from tensorrt_sample import build_sample
from torch import nn

from nnorm_export import RuntimeMissingError, build_engine, export, freeze, get_plugin_path, layers, load, verify

tensorrt_rtx = pytest.importorskip(
    "tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'nnorm_export[tensorrt-rtx]'"
)
CARDS = {(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)}
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() not in CARDS,
    reason="there is no GPU of a compute capability that TensorRT-RTX runs on",
)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("plugins", [True, None])
def test_an_engine_computes_what_pytorch_does(plugins: bool | None, dtype: str, tmp_path: Path) -> None:
    if plugins:
        try:
            get_plugin_path(registering=True, rtx=True)
        except RuntimeMissingError as error:
            pytest.skip(str(error))
    network = randomized(Network())
    image = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    path = export(network, (image,), tmp_path / "net.onnx", input_names=["image"], dtype=dtype, verify=False).path
    major, minor = torch.cuda.get_device_capability()
    capability = [f"{major}.{minor}"]
    report = build_engine(path, tmp_path / "net.rtx.plan", rtx=True, compute_capabilities=capability, plugins=plugins)
    assert set(report.implementations.values()) == {"plugin" if plugins else "body"}
    opened = load(report.path)
    assert opened.runtime == "tensorrt-rtx"
    assert set(opened.implementations) == (set(report.implementations) if plugins else set())
    for batch in (1, 3, 16):
        inputs = torch.randn(batch, 3, 8, 6, generator=torch.Generator().manual_seed(batch))
        parity = verify(report.path, network, inputs, runtime="tensorrt-rtx")
        assert parity, parity


def test_an_onnx_file_is_run_by_an_engine_built_on_the_spot(tmp_path: Path) -> None:
    network = randomized(Network())
    image = torch.randn(4, 3, 8, 6)
    path = export(network, (image,), tmp_path / "net.onnx", verify=False).path
    assert verify(path, network, image, runtime="tensorrt-rtx")


def test_onnx_runtimes_provider_computes_what_pytorch_does(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_ep_nv_tensorrt_rtx", reason="ONNX Runtime's provider is not installed")
    network = randomized(Network())
    image = torch.randn(4, 3, 8, 6)
    path = export(network, (image,), tmp_path / "net.onnx", verify=False).path
    assert set(load(path, "onnxruntime-tensorrt-rtx").implementations.values()) == {"body"}
    assert verify(path, network, image, runtime="onnxruntime-tensorrt-rtx")


@pytest.mark.parametrize("plugins", [True, None])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_sample_in_cpp_computes_what_pytorch_does(dynamic: bool, plugins: bool | None, tmp_path: Path) -> None:
    program = build_sample(tmp_path / "build")
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Conv2d(1, 8, 3), layers.BatchNormalNorm2d(8), nn.Flatten(), nn.Linear(288, 10)))
    images = torch.randn(66, 1, 8, 8)  # more than one batch of the dynamic engine
    shapes = None if dynamic else {}
    path = export(model, images[:2], tmp_path / "net.onnx", dynamic_shapes=shapes, verify=False).path
    engine = build_engine(path, tmp_path / "net.rtx.plan", rtx=True, compute_capabilities=["current"], plugins=plugins)
    images.numpy().tofile(tmp_path / "images.f32")
    libraries = [get_plugin_path(registering=True, rtx=True)] if plugins else []
    done = run_program(program, engine.path, tmp_path / "images.f32", *libraries)
    assert done.returncode == 0, done.stderr
    logits = [[float(word) for word in line.split(" ")] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(logits, freeze(model)(images).detach(), rtol=1e-4, atol=1e-4)

"""TensorRT itself: a network as ONNX, as an engine with plugins and as one without, against PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_network import Network, randomized

from nnorm_export import RuntimeMissingError, build_engine, export, get_plugin_path, load, verify
from nnorm_export.files import onnx_file

pytest.importorskip("tensorrt", reason="TensorRT is not installed: pip install 'nnorm_export[tensorrt]'")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"PyTorch {torch.__version__} sees no GPU, and TensorRT runs on nothing else"
)


def _skip_without_plugins() -> None:
    try:
        get_plugin_path(registering=True)
    except RuntimeMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("plugins", [True, False, None])
def test_an_engine_computes_what_pytorch_does(plugins: bool | None, dtype: str, tmp_path: Path) -> None:
    if plugins is not False:
        _skip_without_plugins()
    network = randomized(Network())
    image = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    path = export(network, (image,), tmp_path / "net.onnx", input_names=["image"], dtype=dtype, verify=False).path
    shapes = [[1, 3, 8, 6], [4, 3, 8, 6], [16, 3, 8, 6]]
    cache = tmp_path / "trt.cache"
    report = build_engine(path, tmp_path / "net.plan", profiles={"image": shapes}, plugins=plugins, timing_cache=cache)
    nodes = {node.name: node.op_type for node in onnx_file.read(path).normalizations}
    reductions = {name for name, op_type in nodes.items() if op_type in ("GroupNormalNorm", "LayerNormalNorm")}
    by_plugin = set(nodes) if plugins else reductions if plugins is None else set()
    assert {name for name, way in report.implementations.items() if way == "plugin"} == by_plugin
    assert set(load(report.path, "tensorrt").implementations) == by_plugin
    assert cache.is_file()
    for batch in (1, 3, 16):
        inputs = torch.randn(batch, 3, 8, 6, generator=torch.Generator().manual_seed(batch))
        parity = verify(report.path, network, inputs, runtime="tensorrt")
        assert parity, parity


def test_an_onnx_file_is_run_by_an_engine_built_on_the_spot(tmp_path: Path) -> None:
    network = randomized(Network())
    image = torch.randn(4, 3, 8, 6)
    path = export(network, (image,), tmp_path / "net.onnx", verify=False).path
    assert verify(path, network, image, runtime="tensorrt")

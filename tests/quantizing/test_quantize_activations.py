"""quantize() of the activations behind norms: which of them are in the norm's table, and what keeps one apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_network import randomized
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import export, layers, load, quantize

pytestmark = pytest.mark.slow


def nodes(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


class Mobile(nn.Module):
    """The activations of mobile networks behind norms: alone, and where something else reads the norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(layers.BatchNormalNorm2d(8) for _ in range(4))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i, activation in enumerate((F.hardswish, F.silu, F.relu6)):
            x = activation(self.norms[i](self.convs[i](x)))
        x = self.norms[3](self.convs[3](x))
        return self.head(F.hardswish(x) + x)


def test_activations_of_mobile_networks_are_in_the_table(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = torch.randn(40, 3, 7, 6)
    source = export(randomized(Mobile()).eval(), data[:2], tmp_path / "net.onnx").path
    report = quantize(source, data, tmp_path / "int8.onnx", by_layer=True, rank=True)
    # A convolution that stays float for once takes its norm along, which is apart from its activation then.
    gains = {layer.path: layer.gain for layer in report.layers if layer.gain is not None}
    assert len(gains) == 5
    assert min(gains.values()) > -1
    found = nodes(report.path)
    tables = {"QuantizedBatchNormalNormHardSwish": 1, "QuantizedBatchNormalNormSwish": 1, "QuantizedBatchNormalNorm": 2}
    assert {name: count for name, count in found.items() if name.startswith("Quantized")} == tables
    assert (found["HardSwish"], found["Sigmoid"], found["Clip"]) == (1, 0, 0)
    op_types = {layer.path: layer.op_types for layer in report.layers if "Norm" in layer.op_types}
    assert op_types == {
        "norms.0": "QuantizedBatchNormalNormHardSwish",
        "norms.1": "QuantizedBatchNormalNormSwish",
        "norms.2": "QuantizedBatchNormalNorm",
        "norms.3": "QuantizedBatchNormalNorm",
    }
    ratios = {layer.path: layer.sqnr for layer in report.layers}
    assert ratios.pop("norms.2") is None  # ONNX Runtime's quantizer makes Clip and the rounding to 8 bits one
    assert all(ratio is not None and ratio > 20 for ratio in ratios.values())
    assert set(report.implementations.values()) == {"kernel"}
    x = data.numpy()
    kernels, bodies = (load(report.path, kernels=kernels)(x)[0] for kernels in (True, False))
    assert np.abs(kernels - bodies).max() < 0.02 * np.abs(bodies).max()
    kept = quantize(source, data, tmp_path / "kept.onnx", keep=["convs.0", "norms.1"])
    floats = [layer.op_types for layer in kept.layers if layer.kept]
    assert floats == ["Conv", "BatchNormalNorm", "BatchNormalNorm"]
    found = nodes(kept.path)
    assert (found["BatchNormalNorm"], found["HardSwish"], found["Sigmoid"]) == (2, 2, 1)
    (activation,) = [node.name for node in onnx.load(source).graph.node if node.op_type == "Sigmoid"]
    apart = nodes(quantize(source, data, tmp_path / "apart.onnx", keep=[activation]).path)
    assert (apart["QuantizedBatchNormalNorm"], apart["Sigmoid"]) == (3, 1)

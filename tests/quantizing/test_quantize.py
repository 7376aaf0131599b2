"""quantize(): files in int8, their norms as tables, and how far they are from what they were made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backends import needs_kernels
from small_network import randomized
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nnorm_export
from nnorm_export import export, layers, load, quantize
from nnorm_export.errors import InputError, ModelFileError, ParityError
from nnorm_export.files.inspection import describe
from nnorm_export.quantizing import float_graph
from nnorm_export.quantizing.accuracy import sqnr
from nnorm_export.quantizing.qdq import NORMS

pytestmark = pytest.mark.slow


class Network(nn.Module):
    """Each operator with a table between convolutions and beside a product, and norms that stay float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layers.BatchNormalNorm2d(8), nn.ReLU())
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1), layers.BatchNormalNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), layers.BatchNormalNorm2d(8)
        self.shortcut = nn.Sequential(nn.Conv2d(8, 8, 1), layers.BatchNormalNorm2d(8))
        self.groups = layers.GroupNormalNorm(8, 2)
        self.dense1, self.dense2 = nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm3, self.head = layers.BatchNormalNorm1d(16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        y = self.norm1(self.conv1(x)).relu()
        x = (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()
        z = self.dense1(self.groups(x).mean((2, 3))).relu()
        return self.head((self.norm3(self.dense2(z)) + z).relu())


class Batches(Dataset[Tensor]):
    """A data set as PyTorch's documentation has it: without ``__iter__``."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __getitem__(self, index: int) -> Tensor:
        if index > 1:
            raise IndexError
        return self.images[30 * index : 30 * index + 30]


TABLES = {  # a residual sum of maps is a node of its own, one of rows is not
    "QuantizedBatchNormalNorm": 2,
    "QuantizedBatchNormalNormRelu": 2,
    "QuantizedBatchNormalNormAddRelu": 1,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Network()).eval()


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.randn(40, 3, 7, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(model: nn.Module, data: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "net.onnx"
    return export(model, data[:2], path, verify=False).path


@pytest.fixture(scope="module")
def made(source: Path, data: Tensor) -> nnorm_export.QuantizeReport:
    return quantize(source, data, source.with_name("net.int8.onnx"))


def nodes(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def test_every_frozen_norm_between_quantized_tensors_is_a_table(made: nnorm_export.QuantizeReport) -> None:
    found = nodes(made.path)
    assert {name: found[name] for name in TABLES} == TABLES
    assert found["GroupNormalNorm"] == 1
    assert not any(name in found for name in NORMS)
    floats = [layer for layer in made.layers if layer.kept]
    assert [(layer.op_types, layer.kept) for layer in floats] == [
        ("GroupNormalNorm", "it computes statistics from its input")
    ]
    assert len(made.quantized) == 12
    assert made.samples == 40
    assert made.size == made.path.stat().st_size
    assert [output.rows for output in made.outputs] == [40]
    assert made.outputs[0].sqnr > 35
    assert made.outputs[0].top1_agreement > 0.7  # scores that differ little
    assert made.notices == []


def test_channels_are_last_beside_convolutions_alone(made: nnorm_export.QuantizeReport) -> None:
    graph = onnx.load(made.path).graph
    axes = {
        node.name: attribute.i
        for node in graph.node
        if node.op_type in TABLES
        for attribute in node.attribute
        if attribute.name == "axis"
    }
    assert axes.pop("norm3/BatchNormalNorm") == 1
    assert set(axes.values()) == {-1}
    assert len(axes) == 4


def test_the_file_is_valid(made: nnorm_export.QuantizeReport, data: Tensor) -> None:
    """ONNX Runtime's quantizer appends nodes to the graph, where others read what they make."""
    onnx.checker.check_model(made.path, full_check=True)
    (found,), (expected,) = (load(made.path, runtime)(data[:4].numpy()) for runtime in ("reference", "onnxruntime"))
    assert sqnr(found, expected) > 30


def test_the_file_says_what_it_is(made: nnorm_export.QuantizeReport, source: Path) -> None:
    described, original = describe(made.path), describe(source)
    assert described.quantization == "activations uint8, weights int8 of 7 bits per-channel, minmax on 40 samples"
    assert original.quantization is None
    assert described.form == "portable"
    assert described.problems == described.changes == []
    assert described.inputs == original.inputs
    assert described.outputs == original.outputs
    assert [layer.path for layer in described.layers] == [layer.path for layer in original.layers]
    assert Counter(layer.op_type for layer in described.layers) == {**TABLES, "GroupNormalNorm": 1}
    assert described.weights_sha256 == original.weights_sha256
    with pytest.raises(ModelFileError, match="quantized already"):
        quantize(made.path, torch.zeros(2, 3, 7, 6), made.path.with_name("again.onnx"))


def test_tables_compute_what_the_float_norms_between_roundings_do(
    made: nnorm_export.QuantizeReport, source: Path, data: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bodies, so that both sides use the same float32 arithmetic: only the order of the channels differs."""
    monkeypatch.setattr(float_graph, "use_tables", lambda model, ranks, names: set())
    around = quantize(source, data, tmp_path / "qdq.onnx").path
    assert nodes(around)["BatchNormalNormRelu"] == 2
    with_tables, without = load(made.path, kernels=False), load(around, kernels=False)
    (mine,), (its,) = with_tables(data.numpy()), without(data.numpy())
    step = np.ptp(its) / 255
    assert np.mean(mine == its) > 0.9
    assert np.abs(mine - its).max() <= 3 * step


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"method": "entropy"}, 10),
        ({"method": "percentile", "percentile": 99.9, "activation": "int8"}, 15),
        ({"weights": "per-tensor", "reduce_range": False}, 10),  # sums overflow on processors without VNNI
    ],
)
def test_options(options: dict[str, Any], least: float, source: Path, data: Tensor, tmp_path: Path) -> None:
    report = quantize(source, data, tmp_path / "int8.onnx", batch_size=16, **options)
    assert report.outputs[0].sqnr > least
    described = describe(report.path)
    assert all(
        str(value) in str(described.quantization) for name, value in options.items() if name in ("method", "activation")
    )
    proto = onnx.load(report.path)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    kernels = [w for w in weights.values() if w.ndim == 4]
    assert {w.dtype.name for w in kernels} == {"int8"}
    assert max(np.abs(w.astype(int)).max() for w in kernels) == (64 if options.get("reduce_range", True) else 127)
    if options.get("weights") == "per-tensor":
        dequantized = [node for node in proto.graph.node if node.op_type == "DequantizeLinear"]
        assert {
            weights[n.input[1]].ndim for n in dequantized if n.input[0] in weights and weights[n.input[0]].ndim > 1
        } == {0}
    zero_points = {weights[node.input[2]].dtype.name for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    assert zero_points == {options.get("activation", "uint8")}


def test_layers_that_are_kept_stay_float(source: Path, data: Tensor, tmp_path: Path) -> None:
    report = quantize(source, data, tmp_path / "int8.onnx", keep=["stem.0", "shortcut", "dense2"])
    kept = {layer.path: layer.op_types for layer in report.layers if layer.kept == "asked for"}
    # The norm after the kept convolution goes with it; a module stands for its layers.
    assert kept == {
        "stem.0": "Conv",
        "stem.1": "BatchNormalNormRelu",
        "shortcut.0": "Conv",
        "shortcut.1": "BatchNormalNorm",
        "dense2": "Gemm",
        "norm3": "BatchNormalNormAddRelu",
    }
    found = nodes(report.path)
    assert (found["BatchNormalNormRelu"], found["QuantizedBatchNormalNormRelu"]) == (1, 1)
    with pytest.raises(InputError, match=r"no node or layer 'stem\.9'.*stem\.0"):
        quantize(source, data, tmp_path / "int8.onnx", keep=["stem.9"])
    with pytest.raises(InputError, match="give a list of names"):
        quantize(source, data, tmp_path / "int8.onnx", keep="stem")
    with pytest.raises(ModelFileError, match="keep leaves none"):
        quantize(
            source,
            data,
            tmp_path / "int8.onnx",
            keep=["stem", "conv1", "conv2", "shortcut", "dense1", "dense2", "head"],
        )


def test_ranking_tells_what_keeping_a_layer_gains(source: Path, data: Tensor, tmp_path: Path) -> None:
    phases: list[tuple[str, float]] = []
    report = quantize(
        source, data, tmp_path / "int8.onnx", rank=True, progress=lambda phase, done: phases.append((phase, done))
    )
    gains = [layer.gain for layer in report.layers if layer.gain is not None]
    assert gains == sorted(gains, reverse=True)
    assert {layer.op_types for layer in report.layers if layer.gain is not None} == {"Conv", "Gemm"}
    assert len(gains) == 7
    best = report.layers[0]
    kept = quantize(source, data, tmp_path / "kept.onnx", keep=[best.path])
    assert kept.outputs[0].sqnr == pytest.approx(report.outputs[0].sqnr + best.gain, abs=0.01)
    assert [*dict.fromkeys(phase for phase, _ in phases)] == ["calibrating", "quantizing", "comparing", "ranking"]
    assert all(0 <= done <= 1 for _, done in phases)


@pytest.mark.parametrize(
    ("target", "merged"),
    [("onnxruntime", {"dense1"}), ("tensorrt", set())],  # a product and the ReLU behind it have one tensor in int8
)
def test_the_error_of_each_layer(target: str, merged: set[str], source: Path, data: Tensor, tmp_path: Path) -> None:
    report = quantize(source, data, tmp_path / "q.onnx", target=target, by_layer=True, batch_size=16)
    ratios = {layer.path: layer.sqnr for layer in report.layers}
    assert {path for path, ratio in ratios.items() if ratio is None} == merged
    assert all(ratio is None or 15 < ratio < 80 for ratio in ratios.values()), ratios
    assert ratios["head"] == pytest.approx(report.outputs[0].sqnr, abs=3)  # which is that of all batches


def test_below_a_threshold_nothing_is_written(source: Path, data: Tensor, tmp_path: Path) -> None:
    target = tmp_path / "int8.onnx"
    target.write_bytes(b"older")
    with pytest.raises(ParityError, match=r"SQNR of \d+\.\d dB, at least 90 are asked for.*\n.*dB\) gain most"):
        quantize(source, data, target, min_sqnr=90, rank=True)
    with pytest.raises(ParityError, match=r"agrees in .* of its rows, at least 100\.00% are asked for"):
        quantize(source, data, target, min_agreement=1.0, method="percentile", percentile=60)
    assert target.read_bytes() == b"older"
    assert [*tmp_path.iterdir()] == [target]


def test_other_data_and_pytorch_as_the_reference(
    source: Path, model: nn.Module, data: Tensor, made: nnorm_export.QuantizeReport, tmp_path: Path
) -> None:
    report = quantize(source, data, tmp_path / "int8.onnx", test={"image": data[:5]}, model=model)
    assert (report.reference, report.compared) == ("PyTorch", "test")
    assert report.outputs[0].rows == 5
    assert report.outputs[0].sqnr == pytest.approx(made.outputs[0].sqnr, abs=6)
    with pytest.raises(InputError, match="Two returns 2 tensors"):
        quantize(source, data, tmp_path / "int8.onnx", model=Two())


class Two(nn.Module):
    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        return image, image


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.numpy().astype(np.float64),
        lambda x: [x],
        lambda x: {"image": x},
        lambda x: iter([{"image": x[:30]}, (x[30:],)]),
        lambda x: DataLoader(TensorDataset(x), batch_size=30),
        Batches,
    ],
    ids=["float64", "by position", "by name", "batches", "DataLoader", "Dataset"],
)
def test_data_in_any_shape_give_the_same_file(
    given: Callable[[Tensor], Any], source: Path, data: Tensor, made: nnorm_export.QuantizeReport, tmp_path: Path
) -> None:
    report = quantize(source, given(data), tmp_path / "int8.onnx")
    assert report.path.read_bytes() == made.path.read_bytes()


def test_forms(source: Path, data: Tensor, made: nnorm_export.QuantizeReport, tmp_path: Path) -> None:
    custom, primitives = tmp_path / "custom.onnx", tmp_path / "primitives.onnx"
    for path in (custom, primitives):
        nnorm_export.change_form(source, path, path.stem, verify=False)
    report = quantize(custom, data, tmp_path / "custom.int8.onnx", external_data=True)
    assert report.outputs[0].sqnr == pytest.approx(made.outputs[0].sqnr, abs=0.5)
    assert nodes(report.path) == nodes(made.path)
    (weights,) = tmp_path.glob("custom.int8.onnx.*.data")
    assert set(describe(report.path).files) == {"custom.int8.onnx", weights.name}
    report = quantize(primitives, data[:8], tmp_path / "primitives.int8.onnx")
    assert [notice.partition(":")[0] for notice in report.notices] == [
        f"the 6 normalizations of {primitives} are inlined, and stay float",
        "calibrated on 8 samples",
    ]
    assert report.outputs[0].sqnr > 20
    report = quantize(source, data, tmp_path / "standard.int8.onnx", form="primitives")
    assert {layer.kept for layer in report.layers if "Norm" in layer.op_types} == {
        "the form primitives has no tables",
        "it computes statistics from its input",
    }
    assert report.outputs[0].sqnr == pytest.approx(made.outputs[0].sqnr, abs=1)
    assert {node.domain for node in onnx.load(report.path).graph.node} == {""}
    proto = onnx.load(report.path)
    assert {tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) == 4} == {onnx.TensorProto.INT8}


@needs_kernels
def test_onnxruntime_cancels_the_transposes(made: nnorm_export.QuantizeReport, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    nnorm_export.register(options)
    onnxruntime.InferenceSession(made.path, options, providers=["CPUExecutionProvider"])
    found = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert {name: found[name] for name in TABLES} == TABLES
    assert found["QLinearConv"] == 4
    assert found["Transpose"] == 2  # of the input, and before GroupNormalNorm


def test_a_fixed_batch_takes_whole_batches(model: nn.Module, data: Tensor, tmp_path: Path) -> None:
    fixed = export(model, data[:16], tmp_path / "net.onnx", dynamic_shapes={}, verify=False).path
    report = quantize(fixed, data, tmp_path / "int8.onnx")
    assert report.samples == 32
    assert report.outputs[0].rows == 32
    with pytest.raises(InputError, match="the file takes more at a time than there are"):
        quantize(fixed, data[:15], tmp_path / "int8.onnx")

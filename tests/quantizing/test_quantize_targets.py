"""quantize(target=…): files in int8 for TensorRT and OpenVINO. Kernels of TensorRT-RTX: tests/tensorrt_engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import run
from network_with_attention import images, quantize_for_all, write_network
from onnx import numpy_helper
from torch import Tensor

from nnorm_export import ExportError, ModelFileError, QuantizeReport, load, quantize
from nnorm_export.files.onnx_file import read
from nnorm_export.quantizing.schemes import SCHEMES
from nnorm_export.tensorrt.parser_input import write_for_parser

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data() -> Tensor:
    return images()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_network(tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def made(source: Path) -> dict[str, QuantizeReport]:
    return quantize_for_all(source)


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_only_what_products_read_is_in_8_bits(target: str, made: dict[str, QuantizeReport]) -> None:
    report = made[target]
    assert report.outputs[0].sqnr > made["onnxruntime"].outputs[0].sqnr - 3
    assert report.activation == "int8"
    graph = onnx.load(report.path).graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    quantized = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert len(quantized) > 10
    for node in quantized:
        zero_point = weights[node.input[2]]
        assert zero_point.dtype == np.int8
        assert not zero_point.any()
        assert readers[node.output[0]] <= {"Conv", "Gemm", "MatMul"}
    assert {layer.kept for layer in report.layers if "Norm" in layer.op_types} == {
        f"{SCHEMES[target].title} computes norms in float",
        "it computes statistics from its input",
    }
    assert {layer.kept for layer in report.layers if "Norm" not in layer.op_types} == {""}


def test_openvino_computes_what_onnxruntime_does(made: dict[str, QuantizeReport], data: Tensor) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    path = made["openvino"].path
    (expected,) = load(path, "onnxruntime")(data.numpy())
    (actual,) = load(path, "openvino")(data)
    noise = np.square(actual - expected).mean() / np.square(expected).mean()
    assert 10 * np.log10(noise) < -made["openvino"].outputs[0].sqnr + 6  # it rounds at other places


def test_tensorrt_is_not_given_other_zero_points(made: dict[str, QuantizeReport], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"zero point .* is not 0, as TensorRT requires; .*--target tensorrt"):
        write_for_parser(read(made["onnxruntime"].path), frozenset(), tmp_path)
    written = onnx.load(write_for_parser(read(made["tensorrt"].path), frozenset(), tmp_path))
    assert {node.domain for node in written.graph.node} == {""}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tflite"}, "unknown target 'tflite'; choose one of onnxruntime, tensorrt, openvino"),
        ({"target": "tensorrt", "activation": "uint8"}, r"takes activation int8: leave out .*--activation uint8"),
        ({"target": "openvino", "form": "portable"}, r"takes form primitives: leave out .*--form portable"),
        ({"form": "onnx"}, "unknown form 'onnx'; choose one of portable, primitives, custom"),
    ],
)
def test_refused_options(options: dict[str, str], message: str, source: Path, data: Tensor) -> None:
    with pytest.raises(ExportError, match=message):
        quantize(source, data, source.with_name("other.onnx"), **options)


def test_the_command(source: Path, made: dict[str, QuantizeReport], tmp_path: Path) -> None:
    out = tmp_path / "net.int8.onnx"
    run("quantize", source, "--calibrate", "48,3,6,5", "--target", "tensorrt", "-o", out, "--min-sqnr=-50")
    operators = [[node.op_type for node in onnx.load(path).graph.node] for path in (out, made["tensorrt"].path)]
    assert operators[0] == operators[1]

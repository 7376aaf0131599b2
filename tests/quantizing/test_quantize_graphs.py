"""quantize() on graphs that ONNX Runtime's quantizer would compute otherwise, refuse, or never finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from sampled import long
from torch import Tensor, nn
from torch.nn import functional

from nnorm_export import InputError, ModelFileError, export, layers, optimize, quantize
from nnorm_export.converting.change_form import change_form
from nnorm_export.quantizing.report import QuantizeReport

pytestmark = pytest.mark.slow

IMAGES = (64, 3, 12, 12)


class Of(nn.Module):
    """A function of the tensors of a layer and an input."""

    def __init__(self, layer: nn.Module, of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.of = layer, of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.layer, x)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def in_int8(model: nn.Module, shape: tuple[int, ...], folder: Path, **options: Any) -> QuantizeReport:
    x = torch.randn(shape)
    path = export(model.eval(), x, folder / "float.onnx", verify=False).path
    return quantize(path, x, folder / "int8.onnx", **options)


def op_types(report: QuantizeReport) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(report.path).graph.node)


def from_text(text: str, path: Path, **weights: np.ndarray[Any, Any]) -> Path:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> net {text}')
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
    return path


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("least", [-1e4, long(-1e9), float("-inf")])
def test_the_mask_of_an_attention_takes_no_steps_from_its_scores(least: float, tmp_path: Path) -> None:
    attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def masked(layer: nn.Module, x: Tensor) -> Tensor:
        mask = torch.full((16, 16), least).triu(1)
        y: Tensor = layer(3 * x, 3 * x, x, attn_mask=mask, need_weights=False)[0]
        return y

    found = in_int8(Of(attention, masked), (64, 16, 32), tmp_path).outputs[0].sqnr
    plain = in_int8(
        Of(attention, lambda layer, x: layer(3 * x, 3 * x, x, need_weights=False)[0]), (64, 16, 32), tmp_path
    )
    assert found > plain.outputs[0].sqnr - 3


@pytest.mark.parametrize("bounds", [(0.5, 1.0), (-1.0, -0.5), (0.5, None)])
def test_bounds_that_leave_out_zero_stay(bounds: tuple[float, float | None], tmp_path: Path) -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    clamped = Of(convolutions, lambda layer, x: layer[1](layer[0](x).clamp(*bounds)))
    report = in_int8(clamped, IMAGES, tmp_path)
    assert op_types(report)["Clip"] == 1
    assert report.outputs[0].sqnr > 25
    within = Of(convolutions, lambda layer, x: layer[1](layer[0](x).clamp(0, 6)))
    assert op_types(in_int8(within, IMAGES, tmp_path))["Clip"] == 0  # the scale says the same


def test_a_weight_that_two_products_read_along_other_axes(tmp_path: Path) -> None:
    scales = torch.logspace(-2, 1, 16)[:, None]
    tied = Of(nn.Linear(16, 16, bias=False), lambda layer, x: torch.matmul(layer(x), layer.weight))
    with torch.no_grad():
        tied.layer.weight *= scales
    assert in_int8(tied, (64, 16), tmp_path).outputs[0].sqnr > 25
    convolution = Of(nn.Conv2d(3, 8, 3), lambda layer, x: functional.conv_transpose2d(layer(x), layer.weight))
    assert in_int8(convolution, IMAGES, tmp_path).outputs[0].sqnr > 25


def test_calls_of_one_layer_share_its_weight(tmp_path: Path) -> None:
    twice = Of(nn.Conv2d(8, 8, 3, padding=1), lambda layer, x: layer(layer(x).relu()))
    report = in_int8(twice, (64, 8, 12, 12), tmp_path)
    weights = [tensor.name for tensor in onnx.load(report.path).graph.initializer if len(tensor.dims) == 4]
    assert len(weights) == 1


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_the_factor_of_a_bias(beta: float, tmp_path: Path) -> None:
    bias, weight = nn.Parameter(10 * torch.randn(8)), nn.Parameter(torch.randn(16, 8))
    layer = nn.ParameterList([bias, weight])
    report = in_int8(Of(layer, lambda p, x: torch.addmm(p[0], x, p[1], beta=beta)), (64, 16), tmp_path)
    assert report.outputs[0].sqnr > 25


def test_infinite_padding_stays_float(tmp_path: Path) -> None:
    def pooled(layer: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = layer[1](functional.max_pool2d(functional.pad(layer[0](x), (1, 1, 1, 1), value=-torch.inf), 3))
        return y

    model = Of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), pooled)
    assert in_int8(model, IMAGES, tmp_path).outputs[0].sqnr > 25
    with pytest.raises(InputError, match=r"the method percentile finds no range.*the method minmax leaves"):
        in_int8(model, IMAGES, tmp_path, method="percentile")


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "openvino"])
def test_keep_that_leaves_no_product(target: str, tmp_path: Path) -> None:
    model = nn.Sequential(layers.BatchNormalNorm2d(3), nn.Conv2d(3, 8, 3))
    with pytest.raises(ModelFileError, match="nothing can be quantized: keep leaves none of its layers"):
        in_int8(model, IMAGES, tmp_path, keep=["0", "1"], target=target)
    if target != "onnxruntime":
        with pytest.raises(ModelFileError, match="nothing can be quantized"):
            in_int8(model, IMAGES, tmp_path, keep=["1"], target=target)
    assert not (tmp_path / "int8.onnx").exists()


def test_the_gain_of_the_only_layer(tmp_path: Path) -> None:
    (layer,) = in_int8(nn.Linear(8, 4), (64, 8), tmp_path, rank=True).layers
    assert layer.gain == np.inf


@pytest.mark.parametrize("write", [quantize, optimize, change_form])
def test_the_weights_of_the_source_are_not_replaced(write: Callable[..., Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layers.BatchNormalNorm2d(8))
    path = export(model.eval(), torch.randn(IMAGES), tmp_path / "m.onnx", external_data=True, verify=False).path
    (data,) = [entry for entry in tmp_path.iterdir() if entry != path]
    before = data.read_bytes()
    arguments = (torch.randn(IMAGES),) if write is quantize else ()
    options = {"form": "portable"} if write is change_form else {}
    with pytest.raises(ModelFileError, match="write it to another name"):
        write(path, *arguments, data, **options)
    assert data.read_bytes() == before


def test_a_bias_that_another_node_reads(tmp_path: Path) -> None:
    path = from_text(
        """(float[N,3,8,8] x) => (float[N,4,6,6] y)
        { c = Conv(x, w, b)
          s = Constant<value_ints = [1, 4, 1, 1]>()
          r = Reshape(b, s)
          y = Add(c, r) }""",
        tmp_path / "float.onnx",
        w=normal(4, 3, 3, 3),
        b=normal(4),
    )
    assert quantize(path, normal(64, 3, 8, 8), tmp_path / "int8.onnx").outputs[0].sqnr > 25


def test_a_tensor_that_a_branch_reads(tmp_path: Path) -> None:
    path = from_text(
        """(float[N,3,8,8] x, bool f) => (float[N,4,4,4] y, float z)
        { c = Conv(x, w)
          r = Relu(c)
          y = Conv(r, v)
          z = If(f) <then_branch = a () => (float s) { s = ReduceMax<keepdims = 0>(c) },
                     else_branch = b () => (float t) { t = ReduceMin<keepdims = 0>(c) }> }""",
        tmp_path / "float.onnx",
        w=normal(4, 3, 3, 3),
        v=normal(4, 4, 3, 3),
    )
    report = quantize(path, {"x": normal(64, 3, 8, 8), "f": np.array(True)}, tmp_path / "int8.onnx")
    assert min(output.sqnr for output in report.outputs) > 25


def test_outputs_whose_shape_depends_on_the_data(tmp_path: Path) -> None:
    convolution = Of(nn.Conv2d(3, 4, 3), lambda layer, x: (layer(x), (layer(x) > 0).nonzero()))
    scores, places = in_int8(convolution, IMAGES, tmp_path, min_sqnr=20.0).outputs
    assert scores.compared
    assert not places.compared
    assert "not compared, because its shape depends on the data" in str(places)


def test_outputs_of_another_model(tmp_path: Path) -> None:
    x = torch.randn(64, 16)
    path = export(nn.Linear(16, 8), x, tmp_path / "float.onnx", verify=False).path
    with pytest.raises(InputError, match=r"Linear returns output of shape \[32, 5\].* give the model"):
        quantize(path, x, tmp_path / "int8.onnx", model=nn.Linear(16, 5))


def test_names_that_the_graph_has_already(tmp_path: Path) -> None:
    path = from_text(
        """(float[N,8] x) => (float[N,8] y, float[8] s)
        { h = Gemm<beta = 0.25>(x, w, b)
          s = Neg(b)
          m = MatMul(h, w)
          y = MatMul(m, v) }""",
        tmp_path / "float.onnx",
        w=normal(8, 8),
        b=10 * normal(8),
        v=normal(8, 8),
    )
    proto = onnx.load(path)
    taken = {"b": "fc/bias", "v": "w/of_fc"}
    for each in proto.graph.initializer:
        each.name = taken.get(each.name, each.name)
    for node in proto.graph.node:
        node.input[:] = [taken.get(name, name) for name in node.input]
    proto.graph.node[0].name = "fc"
    proto.graph.node[0].attribute.add(name="transB", i=1, type=onnx.AttributeProto.INT)
    onnx.save(proto, path)
    report = quantize(path, normal(64, 8), tmp_path / "int8.onnx")
    assert min(output.sqnr for output in report.outputs) > 20


def test_a_layer_that_is_kept_has_its_own_weight(tmp_path: Path) -> None:
    path = from_text(
        "(float[N,8] x) => (float[N,8] y, float[N,8] z) { y = MatMul(x, w) z = MatMul(x, w) }",
        tmp_path / "float.onnx",
        w=normal(8, 8),
    )
    proto = onnx.load(path)
    proto.graph.node[1].name = "kept"
    onnx.save(proto, path)
    quantized = onnx.load(quantize(path, normal(64, 8), tmp_path / "int8.onnx", keep=["kept"]).path)
    (kept,) = [node for node in quantized.graph.node if node.name == "kept"]
    assert kept.input[1] in {tensor.name for tensor in quantized.graph.initializer}


class Returned(nn.Module):
    """The result of a norm between convolutions is an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), layers.BatchNormalNorm2d(8), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.first(x)).relu()
        return y, self.second(y)


def test_a_norm_between_convolutions_that_is_an_output(tmp_path: Path) -> None:
    (table,) = [
        node for node in onnx.load(in_int8(Returned(), IMAGES, tmp_path).path).graph.node if node.domain == "nnorm"
    ]
    assert [attribute.i for attribute in table.attribute if attribute.name == "axis"] == [-1]


def test_transposed_convolutions_are_in_float_for_onnxruntime(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 3))
    report = in_int8(model, IMAGES, tmp_path)
    assert [layer.kept for layer in report.layers] == ["", "ONNX Runtime has no int8 kernel for ConvTranspose"]
    with pytest.raises(ModelFileError, match="nothing can be quantized: ONNX Runtime has no int8 kernel"):
        in_int8(model[1], (64, 8, 6, 6), tmp_path)
    assert [layer.kept for layer in in_int8(model, IMAGES, tmp_path, target="tensorrt").layers] == ["", ""]


def test_sums_before_a_softmax_that_is_no_attention(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = (self.first(x) + x).relu()
            return (self.second(y) + y).relu().softmax(1)

    report = in_int8(Residual(), IMAGES, tmp_path)
    assert op_types(report)["Relu"] == 0  # they are parts of the scales behind the sums


def test_what_is_said_of_files_and_data(tmp_path: Path) -> None:
    x = normal(64, 3, 8, 8)
    text = "(float[N,3,8,8] x) => (float[N,4,6,6] y) { y = Conv(x, w) }"
    path = from_text(text, tmp_path / "float.onnx", w=normal(4, 3, 3, 3))
    target = tmp_path / "int8.onnx"
    with pytest.raises((InputError, ModelFileError), match=r"numbers are too great|no range|infinite"):
        quantize(path, 1e38 * np.sign(x), target)
    for options in ({"batch_size": "8"}, {"batch_size": 2.5}, {"percentile": "99", "method": "percentile"}):
        with pytest.raises(Exception, match=rf"{next(iter(options))} is .*; give a") as caught:
            quantize(path, x, target, **options)
        assert type(caught.value).__name__ == "ExportError"
    assert quantize(path, [x[:32], x[32:]], target).samples == 64
    old = onnx.load(path)
    old.opset_import[0].version = 11
    onnx.save(old, tmp_path / "old.onnx")
    with pytest.raises(ModelFileError, match=r"its opset is 11, and .* needs 13; convert it"):
        quantize(tmp_path / "old.onnx", x, target)
    assert quantize(tmp_path / "old.onnx", x, target, weights="per-tensor").outputs[0].sqnr > 20
    two = from_text(
        "(float[N,4] a, float[N,4] b) => (float[N,4] y) { m = MatMul(a, w) y = Add(m, b) }",
        tmp_path / "two.onnx",
        w=normal(4, 4),
    )
    with pytest.raises(InputError, match="different numbers of samples: 40 of a, 7 of b"):
        quantize(two, {"a": normal(40, 4), "b": normal(7, 4)}, target)


def test_int8_files_of_transposed_convolutions_run_without_kernels(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layers.BatchNormalNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2))
    report = in_int8(model, IMAGES, tmp_path)
    session = onnxruntime.InferenceSession(report.path, providers=["CPUExecutionProvider"])
    assert session.run(None, {session.get_inputs()[0].name: normal(2, 3, 12, 12)})[0].shape == (2, 8, 11, 11)

"""bisect() goes on by itself with the layers between two normalizations, and names the constants that differ."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from sampled import every_second_row
from torch import Tensor, nn
from typer.testing import CliRunner

from nnorm_export import bisect, export, freeze, layers
from nnorm_export.cli import app
from nnorm_export.dtypes import DTYPES
from nnorm_export.models.modules import named_layers
from nnorm_export.parity.layer_by_layer.between import Folded, layers_of, nodes_between
from nnorm_export.parity.layer_by_layer.bisect import _own as own
from nnorm_export.parity.layer_by_layer.bisection import Bisection
from nnorm_export.parity.layer_by_layer.constants import differing_constants
from nnorm_export.parity.verdict.outcome import OutputParity

Array = np.ndarray[Any, Any]
Plant = Callable[[Array], object]


class Block(nn.Module):
    """A residual block with a layer on the skip path, a Linear on more than two axes, and a parameter of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = layers.BatchNormalNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.bn2 = layers.BatchNormalNorm2d(channels)
        self.down = nn.Conv2d(channels, channels, 1)
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.linear(self.down(x)) * self.gain
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + skip).relu()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(4), Block(4)
        self.rows = layers.LayerNormalNorm(4)
        self.head = nn.Linear(4, 3)
        self.embedding = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rows(self.b(self.a(x))).mean((1, 2)) + self.embedding)
        return y


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Blocks()
    for module in model.modules():
        if isinstance(module, layers.BatchNormalNorm2d):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(0.2, 1)
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.running_lmbda.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(3, 4, 5, 4, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def sound(model: nn.Module, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(model, x, tmp_path_factory.mktemp("blocks") / "m.onnx", verify=False).path


def planted(source: Path, target: Path, name: str, plant: Plant) -> onnx.ModelProto:
    """Writes a copy of a file with another constant; ``Linear`` is the last of the Linear layers on four axes."""
    proto = onnx.load(source)
    if name == "Linear":
        name = [node for node in proto.graph.node if node.op_type == "MatMul"][-1].input[1]
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
    values = numpy_helper.to_array(tensor).copy()
    plant(values)
    tensor.CopyFrom(numpy_helper.from_array(values, name))
    onnx.save(proto, target)
    return proto


def times(index: int, factor: float) -> Plant:
    return lambda values: values.reshape(-1).__setitem__(index, values.reshape(-1)[index] * factor)


def swap(first: int, second: int, axis: int = 0) -> Plant:
    def plant(values: Array) -> None:
        rows = np.moveaxis(values, axis, 0)
        rows[[first, second]] = rows[[second, first]]

    return plant


def all_times(factor: float) -> Plant:
    return lambda values: values.__imul__(np.asarray(factor, values.dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constant", "plant", "layer", "difference"),
    every_second_row(
        [
            ("a.bn2.scale", times(1, 1.02), "a.bn2", "a.bn2.scale: 1 of 4 values, by 2 %"),
            ("b.conv1.weight", times(40, 1.5), "b.conv1", "b.conv1.weight: 1 of 144 values, by 50 %"),
            ("b.down.bias", times(1, 3), "b.down", "b.down.bias: 1 of 4 values, by 200 %"),
            ("b.bn1.exponent_pos", times(1, 1.05), "b.bn1", "b.bn1.exponent_pos: 1 of 4 values, by 5 %"),
            ("b.bn1.scale", swap(0, 2), "b.bn1", "b.bn1.scale: entries 0 and 2 are swapped"),
            ("b.conv2.weight", swap(1, 3), "b.conv2", "b.conv2.weight: entries 1 and 3 of axis 0 are swapped"),
            ("a.conv1.weight", swap(0, 1, 1), "a.conv1", "a.conv1.weight: entries 0 and 1 of axis 1 are swapped"),
            ("Linear", times(5, 1.2), "b.linear", "b.linear.weight: 1 of 16 values, by 20 %"),
            ("a.gain", times(0, 1.1), "a", "a.gain: 1 of 4 values, by 10 %"),
            ("head.weight", all_times(1.03), "head", "head.weight: 12 of 12 values, by at most 3 %"),
            ("embedding", times(1, 1.5), None, "embedding: 1 of 4 values, by 50 %"),
        ]
    ),
)
def test_planted_constants(
    constant: str,
    plant: Plant,
    layer: str | None,
    difference: str,
    sound: Path,
    model: nn.Module,
    x: Tensor,
    tmp_path: Path,
) -> None:
    planted(sound, tmp_path / "m.onnx", constant, plant)
    report = bisect(tmp_path / "m.onnx", model, x)
    assert not report
    assert (report.culprit.path if report.culprit else None) == layer, report.verdict
    assert report.constants == [difference]
    assert report.verdict.endswith(f"Constants that differ from the model's: {difference}")
    if layer is None:
        assert "leaves PyTorch between layer rows and layer head" in report.verdict
    assert report.notes == []


def test_a_verdict_lists_a_few_constants() -> None:
    wrong = OutputParity("y", False, 1.0, 1.0, 9.0, None, 3, "float32")
    names = [f"w{index}: 1 of 2 values" for index in range(9)]
    for count, end in ((6, "; w5: 1 of 2 values"), (9, "; w5: 1 of 2 values; and 3 others")):
        assert Bisection("onnxruntime", [], [wrong], [], constants=names[:count]).verdict.endswith(end)


@pytest.mark.slow
def test_a_running_mean_of_the_model(sound: Path, model: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(model)
    other.b.bn2.running_mean[1] *= 1.5
    report = bisect(sound, other, x)
    assert report.other_weights
    assert report.culprit is not None
    assert report.culprit.path == "b.bn2"
    assert [text.partition(" values")[0] for text in report.constants] == ["b.bn2.shift: 1 of 4"]


@pytest.mark.slow
def test_a_sound_file_names_nothing(sound: Path, model: nn.Module, x: Tensor) -> None:
    report = bisect(sound, model, x)
    assert report
    assert (report.constants, report.notes) == ([], [])
    assert len(report.layers) == 5


@pytest.mark.slow
def test_a_layer_that_cannot_run_alone_is_a_note(
    sound: Path, model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(sound, tmp_path / "m.onnx", "b.conv1.weight", times(0, 2))

    def refuse(*_: Any) -> Any:
        raise AttributeError("no cache")

    monkeypatch.setattr(
        "nnorm_export.parity.layer_by_layer.bisect._own",
        lambda proto, cut, *rest: own(proto, cut, *rest) if len(cut) == 5 else refuse(),
    )
    report = bisect(tmp_path / "m.onnx", model, x)
    assert "leaves PyTorch between layer a.bn2 and layer b.bn1" in report.verdict
    assert "b.conv1.weight: 1 of 144 values, by 100 %" in report.verdict
    (note,) = report.notes
    assert "b.conv1" in note
    assert note.endswith("could not be run alone: no cache")


@pytest.mark.slow
def test_a_layer_into_which_another_is_folded_is_a_note(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layers.LayerNormalNorm(6), nn.Linear(6, 5), nn.BatchNorm1d(5), layers.BatchNormalNorm1d(5))
    model[2].running_var.uniform_(0.5, 2)
    example = torch.randn(9, 6)
    path = export(model.eval(), example, tmp_path / "m.onnx", verify=False).path
    planted(path, path, "1.weight", times(3, 2))
    report = bisect(path, model, example)
    assert "leaves PyTorch between layer 0 and layer 3" in report.verdict
    assert report.notes == ["layer 2 is folded into the layer before it in this file, and was not run alone"]
    assert report.constants == []  # the weight in the file is that of both layers


@pytest.mark.slow
def test_the_verdict_is_printed_once(
    sound: Path, model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(model, tmp_path / "model.pth")
    np.savez("data.npz", x=x.numpy())
    (tmp_path / "blocks.py").write_text(
        "import torch\ndef build():\n    return torch.load('model.pth', weights_only=False)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    planted(sound, tmp_path / "m.onnx", "b.down.bias", times(1, 3))
    command = ["bisect", "m.onnx", "-m", "blocks:build", "-i", "data.npz"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 1
    assert shown.output.count("b.down.bias: 1 of 4 values, by 200 %") == 1
    assert shown.output.count("computes something else") == 1
    assert "verdict" not in shown.stdout
    as_json = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert as_json["constants"] == ["b.down.bias: 1 of 4 values, by 200 %"]


def small(weight: Array, name: str = "net.weight", scope: str = "net") -> onnx.ModelProto:
    """A product with a constant that the layer ``scope`` made."""
    node = helper.make_node("MatMul", ["x", name], ["y"])
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", scope, "node"]))
    value = helper.make_tensor_value_info
    x, y = value("x", onnx.TensorProto.FLOAT, None), value("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "net", [x], [y], [numpy_helper.from_array(weight, name)])
    return helper.make_model(graph)


def found(proto: onnx.ModelProto, state: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None) -> Any:
    return differing_constants(proto, [0], state, Folded(modules or {}, []))


ROW = torch.tensor([[1.0, 2.0, -3.0], [0.0, 5.0, 6.0]])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([[1, 2, -3], [0, 5, 6]], None),
        ([[1, 2, -3], [0, 5, 6 * (1 + 2.0**-51)]], None),
        ([[1, 2, -3], [0, 5, 9]], "1 of 6 values, by 50 %"),
        ([[1, 2, 3], [0, 5, 6]], "1 of 6 values, by 200 %"),
        ([[1, 2, -3], [0.25, 5, 6]], "1 of 6 values, by 0.25"),
        ([[1.06, 2, -3], [0, 5, 6.6]], "2 of 6 values, by at most 10 %"),
        ([[0, 5, 6], [1, 2, -3]], "entries 0 and 1 of axis 0 are swapped"),
        ([[2, 1, -3], [5, 0, 6]], "entries 0 and 1 of axis 1 are swapped"),
        ([[1, 2, float("nan")], [0, 5, 6]], "1 of 6 values, by nan"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_differences(values: list[list[float]], text: str | None, dtype: str) -> None:
    array = np.array(values).astype(DTYPES[dtype].numpy)
    differences = found(small(array), {"net.weight": ROW.to(getattr(torch, dtype))})
    if dtype != "float32" and text:  # the dtype decides the last digits
        differences = [difference.partition(" by")[0] for difference in differences]
        text = text.partition(" by")[0]
    assert differences == ([f"net.weight: {text}"] if text else [])


@pytest.mark.parametrize(
    ("weight", "name", "text"),
    [
        (ROW.T.numpy(), "val_3", None),  # transposed: no name of the model is left
        (ROW.T.numpy() * np.float32(2), "val_3", "net.weight: 5 of 6 values, by at most 100 %"),
        (ROW.numpy()[:1], "net.weight", "net.weight: shape [1, 3], not [2, 3]"),
        (ROW.numpy() * np.float32(2), "other.weight", None),  # of no layer
        (ROW.numpy().reshape(-1)[:4] * np.float32(2), "val_3", "net.weight: shape [4], not [2, 3]"),
    ],
)
def test_names_and_shapes(weight: Array, name: str, text: str | None) -> None:
    state = {} if name == "other.weight" else {"net.weight": ROW}
    assert found(small(weight, name), state) == ([text] if text else [])


def test_a_constant_into_which_a_norm_is_folded_is_not_compared() -> None:
    proto = small(ROW.numpy() * np.float32(2))
    assert found(proto, {"net.weight": ROW}) == ["net.weight: 5 of 6 values, by at most 100 %"]
    assert found(proto, {"net.weight": ROW}, {"net": nn.BatchNorm2d(3)}) == []


def test_integers_are_compared_too() -> None:
    proto = small(np.array([1, 2, 4]), "net.table")
    assert found(proto, {"net.table": torch.tensor([1, 2, 3])}) == ["net.table: 1 of 3 values"]


@pytest.mark.parametrize(
    ("wrong", "right", "nodes", "paths"),
    [
        (["y"], [], {"a.down", "a.linear", "a", "a.bn1", "a.conv1", "a.conv2", "a.bn2"}, ["a.conv2", "a.down"]),
        (["y"], ["z"], {"a.down", "a.linear", "a", "a.bn2"}, ["a.down"]),
        (["z"], ["u"], {"a.conv2"}, ["a.conv2"]),
        (["u"], ["z"], {"a.bn1", "a.conv1"}, ["a.bn1"]),  # hidden: the values before the right one
    ],
)
def test_what_lies_between(wrong: list[str], right: list[str], nodes: set[str], paths: list[str]) -> None:
    """The block above, with its values named: y = bn2(z = conv2(u = bn1(conv1(x)))) + linear(down(x)) · gain."""
    rows = [
        ("a.down", ["x"], "d"), ("a.linear", ["d"], "l"), ("a", ["l"], "g"), ("a.conv1", ["x"], "c"),
        ("a.bn1", ["c"], "u"), ("a.conv2", ["u"], "z"), ("a.bn2", ["z", "g"], "y"),
    ]  # fmt: skip
    proto = onnx.ModelProto()
    for path, inputs, output in rows:
        node = helper.make_node("Any", inputs, [output])
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(["", "a", path, "node"]))
        proto.graph.node.append(node)
    between = nodes_between(proto, wrong, right)
    assert {rows[index][0] for index in between} == nodes
    found, notes = layers_of(proto, between, Folded(dict(named_layers(Blocks())), []))
    assert notes == []
    assert set(paths) <= set(found)
    assert found == sorted(found, key=lambda path: (-path.count("."), path))


def test_a_frozen_state_has_the_names_of_the_file(sound: Path, model: nn.Module) -> None:
    """Else nothing would be compared."""
    proto = onnx.load(sound)
    state = freeze(model).state_dict()
    named = [tensor.name for tensor in proto.graph.initializer if tensor.name in state]
    assert len(named) >= 30
    assert found_in(proto, state) == []


def found_in(proto: onnx.ModelProto, state: Mapping[str, Tensor]) -> list[str]:
    return differing_constants(proto, range(len(proto.graph.node)), state, Folded({}, []))

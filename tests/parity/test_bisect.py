"""bisect(): a fault planted in one layer of thirty is found in that layer, on every runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from sampled import every_second, long
from small_network import Network, randomized
from torch import Tensor, nn
from typer.testing import CliRunner

from nnorm_export import InputError, ModelFileError, bisect, export, freeze, layers, optimize
from nnorm_export.cli import app

RUNTIMES = ["onnxruntime", "reference"]
LAYERS = 30
ROWS = 15  # the one LayerNormalNorm; the others are batch norms


class Fifty(nn.Module):
    """Fifty normalizations on a residual stream; every fifth adds it before a ReLU, every other third has a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(LAYERS))
        self.norms = nn.ModuleList(
            layers.LayerNormalNorm(12) if index == ROWS else layers.BatchNormalNorm1d(12) for index in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index, (linear, norm) in enumerate(zip(self.linears, self.norms, strict=True)):
            y = norm(linear(x))
            if index == ROWS:
                x = y
            elif index % 5 == 0:
                x = (y + x).relu()
            else:
                x = y.relu() if index % 3 == 0 else y
        return x


@pytest.fixture(scope="module")
def thirty() -> nn.Module:
    torch.manual_seed(0)
    model = Fifty()
    model(torch.randn(64, 12))  # statistics that the layers see
    for norm in model.norms:
        if isinstance(norm, layers.BatchNormalNorm1d):
            norm.momentum = None
            norm.num_batches_tracked.zero_()
    for _ in range(3):
        model(torch.randn(64, 12))
    return model.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def sound(thirty: nn.Module, images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported file, of which the tests change copies."""
    return export(thirty, images, tmp_path_factory.mktemp("thirty") / "m.onnx").path


def node_of(proto: onnx.ModelProto, layer: int) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.name.startswith(f"norms.{layer}/"))


def wrong_lmbda(proto: onnx.ModelProto, layer: int) -> None:
    for position, sign in ((3, 1), (4, -1)):
        name = node_of(proto, layer).input[position]
        tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
        values = numpy_helper.to_array(tensor) + np.float32(sign * 1e-3)
        tensor.CopyFrom(numpy_helper.from_array(values, name))


def swapped_exponents(proto: onnx.ModelProto, layer: int) -> None:
    node = node_of(proto, layer)
    node.input[3], node.input[4] = node.input[4], node.input[3]


def half_variance(proto: onnx.ModelProto, layer: int) -> None:
    """The variance in the body of the one LayerNormalNorm has the 11 bits of a float16.

    By Veltkamp's splitting, c − (c − x) with c = (2¹³ + 1)·x: casts ONNX Runtime would take out.
    """
    body = next(function for function in proto.functions if function.name == "LayerNormalNorm").node
    index, variance = next((index, node) for index, node in enumerate(body) if node.output[0].endswith("variance"))
    rounded = variance.output[0]
    variance.output[0] = "exact"
    factor = onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [8193.0])
    for offset, node in enumerate(
        (
            onnx.helper.make_node("Constant", [], ["factor"], value=factor),
            onnx.helper.make_node("Mul", ["exact", "factor"], ["greater"]),
            onnx.helper.make_node("Sub", ["greater", "exact"], ["difference"]),
            onnx.helper.make_node("Sub", ["greater", "difference"], [rounded]),
        )
    ):
        body.insert(index + 1 + offset, node)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "implementation"), [("onnxruntime", "kernel"), ("onnxruntime", "body"), long("reference", "body")]
)
def test_a_sound_network(
    runtime: str, implementation: str, sound: Path, thirty: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "body":
        monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    report = bisect(sound, thirty, images, runtime=runtime)
    assert report
    assert report.culprit is None
    assert {layer.implementation for layer in report.layers} == {implementation}


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("plant", "layer"),
    [
        (wrong_lmbda, 0),
        long(wrong_lmbda, 17),
        long(wrong_lmbda, LAYERS - 1),
        (swapped_exponents, 22),
        (half_variance, ROWS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_faults(
    plant: Callable[[onnx.ModelProto, int], None],
    layer: int,
    runtime: str,
    sound: Path,
    thirty: nn.Module,
    images: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if plant is half_variance:
        monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")  # the fault is in the body
    path = tmp_path / "m.onnx"
    proto = onnx.load(sound)
    plant(proto, layer)
    onnx.save(proto, path)
    report = bisect(path, thirty, images, runtime=runtime)
    assert not report
    assert report.runtime == runtime
    assert report.culprit is not None
    assert report.culprit.path == f"norms.{layer}"
    assert f"layer norms.{layer} (" in report.verdict
    assert len(report.layers) == LAYERS
    for found in report.layers:
        assert found.own is not None
        assert found.own.passed == (found.path != f"norms.{layer}")
        if int(found.path.split(".")[1]) <= layer:
            assert found.inherited.passed
    ran_by = {found.implementation for found in report.layers}
    assert ran_by == ({"kernel"} if runtime == "onnxruntime" and plant is not half_variance else {"body"})


@pytest.mark.slow
@pytest.mark.parametrize("runtime", every_second(RUNTIMES))
def test_a_fault_between_layers(runtime: str, sound: Path, thirty: nn.Module, images: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    proto = onnx.load(sound)
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "linears.20.weight")
    values = numpy_helper.to_array(weight)
    wrong = values.copy()
    wrong[0, 0] += 0.01
    weight.CopyFrom(numpy_helper.from_array(wrong, weight.name))
    onnx.save(proto, path)
    for named, compared in (([], ["linears.20"]), (["linears.19"], ["linears.19", "linears.20"])):
        report = bisect(path, thirty, images, runtime=runtime, layers=named)
        assert report.culprit is not None
        assert report.culprit.path == "linears.20"
        assert report.verdict.startswith("layer linears.20 (module) computes something else, on PyTorch's own input: ")
        modules = [layer for layer in report.layers if layer.op_type == "(module)"]
        assert [layer.path for layer in modules] == compared
        (constant,) = report.constants
        assert constant.startswith("linears.20.weight: 1 of 144 values, by ")
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    output = proto.graph.output[0].name
    last = next(node for node in proto.graph.node if output in node.output)
    last.output[0] = "sound"
    proto.graph.node.append(onnx.helper.make_node("Add", ["sound", "sound"], [output]))
    onnx.save(proto, path)
    assert "every layer is sound; the fault lies after layer norms.29: " in bisect(path, thirty, images).verdict


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", long("bf16"), "fp64"])
def test_every_operator_dtype_and_call(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = randomized(Network()).eval()
    image = torch.randn(4, 3, 8, 6)
    path = export(model, image, tmp_path / "m.onnx", dtype=dtype, opset_version=22).path
    if dtype == "fp64":
        model, image = model.double(), image.double()
    report = bisect(path, model, image, runtime=None if dtype == "fp16" else "reference")
    assert report, report.verdict
    assert [(layer.path, layer.call) for layer in report.layers] == [
        ("stem.1", 1),
        ("group", 1),
        ("stem.1", 2),
        ("instance", 1),
        ("head.1", 1),
    ]
    assert all(layer.own is not None for layer in report.layers)


@pytest.mark.slow
def test_a_file_of_another_model_is_refused(sound: Path, thirty: nn.Module, images: Tensor) -> None:
    with pytest.raises(InputError, match=r"Linear has no layer norms\.0, which .* made from another model"):
        bisect(sound, nn.Linear(12, 12), (images,))


@pytest.mark.slow
def test_what_is_refused(sound: Path, thirty: nn.Module, images: Tensor, tmp_path: Path) -> None:
    path = export(thirty, images, tmp_path / "m.onnx", form="primitives", verify=False).path
    with pytest.raises(ModelFileError, match=r"no normalization that is a node \(its form is 'primitives'\)"):
        bisect(path, thirty, images)
    with pytest.raises(InputError, match=r"no layer 'linears\.99'"):
        bisect(sound, thirty, images, layers=["linears.99"])
    (tmp_path / "t.onnx").write_bytes(b"\x00\x01")
    with pytest.raises(ModelFileError, match="not an ONNX model"):
        bisect(tmp_path / "t.onnx", thirty, images)


class Calls(nn.Module):
    """A layer under two names, and one that is called for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a = layers.LayerNormalNorm(6)
        self.b = self.a
        self.c = layers.LayerNormalNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.c(x * 3)
        y = self.c(self.b(self.linear(self.a(x))))
        return self.linear(y)


@pytest.mark.slow
def test_calls_that_cannot_be_told_apart_are_not_blamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Calls().eval(), torch.randn(5, 6)
    path = export(model, x, tmp_path / "m.onnx").path
    report = bisect(path, model, x)
    assert report, report.verdict
    assert report.verdict == "nothing differs"
    assert [layer.call for layer in report.layers] == [1, 2]
    assert report.notes == ["layer c is not compared: it is called 2 times, and not all calls are in the file"]
    report = bisect(path, model, x, layers=["linear"])
    assert report
    assert "layer linear is not compared: it is called 2 times" in " ".join(report.notes)


@pytest.mark.slow
def test_what_is_folded_or_gone_is_refused(tmp_path: Path) -> None:
    x = torch.randn(3, 3, 6, 6)
    norms = nn.BatchNorm2d(4), layers.DecorrelatedBatchNorm2d(4)
    for norm, name, message in (
        (norms[0], "1", "layer 1 is folded into the layer before it|nothing of layer 1 is left"),
        (norms[0], "2", "nothing of layer 2 is left"),
        (norms[1], "0", "layer 0 may have 1 folded into it"),
    ):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Dropout(), layers.BatchNormalNorm2d(4))
        model(torch.randn(9, 3, 6, 6))
        path = export(model.eval(), x, tmp_path / "m.onnx").path
        assert bisect(path, model, x)
        with pytest.raises(InputError, match=message):
            bisect(path, model, x, layers=[name])
    program = torch.export.export(freeze(model), (x,))
    path = export(program, (), tmp_path / "p.onnx").path
    with pytest.raises(InputError, match="is never called in PyTorch; an exported program has no layers"):
        bisect(path, program.module(), x)


@pytest.mark.slow
def test_optimized_files_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), layers.BatchNormalNorm2d(16), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    export(model, x, tmp_path / "m.onnx")
    optimize(tmp_path / "m.onnx", tmp_path / "o.onnx")
    with pytest.raises(ModelFileError, match="optimized, its layers are merged; bisect the portable file"):
        bisect(tmp_path / "o.onnx", model, x)


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Figure = pytest.importorskip(
        "matplotlib.figure", reason="matplotlib is not installed: pip install 'nnorm_export[report]'"
    ).Figure
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text(
        "import torch\nfrom torch import nn\nfrom nnorm_export import layers\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    norms = layers.BatchNormalNorm1d(5), layers.LayerNormalNorm(4)\n"
        "    model = nn.Sequential(nn.Linear(6, 5), norms[0], nn.Linear(5, 4), norms[1])\n"
        "    model(torch.randn(20, 6))\n    return model.eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = CliRunner().invoke
    assert run(app, ["export", "-m", "planted:build", "-i", "8,6", "-o", "m.onnx"]).exit_code == 0
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: [drawn.append(figure), save(figure, *args, **kwargs)]
    )
    sound = run(app, ["bisect", "m.onnx", "-m", "planted:build", "--plot", "errors.svg", "--layer", "2"])
    assert sound.exit_code == 0, sound.output
    assert re.search(r"1\s+BatchNormalNorm\s+kernel", sound.stdout)
    assert re.search(r"2\s+\(module\)\s+-", sound.stdout)
    assert "nothing differs" in sound.stdout
    assert (tmp_path / "errors.svg").read_text().count("<svg") == 1
    title, legend = drawn[0].get_suptitle(), drawn[0].legends[0].get_window_extent()
    assert "nothing differs" in title
    assert not any(text.get_window_extent().overlaps(legend) for text in drawn[0].texts)
    proto = onnx.load("m.onnx")
    node = next(node for node in proto.graph.node if node.op_type == "BatchNormalNorm")
    node.input[3], node.input[4] = node.input[4], node.input[3]
    onnx.save(proto, "m.onnx")
    for options in ([], ["--json"], ["--quiet"], ["--runtime", "reference"]):
        wrong = run(app, ["bisect", "m.onnx", "-m", "planted:build", *options])
        assert wrong.exit_code == 1
        assert "layer 1 (BatchNormalNorm) computes something else, on PyTorch's own input" in wrong.stderr
        if options == ["--json"]:
            assert json.loads(wrong.stdout)["passed"] is False
    refused = run(app, ["bisect", "m.onnx", "-m", "planted:build", "--plot", "errors.txt"])
    assert refused.exit_code == 2
    assert "errors.txt: a plot is written as .png, .svg, .pdf" in refused.stderr

"""ReLU, and the sum with a residual, folded into BatchNormalNorm: which graphs change, and what files then hold.

The folded operators themselves are in test_operators.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from sampled import long
from small_network import randomized
from torch import Tensor, nn

from nnorm_export import export, layers, load
from nnorm_export.domain import OPERATORS, Step
from nnorm_export.domain.epilogues import ADD, RELU
from nnorm_export.exporting.formats import onnx as exporter
from nnorm_export.graphs.forms import apply_form
from nnorm_export.graphs.fuse_epilogues import fuse_epilogues

LENGTHS = {"N": 2, "M": 2, "C": 3, "H": 5, "?": 2}


@dataclass(frozen=True)
class Graph:
    """Statements that compute ``outputs`` from x, of shape [N, 3, H], and r.

    NORM(v) is BatchNormalNorm of v, and every value but r has the shape of x. ``becomes`` are the operators after
    folding; None means that nothing is folded.
    """

    statements: str
    becomes: str | None = None
    outputs: str = "y"
    shape_of_r: str = "N, 3, H"

    def model(self) -> ir.Model:
        body = re.sub(r"NORM\((\w)\)", r"nnorm.BatchNormalNorm(\1, p, p, p, p, p, p)", self.statements)
        outputs = ", ".join(f"float[N, 3, H] {name}" for name in self.outputs.split())
        inner = "".join(f"float[N, 3, H] {name}, " for name in re.findall(r"(\w) =", body) if name not in self.outputs)
        text = f"""<ir_version: 10, opset_import: ["": 20, "nnorm": 1]>
            graph (float[N, 3, H] x, float[{self.shape_of_r}] r) => ({outputs})
            <{inner} float[3] p = {{0.5, 1.5, 0.7}}, float[5] q = {{3, 1, 4, 1, 5}}>
            {{ {body} }}"""
        return ir.serde.deserialize_model(onnx.parser.parse_model(text))

    def run(self, model: ir.Model) -> list[np.ndarray]:
        apply_form(model, "portable")
        proto = ir.serde.serialize_model(model)
        onnx.checker.check_model(proto, full_check=True)
        lengths = [LENGTHS.get(dim) or int(dim) for dim in re.findall(r"[^, ]+", self.shape_of_r)]
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in (("x", (2, 3, 5)), ("r", lengths))}
        return ReferenceEvaluator(proto).run(None, feeds)


FOLDED = {
    "relu": Graph("n = NORM(x) y = Relu(n)", "BatchNormalNormRelu"),
    "sum": Graph("n = NORM(x) s = Add(n, r) y = Relu(s)", "BatchNormalNormAddRelu"),
    "sum the other way round": Graph("n = NORM(x) s = Add(r, n) y = Relu(s)", "BatchNormalNormAddRelu"),
    "sum with the input": Graph("n = NORM(x) s = Add(x, n) y = Relu(s)", "BatchNormalNormAddRelu"),
    "residual after the norm": Graph("n = NORM(x) t = Neg(r) s = Add(n, t) y = Relu(s)", "Neg BatchNormalNormAddRelu"),
    "two norms": Graph("n = NORM(x) m = NORM(r) s = Add(n, m) y = Relu(s)", "BatchNormalNorm BatchNormalNormAddRelu"),
    "two norms, one used elsewhere": Graph(
        "n = NORM(x) m = NORM(r) s = Add(n, m) y = Relu(s) z = Neg(n)",
        "BatchNormalNorm BatchNormalNormAddRelu Neg",
        outputs="y z",
    ),
    "two norms, one an output": Graph(
        "n = NORM(x) m = NORM(r) s = Add(m, n) y = Relu(s)", "BatchNormalNorm BatchNormalNormAddRelu", outputs="y m"
    ),
    "chain": Graph(
        "n = NORM(x) a = Relu(n) m = NORM(a) s = Add(m, a) y = Relu(s)", "BatchNormalNormRelu BatchNormalNormAddRelu"
    ),
    "relu used twice": Graph("n = NORM(x) y = Relu(n) z = Neg(y)", "BatchNormalNormRelu Neg", outputs="y z"),
    "sum of relus": Graph(
        "n = NORM(x) a = Relu(n) m = NORM(r) b = Relu(m) s = Add(a, b) y = Relu(s)",
        "BatchNormalNormRelu BatchNormalNormRelu Add Relu",
    ),
}
LEFT = {
    "norm used twice": Graph("n = NORM(x) y = Relu(n) z = Neg(n)", outputs="y z"),
    "norm an output": Graph("n = NORM(x) y = Relu(n)", outputs="y n"),
    "norm in the sum an output": Graph("n = NORM(x) s = Add(n, r) y = Relu(s)", outputs="y n"),
    "residual made from the norm": Graph("n = NORM(x) t = Neg(n) s = Add(n, t) y = Relu(s)"),
    "norm added to itself": Graph("n = NORM(x) s = Add(n, n) y = Relu(s)"),
    "sum used twice": Graph("n = NORM(x) s = Add(n, r) y = Relu(s) z = Neg(s)", outputs="y z"),
    "sum an output": Graph("n = NORM(x) s = Add(n, r) y = Relu(s)", outputs="y s"),
    "sum without relu": Graph("n = NORM(x) y = Add(n, r)"),
    "two sums": Graph("n = NORM(x) s = Add(n, r) t = Add(s, r) y = Relu(t)"),
    "relu of the other": Graph("n = NORM(x) t = Relu(r) y = Add(n, t)"),
    "something between": Graph("n = NORM(x) t = Neg(n) y = Relu(t)"),
    "another activation": Graph("n = NORM(x) y = LeakyRelu(n)"),
    "another operator": Graph("n = NORM(x) s = Sub(n, r) y = Relu(s)"),
    "another norm": Graph("n = nnorm.LayerNormalNorm<axis = -1, epsilon = 1e-5, delta = 0.0>(x, q, q) y = Relu(n)"),
    **{
        f"residual of shape [{shape}]": Graph("n = NORM(x) s = Add(n, r) y = Relu(s)", shape_of_r=shape)
        for shape in ("1, 3, H", "3, H", "H", "M, 3, H", "N, C, H", "?, 3, H", "1")
    },
}


@pytest.mark.parametrize("graph", [*FOLDED.values(), *LEFT.values()], ids=[*FOLDED, *LEFT])
def test_what_is_folded_and_what_is_left(graph: Graph) -> None:
    before, after = graph.model(), graph.model()
    fuse_epilogues(after)
    assert [node.op_type for node in after.graph] == (
        [node.op_type for node in before.graph] if graph.becomes is None else graph.becomes.split()
    )
    for left, right in zip(graph.run(before), graph.run(after), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("statements", "becomes"),
    [
        ("n = NORM(x) s = Add(n, r) t = Relu(s) y = Tanh(t)", "BatchNormalNormAddReluTanh"),  # the longest, not AddRelu
        ("n = NORM(x) s = Add(n, r) y = Relu(s)", "BatchNormalNormAddRelu"),
        ("n = NORM(x) y = Tanh(n)", "BatchNormalNorm Tanh"),
    ],
)
def test_a_declared_epilogue_is_folded(statements: str, becomes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS["BatchNormalNorm"].followed_by(ADD, RELU, Step("Tanh", np.tanh))
    monkeypatch.setitem(OPERATORS, operator.op_type, operator)
    test_what_is_folded_and_what_is_left(Graph(statements, becomes))


def test_a_step_with_an_attribute_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has no attributes, so a node that has one may compute something else."""
    operator = OPERATORS["BatchNormalNorm"].followed_by(Step("Gelu", np.copy))
    monkeypatch.setitem(OPERATORS, operator.op_type, operator)
    for attribute, becomes in (("", "BatchNormalNormGelu"), ('<approximate = "tanh">', "BatchNormalNorm Gelu")):
        model = Graph(f"n = NORM(x) y = Gelu{attribute}(n)").model()
        fuse_epilogues(model)
        assert [node.op_type for node in model.graph] == becomes.split()


class Block(nn.Module):
    """A residual block that changes the shape, then one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, stride=2, padding=1), layers.BatchNormalNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), layers.BatchNormalNorm2d(6)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 6, 1, stride=2), layers.BatchNormalNorm2d(6))
        self.conv3, self.norm3 = nn.Conv2d(6, 6, 3, padding=1), layers.BatchNormalNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm1(self.conv1(x)))
        x = nn.functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
        y = x + self.norm3(self.conv3(x))
        return y.relu()


@pytest.fixture(scope="module")
def block() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Block())


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


SHAPES = {
    "batch": None,
    "fixed": {},
    "height": {"x": {0: torch.export.Dim("n"), 2: torch.export.Dim("height", min=4)}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "opset", "dynamic"),
    [
        long("portable", 18, "batch"),
        ("portable", 20, "batch"),
        long("portable", 20, "fixed"),
        ("portable", 20, "height"),
        ("portable", 26, "batch"),
        ("custom", 20, "batch"),
    ],
)
def test_residual_blocks(form: str, opset: int, dynamic: str, block: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    report = export(block, image, path, form=form, opset_version=opset, dynamic_shapes=SHAPES[dynamic])
    assert report.parity
    assert operators(path) == [
        *("Conv", "BatchNormalNormRelu"),
        *("Conv", "Conv", "BatchNormalNorm", "BatchNormalNormAddRelu"),
        *("Conv", "BatchNormalNormAddRelu"),
    ]
    assert len(report.layers) == 4


@pytest.mark.slow
def test_a_folded_node_is_still_the_node_of_its_layer(block: nn.Module, image: Tensor, tmp_path: Path) -> None:
    report = export(block, image, tmp_path / "m.onnx")
    nodes = {node.name: node for node in onnx.load(report.path).graph.node if node.domain == "nnorm"}
    assert [entry["node"] for entry in report.layers] == list(nodes) == list(load(report.path).implementations)
    for entry in report.layers:
        node = nodes[entry["node"]]
        assert node.op_type == entry["op_type"]
        assert node.name == f"{entry['path']}/BatchNormalNorm"
        metadata = {prop.key: prop.value for prop in node.metadata_props}
        assert metadata["nnorm_export.layer"] == entry["path"]
        assert set(metadata) == {"nnorm_export.layer", "pkg.torch.onnx.name_scopes"}
        assert {attribute.name: attribute.s for attribute in node.attribute} == {
            "plugin_namespace": b"nnorm",
            "plugin_version": b"1",
        }


@pytest.mark.slow
def test_float32_primitives_are_those_of_the_nodes_apart(
    block: nn.Module, image: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = operators(export(block, image, tmp_path / "folded.onnx", form="primitives").path)
    monkeypatch.setattr(exporter, "fuse_epilogues", lambda model: None)
    assert operators(export(block, image, tmp_path / "apart.onnx", form="primitives").path) == folded


@pytest.mark.slow
@pytest.mark.parametrize("form", ["portable", "primitives"])
@pytest.mark.parametrize("dtype", ["fp16", long("bf16"), "fp64"])
def test_dtypes(dtype: str, form: str, block: nn.Module, image: Tensor, tmp_path: Path) -> None:
    assert export(block, image, tmp_path / "m.onnx", dtype=dtype, form=form, opset_version=22).parity


def test_vectors(tmp_path: Path) -> None:
    model = randomized(nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), nn.ReLU(inplace=True)))
    report = export(model, torch.randn(3, 4), tmp_path / "m.onnx")
    assert report.parity
    assert operators(report.path) == ["Gemm", "BatchNormalNormRelu"]

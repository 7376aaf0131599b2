"""Nodes of one operator with different bodies, by overloads of functions: every reader keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
import torch
from backends import BACKENDS, open_with
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from nnorm_export import ModelFileError, bisect, export, load, optimize, probe, verify
from nnorm_export.files.bodies import refuse_unknown_bodies
from nnorm_export.files.inspection import describe
from nnorm_export.files.onnx_file import identifier, read
from nnorm_export.layers import BatchNormalNorm2d, LayerNormalNorm
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner
from nnorm_export.tensorrt.parser_input import write_for_parser

NEAR_ZERO = (DOMAIN, "BatchNormalNorm", "near_zero")


class Blocks(nn.Module):
    """Norms with λ = 1, with λ near 0, and in float64."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = BatchNormalNorm2d(16)
        self.near = BatchNormalNorm2d(16)
        self.last = BatchNormalNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.near.running_lmbda.copy_(torch.linspace(-0.02, 2.02, 16))
        self.last.running_lmbda.copy_(torch.linspace(-0.02, 2.02, 16))
        if mixed:
            self.last.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.near(self.norm(self.conv(x)))
        return self.last(self.second(y).to(self.last.weight.dtype))


def blocks(*, mixed: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Blocks(mixed=mixed).eval(), torch.randn(2, 3, 6, 6)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, str], Path]:
    folder = tmp_path_factory.mktemp("overloads")

    def file(mixed: bool, form: str) -> Path:
        path = folder / f"{mixed}_{form}.onnx"
        if not path.exists():
            export(*blocks(mixed=mixed), path, form=form)
        return path

    return file


def called(path: Path) -> dict[str, str]:
    return {node.name: node.overload for node in read(path).normalizations}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_every_reader_keeps_the_bodies_apart(files: Callable[[bool, str], Path], mixed: bool) -> None:
    path, (model, x) = files(mixed, "portable"), blocks(mixed=mixed)
    assert called(path) == {
        "norm/BatchNormalNorm": "",
        "near/BatchNormalNorm": "near_zero",
        "last/BatchNormalNorm": "near_zero_double" if mixed else "near_zero",
    }
    proto = onnx.load(path)
    assert {identifier(node) for node in read(path).normalizations} == {*map(identifier, proto.functions)}
    onnx.checker.check_model(proto, full_check=True)
    expected = model(x).detach().numpy()
    inlined = onnx.inliner.inline_local_functions(proto)
    assert not inlined.functions
    results = [ReferenceEvaluator(inlined).run(None, {"x": x.numpy()})[0]]
    for backend in BACKENDS:
        runner = open_with(path, backend)
        assert len(set(runner.implementations.values())) == 1
        results.append(runner(x.numpy())[0])
    results.append(load(files(mixed, "primitives"))(x.numpy())[0])
    for result in results:
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_every_command_takes_overloads(files: Callable[[bool, str], Path], tmp_path: Path) -> None:
    path, (model, x) = files(False, "portable"), blocks(mixed=False)
    report = verify(path, model, x)
    assert report
    assert report.by_bodies is not None
    assert bisect(path, model, x).culprit is None
    assert probe(path)
    assert describe(path).problems == []
    optimize(path, tmp_path / "optimized.onnx")
    np.testing.assert_allclose(load(tmp_path / "optimized.onnx")(x.numpy())[0], model(x).detach(), atol=2e-5)
    for op_types in (frozenset[str](), frozenset({"BatchNormalNorm"})):
        written = onnx.load(write_for_parser(read(path), op_types, tmp_path))
        nodes = [node for node in written.graph.node if node.domain == DOMAIN]
        assert [node.overload for node in nodes] == [""] * len(nodes)
        assert {node.op_type for node in nodes} == op_types
        assert not written.functions


@pytest.mark.slow
def test_nodes_without_bodies_call_no_overload(files: Callable[[bool, str], Path]) -> None:
    custom = files(False, "custom")
    assert set(called(custom).values()) == {""}
    assert set(load(custom).implementations.values()) == {"kernel"}


@pytest.mark.slow
def test_each_body_is_checked(files: Callable[[bool, str], Path], tmp_path: Path) -> None:
    proto = onnx.load(files(True, "portable"))
    for function in proto.functions:
        damaged = onnx.ModelProto()
        damaged.CopyFrom(proto)
        (target,) = (each for each in damaged.functions if identifier(each) == identifier(function))
        target.node[-1].CopyFrom(helper.make_node("Sub", [target.input[0]] * 2, [target.output[0]]))
        onnx.save(damaged, tmp_path / "damaged.onnx")
        with pytest.raises(ModelFileError, match="unknown body of BatchNormalNorm"):
            load(tmp_path / "damaged.onnx")


def test_the_arithmetic_of_each_body_is_checked(files: Callable[[bool, str], Path], tmp_path: Path) -> None:
    proto = onnx.load(files(True, "portable"))
    for node in proto.graph.node:
        if node.overload == "near_zero_double":
            node.overload = "near_zero"
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.raises(ModelFileError, match="it computes in float, node last/BatchNormalNorm"):
        refuse_unknown_bodies(read(tmp_path / "other.onnx"))


def test_a_node_whose_body_is_lost_needs_a_kernel(files: Callable[[bool, str], Path], tmp_path: Path) -> None:
    proto = onnx.load(files(False, "portable"))
    (lost,) = (function for function in proto.functions if identifier(function) == NEAR_ZERO)
    proto.functions.remove(lost)
    onnx.save(proto, tmp_path / "lost.onnx")
    assert not read(tmp_path / "lost.onnx").has_bodies
    assert read(tmp_path / "lost.onnx").bare == {"BatchNormalNorm"}


def test_tensorrt_gets_rows_as_a_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), LayerNormalNorm(8), nn.ReLU()).eval(), torch.randn(3, 5, 6)
    file = read(export(model, x, tmp_path / "net.onnx").path)
    path = write_for_parser(file, frozenset(), tmp_path)
    assert [node.op_type for node in onnx.load(path).graph.node][2:4] == ["Flatten", "Shape"]
    for sample in (x, x[:0], x[:1]):
        expected = load(file.path, kernels=False)(sample.numpy())[0]
        np.testing.assert_allclose(load(path)(sample.numpy())[0], expected, atol=1e-6)


def test_an_older_onnxruntime_that_runs_one_body_for_all_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(LayerNormalNorm((6, 10)), nn.Flatten(1), LayerNormalNorm(60)).eval()
    path = export(model, torch.randn(2, 6, 10), tmp_path / "m.onnx", verify=False).path  # such a version may run here

    def fail(*_: object) -> None:
        raise RuntimeError("The input tensor cannot be reshaped")

    monkeypatch.setattr(OnnxRuntimeRunner, "_new_session", fail)
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    with pytest.raises(ModelFileError, match=r"one body for all nodes .* ONNX Runtime 1\.27 or newer.*reshaped"):
        load(path, kernels=False)
    monkeypatch.setattr(onnxruntime, "__version__", "1.27.0")
    with pytest.raises(ModelFileError, match=r"cannot load it: The input tensor"):
        load(path, kernels=False)

"""The configuration of reduced builds of ONNX Runtime, read by ONNX Runtime's own parser."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from command_line import run
from onnx import TensorProto, helper
from torch import nn

from nnorm_export import InputError, ModelFileError, RequiredOperators, export, layers, library, required_operators

parser = importlib.import_module("onnxruntime.tools.reduced_build_config_parser")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), layers.BatchNormalNorm2d(8), nn.Sigmoid())
    return export(model.eval(), torch.randn(2, 3, 8, 8), tmp_path_factory.mktemp("net") / "net.onnx").path


def parsed(required: RequiredOperators, folder: Path) -> dict[str, dict[int, set[str]]]:
    """The text as ONNX Runtime's build reads it."""
    operators, types = parser.parse_config(str(required.write(folder / "operators.config")))
    assert types is None
    read: dict[str, dict[int, set[str]]] = operators
    return read


def names(operators: dict[str, dict[int, Any]], domain: str) -> set[str]:
    return {name for opset in operators.get(domain, {}).values() for name in opset}


def branching(folder: Path) -> Path:
    """A file of opset 17 with operators in a branch, in a function and in a function that it calls."""
    true, x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "txz")
    branch = helper.make_graph([helper.make_node("Softplus", ["x"], ["t"])], "then", [], [true])
    other = helper.make_graph([helper.make_node("Gelu", ["x"], ["t"], domain="com.microsoft")], "else", [], [true])
    nodes = [
        helper.make_node("Outer", ["x"], ["y"], domain="mine"),
        helper.make_node("ReduceSum", ["y"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=other),
    ]
    of_functions = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    inner = helper.make_function("mine", "Inner", ["a"], ["b"], [helper.make_node("Erf", ["a"], ["b"])], of_functions)
    call = helper.make_node("Inner", ["a"], ["b"], domain="mine")
    outer = helper.make_function("mine", "Outer", ["a"], ["b"], [call], of_functions)
    imports = [*of_functions, helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", [x], [z])
    model = helper.make_model(graph, functions=[inner, outer], opset_imports=imports, ir_version=8)
    path = folder / "branching.onnx"
    onnx.save(model, path)
    return path


def test_subgraphs_and_functions_with_the_opset_of_each_operator(tmp_path: Path) -> None:
    required = required_operators(branching(tmp_path), run=False)
    assert parsed(required, tmp_path) == {
        "ai.onnx": {1: {"Softplus"}, 13: {"Cast", "Erf", "ReduceSum"}, 16: {"If"}},
        "com.microsoft": {1: {"Gelu"}},
    }
    assert required.onnxruntime is None
    assert "or write this file again where ONNX Runtime is installed" in required.config  # these are not optimized


@pytest.mark.slow
def test_what_onnxruntime_makes_of_a_file_at_each_level(portable: Path, tmp_path: Path) -> None:
    required = required_operators(portable)
    found = parsed(required, tmp_path)
    assert found == {
        domain: {opset: set(each) for opset, each in opsets.items()} for domain, opsets in required.operators.items()
    }
    assert "nnorm" not in found
    bodies = {node.op_type for function in onnx.load(portable).functions for node in function.node}
    assert bodies | {"Conv", "Relu", "Sigmoid"} <= names(found, "ai.onnx")
    assert "FusedConv" in names(found, "com.microsoft")
    assert required.onnxruntime == ort.__version__
    assert f"Those that ONNX Runtime {ort.__version__} makes of them are here too" in required.config
    assert f"#     {portable}" in required.config.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_every_node_of_a_session_is_listed(level: str, portable: Path, tmp_path: Path) -> None:
    required = required_operators(portable)
    assert required.kernels is (library.find_library() is not None)
    for kernels in {False, required.kernels}:
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        if kernels:
            library.register(options)
        ort.InferenceSession(str(portable), options, providers=["CPUExecutionProvider"])
        nodes = {(node.domain or "ai.onnx", node.op_type) for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
        listed = {(domain, name) for domain in required.operators for name in names(required.operators, domain)}
        assert {node for node in nodes if node[0] != "nnorm"} <= listed
        assert any(node[0] == "nnorm" for node in nodes) == kernels


def test_onnxruntimes_own_tool_lists_nothing_else(tmp_path: Path) -> None:
    tool = importlib.import_module("onnxruntime.tools.ort_format_model")
    path = branching(tmp_path)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "branching.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tool.create_config_from_models([tmp_path / "branching.ort"], tmp_path / "theirs.config", False)
    theirs, _ = parser.parse_config(str(tmp_path / "theirs.config"))
    found = parsed(required_operators(path), tmp_path)
    for domain, opsets in theirs.items():
        for opset, operators in opsets.items():
            assert operators <= found[domain][opset]


@pytest.mark.slow
def test_a_file_without_bodies_is_read_with_the_kernels(tmp_path: Path) -> None:
    if library.find_library() is None:
        pytest.skip("the library of kernels is not installed")
    model = nn.Sequential(nn.Linear(4, 6), layers.LayerNormalNorm(6))
    path = export(model.eval(), torch.randn(3, 4), tmp_path / "net.onnx", form="custom").path
    required = required_operators(path)
    assert "Gemm" in names(required.operators, "ai.onnx")
    assert "nnorm" not in required.operators


@pytest.mark.slow
def test_folders_and_what_is_refused(portable: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "net.onnx").write_bytes(portable.read_bytes())
    branching(tmp_path / "a")
    both = required_operators(tmp_path / "a", run=False)
    assert both.files == [tmp_path / "a" / "b" / "net.onnx", tmp_path / "a" / "branching.onnx"]
    assert both.operators == required_operators(*both.files, run=False).operators
    assert {"Erf", "Conv"} <= names(both.operators, "ai.onnx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: the folder has no file \*\.onnx"):
        required_operators(tmp_path / "empty")
    with pytest.raises(InputError, match="no file is given"):
        required_operators()
    (tmp_path / "empty" / "text.onnx").write_text("text")
    with pytest.raises(ModelFileError, match="not an ONNX model"):
        required_operators(tmp_path / "empty")


@pytest.mark.slow
def test_the_command(portable: Path, tmp_path: Path) -> None:
    target = tmp_path / "operators.config"
    shown = run("inspect", portable, "--required-operators", target).stdout
    assert "BatchNormalNorm" in shown
    assert f"operators of 1 file, optimized by ONNX Runtime {ort.__version__}" in " ".join(shown.split())
    assert target.read_text() == required_operators(portable).config
    shown = run("inspect", portable.parent, "--required-operators", target, "--no-run").stdout
    assert "operators of 1 file, not optimized" in " ".join(shown.split())
    assert target.read_text() == required_operators(portable.parent, run=False).config
    failed = run("inspect", portable.parent, "--required-operators", target, "--plot", tmp_path / "p.png", code=2)
    assert "give a file, not a folder" in " ".join(failed.stderr.split())

"""Towers of functions are counted and refused before anything inlines them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from nnorm_export import ModelFileError, load
from nnorm_export.files import onnx_file
from nnorm_export.files.inlined import count_inlined
from nnorm_export.files.inspection import describe

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
Body = Callable[[int], list[onnx.NodeProto]]


def call(level: int, x: str, y: str, overload: str = "") -> onnx.NodeProto:
    return helper.make_node(f"F{level}", [x], [y], domain="f", overload=overload)


def function(name: str, nodes: list[onnx.NodeProto], overload: str = "") -> onnx.FunctionProto:
    made = helper.make_function("f", name, ["x"], ["y"], nodes, OPSETS, overload=overload)
    assert isinstance(made, onnx.FunctionProto)
    return made


def model(functions: list[onnx.FunctionProto], path: Path, nodes: list[onnx.NodeProto] | None = None) -> Path:
    values = [helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy"]
    graph = helper.make_graph(nodes or [call(0, "x", "y")], "g", values[:1], values[1:])
    proto = helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)
    path.write_bytes(proto.SerializeToString())
    return path


def twice(level: int) -> list[onnx.NodeProto]:
    return [call(level, "x", "t"), call(level, "t", "y")]


def in_branches(level: int) -> list[onnx.NodeProto]:
    """The two calls are in the branches of an If."""
    value = helper.make_tensor_value_info("t", 1, None)
    branches = [helper.make_graph([call(level, "x", "t")], "b", [], [value]) for _ in range(2)]
    is_on = helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.array(True)))
    return [is_on, helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])]


def in_loops(level: int) -> list[onnx.NodeProto]:
    """The two calls are nested in graphs of graphs."""
    value = helper.make_tensor_value_info("t", 1, None)
    graph = helper.make_graph(twice(level), "b", [], [helper.make_tensor_value_info("y", 1, None)])
    for _ in range(3):
        graph = helper.make_graph([helper.make_node("If", ["c"], ["t"], then_branch=graph)], "b", [], [value])
    return [helper.make_node("If", ["c"], ["y"], then_branch=graph)]


def many(level: int) -> list[onnx.NodeProto]:
    names = ["x", *(f"t{index}" for index in range(99)), "y"]
    return [call(level, a, b) for a, b in itertools.pairwise(names)]


@pytest.mark.parametrize(("body", "levels"), [(twice, 40), (in_branches, 30), (in_loops, 25), (many, 4), (twice, 3000)])
def test_towers(body: Body, levels: int, tmp_path: Path) -> None:
    leaf = function(f"F{levels}", [helper.make_node("Relu", ["x"], ["y"])])
    path = model([*(function(f"F{level}", body(level + 1)) for level in range(levels)), leaf], tmp_path / "m.onnx")
    started = time.monotonic()
    for opened in (load, describe, onnx_file.read):
        with pytest.raises(ModelFileError, match="functions call each other so often"):
            opened(path)
    assert time.monotonic() - started < 10


def test_overloads_that_old_runtimes_do_not_tell_apart(tmp_path: Path) -> None:
    functions = [function(f"F{level}", twice(level + 1), overload="a") for level in range(40)]
    with pytest.raises(ModelFileError, match="functions call each other so often"):
        onnx_file.read(model(functions, tmp_path / "m.onnx"))


def test_an_overload_may_call_another(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    functions = [function("F0", [call(0, "x", "y", overload="b")]), function("F0", relu, overload="b")]
    path = model(functions, tmp_path / "m.onnx")
    assert count_inlined(onnx_file.read(path).proto) == (3, 3)


@pytest.mark.parametrize("length", [1, 2, 3000])
def test_functions_that_call_themselves(length: int, tmp_path: Path) -> None:
    functions = [function(f"F{level}", [call((level + 1) % length, "x", "y")]) for level in range(length)]
    with pytest.raises(ModelFileError, match=r"its function F\d+ calls itself"):
        load(model(functions, tmp_path / "m.onnx"))


def test_many_calls_of_one_body(tmp_path: Path) -> None:
    """A body as large as a normalization's may be called by every node."""
    body = function(
        "F0", [helper.make_node("Relu", ["x"], ["y"] if index == 98 else [f"t{index}"]) for index in range(99)]
    )
    names = ["x", *(f"t{index}" for index in range(399)), "y"]
    nodes = [call(0, a, b) for a, b in itertools.pairwise(names)]
    path = model([body], tmp_path / "m.onnx", nodes)
    assert count_inlined(onnx_file.read(path).proto) == (400 * 100, 499)


def test_a_default_that_is_a_graph(tmp_path: Path) -> None:
    """A graph that a node refers to is inlined as often as the node."""
    refers = helper.make_node("If", ["x"], ["y"])
    refers.attribute.add(name="then_branch", ref_attr_name="body", type=onnx.AttributeProto.GRAPH)
    functions = [function(f"F{level}", twice(level + 1)) for level in range(12)] + [function("F12", [refers])]
    with pytest.raises(ModelFileError, match="functions call each other so often"):
        onnx_file.read(model(functions, tmp_path / "m.onnx"))

"""External data is found wherever the ONNX schema allows a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fuzz.tensor_places import Place, make_external, places, tensor_at
from onnx import helper

from nnorm_export import InputError, ModelFileError, ParityError, load, replay, verify
from nnorm_export.files import onnx_file
from nnorm_export.files.locations import external_tensors, locations
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.parity.certificates import replay as replaying


def _valid() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _write_with(place: Place, location: str, path: Path) -> None:
    model = _valid()
    make_external(tensor_at(model, place), location)
    path.write_bytes(model.SerializeToString())


def test_places_that_were_missed_once() -> None:
    known = [
        ("functions", "attribute_proto", "t"),
        ("functions", "attribute_proto", "g", "node", "attribute", "sparse_tensors", "indices"),
        ("graph", "node", "attribute", "g", "sparse_initializer", "values"),
        ("graph", "node", "attribute", "graphs", "sparse_initializer", "indices"),
        ("training_info", "initialization", "sparse_initializer", "values"),
    ]
    assert set(known) <= set(places())


def test_every_place_of_the_schema(tmp_path: Path) -> None:
    """A place that a later version of the schema adds is tried too."""
    path, data = tmp_path / "m.onnx", tmp_path / "w.bin"
    for place in places():
        _write_with(place, "w.bin", path)
        hashes = set()
        for last in (4, 400):
            np.array([1, 2, 3, last], "f").tofile(data)
            hashes.add(file_sha256(path))
        assert onnx_file.companions(path) == [data], place
        assert onnx_file.read(path).external_data == ["w.bin"], place
        assert len(hashes) == 2, place
        assert not [*external_tensors(onnx_file.read_with_weights(path))], place
        for escape in ("../w.bin", "/dev/zero"):
            _write_with(place, escape, path)
            with pytest.raises(ModelFileError, match="outside of its folder"):
                onnx_file.read(path)


def test_a_place_in_a_place() -> None:
    model = _valid()
    nodes = model.graph.node
    for _ in range(20):
        nodes = nodes.add().attribute.add().g.node
    make_external(nodes.add().attribute.add().g.sparse_initializer.add().indices, "w.bin")
    assert locations(model) == ["w.bin"]


def _with_default(path: Path) -> None:
    """A function that multiplies by the default of its attribute."""
    nodes = [helper.make_node("Constant", [], ["c"]), helper.make_node("Mul", ["a", "c"], ["m"])]
    function = helper.make_function(
        "f", "F", ["a"], ["r"], [*nodes, helper.make_node("Relu", ["m"], ["r"])], [helper.make_opsetid("", 20)]
    )
    function.node[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR, ref_attr_name="v")
    make_external(function.attribute_proto.add(name="v", type=onnx.AttributeProto.TENSOR).t, "w.bin")
    model = _valid()
    model.graph.node[0].CopyFrom(helper.make_node("F", ["x"], ["y"], domain="f"))
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("f", 1))
    path.write_bytes(model.SerializeToString())


def _with_sparse_branch(path: Path) -> None:
    """A branch without nodes and dense weights, whose output is a sparse weight."""
    names = ["rows", "sparse"]
    branches = [helper.make_graph([], name, [], [helper.make_tensor_value_info("s", 1, [4])]) for name in names]
    for branch in branches:
        sparse = branch.sparse_initializer.add(dims=[4])
        make_external(sparse.values, "w.bin")
        sparse.values.name = "s"
        sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.arange(4), "s_indices"))
    model = _valid()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "is_on"))
    chosen = helper.make_node("If", ["is_on"], ["c"], then_branch=branches[0], else_branch=branches[1])
    nodes = [chosen, helper.make_node("Mul", ["x", "c"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    path.write_bytes(model.SerializeToString())


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * torch.tensor([1.0, 2, 3, 4]))


@pytest.mark.parametrize("write", [_with_default, _with_sparse_branch])
def test_data_changed_after_a_certificate(write: Callable[[Path], None], tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "w.bin"
    write(path)
    np.array([1, 2, 3, 4], "f").tofile(data)
    x = torch.randn(6, 4)
    x[:, 3] = -x[:, 3].abs()
    assert verify(path, Scaled(), (x,), certificate=tmp_path / "c")
    assert replay(path, tmp_path / "c")
    np.array([1, 2, 3, 400], "f").tofile(data)
    assert load(path)(np.ones((1, 4), "f"))[0][0, 3] == 400
    with pytest.raises(ParityError, match="is not the file"):
        replay(path, tmp_path / "c")


@pytest.mark.parametrize("what", ["model", "data", "certificate"])
def test_files_replaced_during_a_replay(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was hashed is what was run and compared, or the replay starts again."""
    path, data = tmp_path / "m.onnx", tmp_path / "w.bin"
    _with_default(path)
    np.array([1, 2, 3, 4], "f").tofile(data)
    assert verify(path, Scaled(), (torch.randn(6, 4),), certificate=tmp_path / "c")
    calls = []

    def replaced(*arguments: Any, **options: Any) -> Any:
        calls.append(what)
        if what == "model":  # the function's default is not external any more, and is another
            model = onnx.load(path, load_external_data=False)
            default = model.functions[0].attribute_proto[0].t
            default.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 2, 3, 5], "f")))
            path.write_bytes(model.SerializeToString())
        elif what == "data":
            np.array([1, 2, 3, 5], "f").tofile(data)
        else:
            (tmp_path / "c" / "certificate.json").write_text("{}")
        return load(*arguments, **options)

    monkeypatch.setattr(replaying, "load", replaced)
    with pytest.raises((ParityError, InputError), match=r"is not (the file|a certificate)"):
        replay(path, tmp_path / "c")
    assert calls == [what]

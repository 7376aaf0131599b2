"""Requests are combined where each row of the answer comes from the same row of the request, and nowhere else."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import run
from onnx import TensorProto, helper, numpy_helper

from nnorm_export import ExportError, InputError, write_repository
from nnorm_export.runtimes import load

node = helper.make_node
F = TensorProto.FLOAT
Weights = Mapping[str, np.ndarray[Any, Any]]
Tensors = Sequence[tuple[str, int, list[int | str | None]]]
CUMSUM = [node("Constant", [], ["axis"], value_int=0), node("CumSum", ["x", "axis"], ["y"])]


def saved(path: Path, nodes: Sequence[onnx.NodeProto], inputs: Tensors, outputs: Tensors) -> Path:
    described = [[helper.make_tensor_value_info(*tensor) for tensor in tensors] for tensors in (inputs, outputs)]
    graph = helper.make_graph(nodes, "net", *described)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def rows(axis: str | int | None = "batch", dtype: int = F) -> Tensors:
    return [("x", dtype, [axis, 3])]


def out(axis: str | int | None = "batch", dtype: int = F) -> Tensors:
    return [("y", dtype, [axis, 3])]


def weighted(path: Path, nodes: list[onnx.NodeProto], weights: Weights, **options: Any) -> Path:
    """A file of the input x and the output y, float32[batch, 3], with weights."""
    saved(path, nodes, rows(), out())
    proto = onnx.load(path)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(proto, path, **options)
    return path


def note_with(notes: list[str], text: str) -> str:
    (found,) = [note for note in notes if text in note]
    return found


@pytest.mark.parametrize(
    ("nodes", "inputs", "outputs", "reason"),
    [
        (CUMSUM, rows("seq"), out("seq"), "y of a row depends on the other rows"),
        ([node("Concat", ["x", "x"], ["y"], axis=0)], rows(), out("twice"), "the first axes are not the same: x: "),
        ([node("Concat", ["x", "x"], ["y"], axis=0)], rows(), out(), "y has the shape [6, 3] for 3 rows"),
        ([node("Neg", ["x"], ["y"])], rows(None), out(None), "the first axis of x: float32[?, 3] has no name"),
        ([node("Neg", ["x"], ["y"])], rows(4), out(4), "x: float32[4, 3] has no dynamic first axis"),
        (
            [node("Neg", ["x"], ["y"])],
            [("x", F, ["n", "n"])],
            [("y", F, ["n", "n"])],
            "x: float32[n, n] has the axis n twice",
        ),
    ],
)
def test_no_batching(
    nodes: Sequence[onnx.NodeProto], inputs: Tensors, outputs: Tensors, reason: str, tmp_path: Path
) -> None:
    written = write_repository(saved(tmp_path / "net.onnx", nodes, inputs, outputs), tmp_path / "models")
    assert "max_batch_size: 0\n" in written.config
    assert "dynamic_batching" not in written.config
    assert [note for note in written.notes if note.startswith("no batching: ") and reason in note], written.notes


def test_rows_that_are_apart(tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], rows("images"), out("images"))
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 32\n" in written.config
    taken = "requests are combined along images, the first axis of all inputs and outputs"
    assert f"{taken}; a batch of random rows gives the results that each row gives alone" in written.notes
    assert write_repository(path, tmp_path / "models", name="one", max_batch_size=1).notes == [
        "a request has one row along images, the first axis of all inputs and outputs"
    ]


def test_inputs_that_the_model_refuses_leave_it_unchecked(tmp_path: Path) -> None:
    nodes = [node("Constant", [], ["shape"], value_ints=[-1, 5]), node("Reshape", ["x", "shape"], ["y"])]
    path = saved(tmp_path / "net.onnx", nodes, [("x", F, ["batch", "n"])], [("y", F, ["batch", 5])])
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 0\n" in written.config
    assert any("was not checked (" in note for note in written.notes)


def test_scalars_and_lengths_that_triton_refuses(tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], [("x", F, [])], [("y", F, [])])
    with pytest.raises(ExportError, match="x is a scalar, which Triton serves only as one number for each row"):
        write_repository(path, tmp_path / "models")
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], rows(0), out(0))
    with pytest.raises(ExportError, match="x has an axis of length 0"):
        write_repository(path, tmp_path / "models")


def test_dtypes_that_one_backend_has(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "text.onnx",
        [node("Identity", ["x"], ["y"])],
        rows(dtype=TensorProto.STRING),
        out(dtype=TensorProto.STRING),
    )
    assert write_repository(path, tmp_path / "models").config.count("data_type: TYPE_STRING") == 2
    with pytest.raises(ExportError, match="x is text, which the backend python cannot serve"):
        write_repository(path, tmp_path / "models", name="other", backend="python")
    bfloat16 = TensorProto.BFLOAT16
    path = saved(tmp_path / "bf16.onnx", [node("Identity", ["x"], ["y"])], rows(dtype=bfloat16), out(dtype=bfloat16))
    with pytest.raises(ExportError, match="x is bfloat16, which NumPy and so the backend python do not have"):
        write_repository(path, tmp_path / "models", backend="python")


# --- what runs in the server, with its module in the place of Triton's ---


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module model.py; its requests are dicts."""
    triton = SimpleNamespace(
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request[name]),
        Tensor=lambda name, array: array,
        TritonError=str,
        InferenceResponse=lambda output_tensors=(), error=None: error or output_tensors,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.delitem(sys.modules, "nnorm_export.serving.triton_model", raising=False)
    module = importlib.import_module("nnorm_export.serving.triton_model")
    monkeypatch.delitem(sys.modules, module.__name__)
    return module


def opened(served: ModuleType, folder: Path, path: Path, **arguments: str) -> Any:
    (folder / "1").mkdir()
    path.rename(folder / "1" / "model.onnx")
    model = served.TritonPythonModel()
    config = json.dumps({"parameters": {}, "max_batch_size": 32})
    model.initialize({"model_config": config, "model_repository": str(folder), "model_version": "1", **arguments})
    return model


def test_a_bad_request_leaves_the_others_alone(served: ModuleType, tmp_path: Path) -> None:
    nodes = [node("Constant", [], ["w"], value_floats=[1.0, 2.0]), node("Gather", ["w", "x"], ["y"])]
    path = saved(tmp_path / "net.onnx", nodes, [("x", TensorProto.INT64, ["batch"])], [("y", F, ["batch"])])
    model = opened(served, tmp_path, path)
    good, bad, other = model.execute([{"x": np.array([index])} for index in (1, 9, 0)])
    assert (good[0].tolist(), other[0].tolist()) == ([2.0], [1.0])
    assert "the runtime onnxruntime fails on these inputs" in bad
    together = model.execute([{"x": np.array([1, 0])}, {"x": np.array([1])}])
    assert [parts[0].tolist() for parts in together] == [[2.0, 1.0], [2.0]]


def test_other_numbers_of_rows_are_an_error(served: ModuleType, tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", [node("Concat", ["x", "x"], ["y"], axis=0)], rows(), out("twice"))
    model = opened(served, tmp_path, path)
    request = {"x": np.ones((2, 3), np.float32)}
    for requests in ([request], [request, request]):
        assert model.execute(requests) == ["y has 4 rows, for inputs of 2"] * len(requests)


def test_an_instance_on_a_gpu_runs_there(served: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fake_load(path: Path, **options: Any) -> Any:
        asked.update(options)
        return load(path)

    monkeypatch.setattr(served.nnorm_export, "load", fake_load)
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], rows(), out())
    opened(served, tmp_path, path, model_instance_kind="GPU", model_instance_device_id="1")
    assert asked["runtime"] == "onnxruntime-cuda"
    assert asked["providers"][0] == ("CUDAExecutionProvider", {"use_tf32": "0", "device_id": "1"})


# --- requests are combined where rows were compared, or on request ---

NEEDS_A_RANGE = [
    *(node("ReduceMean", ["x", "zero"], ["mean"]), node("Sub", ["x", "mean"], ["d"])),
    *(node("Cast", ["x"], ["i"], to=TensorProto.INT64), node("Sub", ["i", "hundred"], ["j"])),
    *(node("Gather", ["table", "j"], ["t"]), node("Add", ["d", "t"], ["y"])),
]
TABLE: Weights = {"zero": np.array([0]), "hundred": np.array(100), "table": np.zeros(10, np.float32)}
NO_MEAN = [node("Identity", ["x"], ["d"]), *NEEDS_A_RANGE[2:]]


def test_inputs_of_a_range(tmp_path: Path) -> None:
    """Random rows do not fit it. The given ones do, and show that a row has an influence on the others."""
    path = weighted(tmp_path / "net.onnx", NEEDS_A_RANGE, TABLE)
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 0" in written.config
    assert "dynamic_batching" not in written.config
    assert "give inputs that it takes (inputs=, --input)" in note_with(written.notes, "random inputs do not fit it")
    asked = write_repository(path, tmp_path / "asked", max_batch_size=8)
    assert "max_batch_size: 8" in asked.config
    note_with(asked.notes, "as max_batch_size asks, but whether")
    x = 100 + np.arange(9, dtype=np.float32).reshape(3, 3)
    given = write_repository(path, tmp_path / "given", inputs=[x], max_batch_size=8)
    assert "max_batch_size: 0" in given.config
    note_with(given.notes, "y of a row depends on the other rows")
    apart = weighted(tmp_path / "apart.onnx", NO_MEAN, TABLE)
    for inputs in ([x], x, {"x": x}):
        combined = write_repository(apart, tmp_path / "apart", inputs=inputs)
        assert "max_batch_size: 32" in combined.config
        note_with(combined.notes, "a batch of the given rows gives the results that each row gives alone")
    np.savez(tmp_path / "data.npz", x=x)
    arguments = ["serve-repo", apart, "-o", tmp_path / "line", "-i", f"{tmp_path / 'data.npz'}", "--verbose"]
    assert "max_batch_size: 32" in run(*arguments).stdout


@pytest.mark.parametrize("inputs", [[np.zeros((2, 3), np.float32)], [np.zeros((2, 4), np.float32)], {"z": np.zeros(2)}])
def test_given_inputs_that_it_refuses(inputs: Any, tmp_path: Path) -> None:
    path = weighted(tmp_path / "net.onnx", NEEDS_A_RANGE, TABLE)
    with pytest.raises(InputError, match=re.escape(str(path))):
        write_repository(path, tmp_path / "models", inputs=inputs)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("inputs", [np.ones((1, 3), np.float32), np.ones((4, 3), np.float32)])
def test_given_rows_that_show_nothing(inputs: Any, tmp_path: Path) -> None:
    """One row, or equal ones: alone and together they give the same whatever the model does with a batch."""
    nodes = [node("ReduceMean", ["x", "zero"], ["m"]), node("Add", ["x", "m"], ["y"])]
    path = weighted(tmp_path / "net.onnx", nodes, {"zero": np.array([0])})
    written = write_repository(path, tmp_path / "models", inputs=inputs)
    assert "max_batch_size: 0" in written.config
    note_with(written.notes, "was not checked (")


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("options", [{}, {"max_batch_size": 8}])
def test_a_size_that_fails(size: int, options: dict[str, Any], tmp_path: Path) -> None:
    """The number of rows is the index into a table, whose entry is an index that another table does not have."""
    sizes = np.zeros(100, np.int64)
    sizes[size] = 5
    nodes = [
        *(node("Shape", ["x"], ["s"], end=1), node("Gather", ["sizes", "s"], ["i"])),
        *(node("Gather", ["one", "i"], ["f"]), node("Mul", ["x", "f"], ["y"])),
    ]
    path = weighted(tmp_path / "net.onnx", nodes, {"sizes": sizes, "one": np.ones(1, np.float32)})
    written = write_repository(path, tmp_path / "models", **options)
    assert "max_batch_size: 0" in written.config
    reason = "it does not run on one row alone" if size == 1 else f"it runs on one row, and not on {size} rows"
    note_with(written.notes, f"no batching: {reason}")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node("Mul", ["x", "zero"], ["y"])], "no output differs between the rows"),
        ([node("Mul", ["x", "nan"], ["y"])], "y has no finite numbers in two of the rows"),
    ],
)
def test_outputs_that_show_nothing(nodes: list[onnx.NodeProto], reason: str, tmp_path: Path) -> None:
    numbers = {"zero": np.zeros(3, np.float32), "nan": np.full(3, np.nan, np.float32)}
    path = weighted(tmp_path / "net.onnx", nodes, numbers)
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 0" in written.config
    note_with(written.notes, f"was not checked ({reason})")


def test_no_finite_numbers(tmp_path: Path) -> None:
    """Weights of NaN, as of a training that diverged or of another file with weights."""
    path = weighted(tmp_path / "net.onnx", [node("Mul", ["x", "w"], ["y"])], {"w": np.full(3, np.nan, np.float32)})
    note_with(write_repository(path, tmp_path / "models").notes, "y has no finite number for random inputs")
    with pytest.raises(InputError, match="y has no finite number for the given inputs"):
        write_repository(path, tmp_path / "given", inputs=[np.ones((2, 3), np.float32)])
    assert not (tmp_path / "given").exists()

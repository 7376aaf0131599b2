"""The graph of an ONNX file is read without its large weights."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from nnorm_export import ModelFileError, load
from nnorm_export.files import onnx_file, wire

WIDTH = 2048  # 17 MB of weights


def _write(path: Path, width: int) -> onnx.ModelProto:
    """A product with a matrix, and a sum with a vector, which is small."""
    weights = {"W": np.eye(width, dtype=np.float32), "b": np.ones(2, np.float32).repeat(width // 2)}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["z"]), helper.make_node("Add", ["z", "b"], ["y"])],
        "net",
        values[:1],
        values[1:],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, {"who": "a test"})
    onnx.save(model, path)
    return model


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "net.onnx"
    _write(path, WIDTH)
    return path


def _taken(call: Callable[[], object]) -> int:
    """The bytes that Python took at most during ``call``; those that protobuf and ONNX Runtime take do not count."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_load_does_not_read_the_weights(large: Path) -> None:
    load(large)  # imports what it needs
    size = large.stat().st_size
    assert _taken(lambda: load(large)) < size // 16
    assert _taken(lambda: onnx_file.read(large)) >= size  # the measure counts what is read
    (result,) = load(large)(np.ones((1, WIDTH), np.float32))
    assert np.array_equal(result, np.full((1, WIDTH), 2, np.float32))


def test_companions_are_found_without_reading_the_weights(large: Path) -> None:
    assert onnx_file.companions(large) == []
    assert _taken(lambda: onnx_file.companions(large)) < large.stat().st_size // 16


def test_all_but_the_large_weights_is_read(large: Path) -> None:
    proto = onnx_file.read(large, large_weights=False).proto
    assert [len(weight.raw_data) for weight in proto.graph.initializer] == [0, 4 * WIDTH]
    assert proto == _cleared(onnx_file.read(large).proto, wire.LARGE)


def _cleared(proto: onnx.ModelProto, large: int) -> onnx.ModelProto:
    for weight in proto.graph.initializer:
        if len(weight.raw_data) > large:
            weight.ClearField("raw_data")
    return proto


def _damaged(content: bytes) -> Iterator[bytes]:
    """Files that end early, and files with one other byte."""
    yield from (content[:end] for end in range(0, len(content), 7))
    draw = random.Random(0)
    for _ in range(1000):
        place = draw.randrange(len(content))
        yield content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]


def test_damaged_files_are_judged_by_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph, or the error, is what it is when the whole file is read."""
    large = 64
    monkeypatch.setattr(wire, "LARGE", large)
    monkeypatch.setattr(wire, "_WHOLE", 0)
    path = tmp_path / "net.onnx"
    _write(path, 8)
    kinds = set()
    for content in _damaged(path.read_bytes()):
        path.write_bytes(content)
        try:
            expected: onnx.ModelProto | str = _cleared(onnx_file.read(path).proto, large)
        except ModelFileError as error:
            expected = str(error)
        try:
            found: onnx.ModelProto | str = onnx_file.read(path, large_weights=False).proto
        except ModelFileError as error:
            found = str(error)
        assert found == expected, content.hex()
        kinds.add(type(expected))
    assert kinds == {onnx.ModelProto, str}

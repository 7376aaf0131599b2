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

from nnorm_export import ModelFileError, load, reading
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
    assert proto == _cleared(onnx_file.read(large).proto, wire._LARGE_WEIGHT)


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


def _data(values: bytes) -> bytes:
    return wire.field_header(TensorProto.RAW_DATA_FIELD_NUMBER, len(values)) + values


@pytest.mark.parametrize("sizes", [(8, 2**17), (2**17, 8), (2**17, 2**17)])
def test_data_that_is_given_twice_is_read_as_protobuf_reads_it(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """It takes the last."""
    model = _write(tmp_path / "net.onnx", 8)
    tensor = model.graph.initializer.pop()
    tensor.ClearField("raw_data")
    twice = tensor.SerializeToString() + b"".join(_data(bytes([i + 1]) * size) for i, size in enumerate(sizes))
    graph = model.graph.SerializeToString()
    graph += wire.field_header(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(twice)) + twice
    model.ClearField("graph")
    model.doc_string = "long " * 2**18  # a small file would be read whole
    header = wire.field_header(onnx.ModelProto.GRAPH_FIELD_NUMBER, len(graph))
    path = tmp_path / "twice.onnx"
    path.write_bytes(model.SerializeToString() + header + graph)
    assert onnx_file.read(path, large_weights=False).proto == onnx_file.read(path).proto


def test_a_file_of_very_many_fields_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To count them off would take longer."""
    path = tmp_path / "net.onnx"
    model = _write(path, 8)
    with path.open("ab") as file:
        file.write(bytes([onnx.ModelProto.IR_VERSION_FIELD_NUMBER << 3, 10]) * 2**20)
    counted = []
    monkeypatch.setattr(wire, "_MOST_FIELDS", 1000)
    varint = wire._varint
    monkeypatch.setattr(wire, "_varint", lambda file: (counted.append(1), varint(file))[1])
    assert onnx_file.read(path, large_weights=False).proto == model
    assert 1000 < len(counted) < 3000


@pytest.mark.slow
def test_damaged_files_are_left_to_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph, or the error, is what it is when the whole file is read."""
    large = 64
    monkeypatch.setattr(wire, "_LARGE_WEIGHT", large)
    monkeypatch.setattr(wire, "_SMALL_FILE", 0)
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


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grown"
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(reading, "size_of", lambda path, error: 4)
    assert reading.read_bytes(path, 10, ModelFileError) == b"0123456789"
    with pytest.raises(ModelFileError, match="it grew beyond 9 bytes"):
        reading.read_bytes(path, 9, ModelFileError)

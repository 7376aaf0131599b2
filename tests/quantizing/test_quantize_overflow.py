"""Sums of int8 products overflow on x86 processors without VNNI: files that avoid it, and files that are named."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from network_with_attention import images, quantize_for_all, write_network
from onnx import helper, numpy_helper
from torch import Tensor

from nnorm_export import NnormExportError, QuantizeReport, load, quantize
from nnorm_export.files import onnx_file
from nnorm_export.files.parts import with_outputs
from nnorm_export.quantizing.accuracy import sqnr
from nnorm_export.quantizing.schemes import SCHEMES
from nnorm_export.runtimes.onnxruntime import overflow
from nnorm_export.runtimes.onnxruntime.overflow import IN_32_BITS, IN_FLOAT, WITHOUT_OVERFLOW
from nnorm_export.serving.repository import write_repository

pytestmark = pytest.mark.slow
WEIGHTS = 5  # of the convolution, the two products of attention that have weights, and the two dense layers
LIMITS = {"onnxruntime": 64, "tensorrt": 127, "openvino": 64}


@pytest.fixture(scope="module")
def data() -> Tensor:
    return images()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_network(tmp_path_factory.mktemp("overflow"))


@pytest.fixture(scope="module")
def made(source: Path) -> dict[str, QuantizeReport]:
    return quantize_for_all(source)


@pytest.fixture(scope="module")
def of_8_bits(source: Path, data: Tensor) -> Path:
    return quantize(source, data, source.with_name("8 bits.onnx"), reduce_range=False, min_sqnr=None).path


def named(notes: list[str]) -> list[str]:
    return [note.partition(":")[0] for note in notes if "VNNI" in note]


@pytest.mark.parametrize("target", SCHEMES)
def test_second_factors_have_7_bits_where_sums_overflow(
    target: str, made: dict[str, QuantizeReport], data: Tensor
) -> None:
    """Two of them are activations, of attention. In uint8 ONNX Runtime adds their products in 32 bits."""
    path = made[target].path
    proto = onnx.load(path)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    stored = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    factors = [stored[n.input[1]] for n in proto.graph.node if n.op_type in ("Conv", "Gemm", "MatMul")]
    constants = [weights[name] for name in factors if name in weights]
    assert len(constants) == WEIGHTS
    assert max(np.abs(each.astype(int)).max() for each in constants) == LIMITS[target]
    others = sorted({name for name in factors if name not in weights})
    assert len(others) == 2
    if target != "onnxruntime":
        onnx.save(with_outputs(proto, others), path.with_suffix(".outputs.onnx"))
        values = load(path.with_suffix(".outputs.onnx"), "onnxruntime")(data.numpy())
        assert max(np.abs(each.astype(int)).max() for each in values) in (LIMITS[target] - 1, LIMITS[target])


@pytest.mark.parametrize("activation", ["uint8", "int8"])
def test_this_processor_computes_what_the_file_says(
    activation: str, source: Path, data: Tensor, tmp_path: Path
) -> None:
    """The int8 kernels against float arithmetic between the same roundings, and against the float32 file."""
    report = quantize(source, data, tmp_path / "int8.onnx", activation=activation)
    (found,), (exact,) = (
        load(report.path)(data.numpy()),
        load(report.path, session_config={IN_FLOAT: "1"})(data.numpy()),
    )
    assert not np.array_equal(found, exact)  # other kernels ran
    assert sqnr(found, exact) > 35
    assert report.outputs[0].sqnr > 35


@pytest.mark.parametrize("entry", WITHOUT_OVERFLOW)
def test_an_entry_of_the_configuration_makes_8_bits_right(
    entry: str, of_8_bits: Path, source: Path, data: Tensor
) -> None:
    (expected,) = load(source)(data.numpy())
    (result,) = load(of_8_bits, session_config={entry: "1"})(data.numpy())
    assert sqnr(result, expected) > 35
    if overflow.lacks_vnni():
        assert sqnr(load(of_8_bits)(data.numpy())[0], expected) < 30


@pytest.mark.parametrize(
    ("machine", "flags", "may_overflow"),
    [
        ("x86_64", "fma avx2", True),
        ("x86_64", "avx2 avx512bw", True),
        ("x86_64", "avx2 avx512_vnni", False),
        ("AMD64", "avx2 avx_vnni", False),
        ("aarch64", "asimd", False),
    ],
)
def test_a_processor_on_which_sums_overflow_is_named(
    machine: str,
    flags: str,
    may_overflow: bool,
    made: dict[str, QuantizeReport],
    of_8_bits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(overflow, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    expected = [f"{WEIGHTS} of its weights have 8 bits, and this processor has no VNNI"]
    assert named(load(of_8_bits).known_faults) == expected * may_overflow
    assert named(load(made["onnxruntime"].path).known_faults) == []
    for entry in WITHOUT_OVERFLOW:
        assert named(load(of_8_bits, session_config={entry: "1"}).known_faults) == []
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry(entry, "1")
        assert named(load(of_8_bits, session_options=options).known_faults) == []


def test_quantize_and_serve_repo_name_it(
    source: Path, data: Tensor, of_8_bits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnorm_export.runtimes.onnxruntime.overflow.lacks_vnni", lambda: True)
    report = quantize(source, data, tmp_path / "int8.onnx", reduce_range=False, min_sqnr=None)
    assert len(named(report.notices)) == len(report.notices) == 1
    assert report.notices[0] in load(report.path).known_faults
    for number, backend in enumerate(("onnxruntime", "python")):
        notes = write_repository(of_8_bits, tmp_path / str(number), name="net", backend=backend).notes
        assert named(notes) == [f"{WEIGHTS} weights have 8 bits"]


def test_what_computes_in_float_does_not_overflow(made: dict[str, QuantizeReport]) -> None:
    """ONNX Runtime computes a Conv in float, unless its output is rounded to 8 bits."""
    assert overflow.unsafe_weights(onnx_file.read(made["tensorrt"].path)) == WEIGHTS - 1


def test_weights_in_nodes_and_branches_are_named(of_8_bits: Path, tmp_path: Path) -> None:
    """Other tools write weights as Constant nodes; a branch of an If has weights of its own, or reads those outside."""
    proto = onnx.load(of_8_bits)
    kept = [tensor for tensor in proto.graph.initializer if tensor.data_type != onnx.TensorProto.INT8]
    moved = [tensor for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.INT8]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in moved]
    for number, constant in enumerate(constants):
        proto.graph.node.insert(number, constant)
    onnx.save(proto, tmp_path / "constants.onnx")
    assert overflow.unsafe_weights(onnx_file.read(tmp_path / "constants.onnx")) == WEIGHTS

    for place in ("inside", "outside"):
        branch = helper.make_graph(proto.graph.node, "branch", [], proto.graph.output, initializer=kept)
        if place == "outside":
            del branch.node[: len(moved)]
        either = helper.make_node("If", ["yes"], [value.name for value in proto.graph.output])
        either.attribute.extend(helper.make_attribute(f"{name}_branch", branch) for name in ("then", "else"))
        if place == "inside":  # a branch with safe weights, whose dequantized values have the same names
            for node in either.attribute[1].g.node:
                if node.op_type == "Constant" and node.output[0] in {tensor.name for tensor in moved}:
                    safe = numpy_helper.to_array(node.attribute[0].t) // 2
                    node.attribute[0].t.CopyFrom(numpy_helper.from_array(safe))
                    node.output[0] += " safe"
                elif node.op_type == "DequantizeLinear" and node.input[0] in {tensor.name for tensor in moved}:
                    node.input[0] += " safe"
        yes = numpy_helper.from_array(np.array(True), "yes")
        weights = [yes, *(moved if place == "outside" else [])]
        graph = helper.make_graph([either], "outer", proto.graph.input, proto.graph.output, initializer=weights)
        model = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
        model.functions.extend(proto.functions)
        onnx.save(model, tmp_path / f"{place}.onnx")
        assert overflow.unsafe_weights(onnx_file.read(tmp_path / f"{place}.onnx")) == WEIGHTS, place


def test_entries_of_the_configuration_that_are_refused(source: Path) -> None:
    number: Any = {IN_32_BITS: 1}
    with pytest.raises(NnormExportError, match=r"'session\.x64quantprecision': 1 is not text"):
        load(source, session_config=number)
    with pytest.raises(NnormExportError, match="session_options are used unchanged; add the entries to them"):
        load(source, session_options=onnxruntime.SessionOptions(), session_config={"a": "b"})

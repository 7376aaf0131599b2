"""Known faults of ONNX Runtime: this version has those that the table says it has, and load() avoids them."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from nnorm_export import diagnose, export, layers, load, register, verify
from nnorm_export.cli import app
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.runtimes.onnxruntime.known_faults import CONFIG_KEY, FAULTS, Fault, faults_of
from nnorm_export.serving.repository import write_repository

node = helper.make_node
BATCH = 3
PAD, VECTOR, FLOAT64, FLOAT16, GEMM = FAULTS

# Name -> fault, nodes, weights, and the dtype and shape of x. Each is hit by its fault.
FILES = {
    "max-pool": (PAD, [node("Pad", ["x", "p"], ["a"]), node("MaxPool", ["a"], ["y"], kernel_shape=[3, 3])], "float32"),
    "average-pool": (
        PAD,
        [
            node("Pad", ["x", "p"], ["a"]),
            node("Identity", ["a"], ["b"]),
            node("AveragePool", ["b"], ["y"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        ],
        "float32",
    ),
    "vector": (
        VECTOR,
        [node("Transpose", ["x"], ["t"], perm=[0, 1, 3, 2]), node("MatMul", ["t", "v"], ["y"])],
        "float32",
    ),
    "float64": (
        FLOAT64,
        [node("Transpose", ["x"], ["t"], perm=[0, 1, 3, 2]), node("MatMul", ["t", "m"], ["y"])],
        "float64",
    ),
    "identity": (
        GEMM,
        [
            node("Squeeze", ["x", "axes"], ["s"]),
            node("Transpose", ["s"], ["t"], perm=[0, 1]),
            node("Gemm", ["t", "m", "v"], ["y"]),
        ],
        "float32",
    ),
}
SHAPES = {"identity": (1, 1, 6, 6)}


def model(nodes: Sequence[onnx.NodeProto], dtype: str, shape: Sequence[int]) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    weights = {
        "p": np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int64),
        "axes": np.array([0, 1], np.int64),
        "v": rng.standard_normal(6).astype(dtype),
        "m": rng.standard_normal((6, 6)).astype(dtype),
    }
    used = {name for each in nodes for name in each.input}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, list(shape))],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items() if name in used],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


@pytest.fixture(params=FILES)
def hit(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Fault, Path, np.ndarray]:
    fault, nodes, dtype = FILES[request.param]
    shape = SHAPES.get(request.param, (BATCH, 2, 6, 6))
    path = tmp_path / f"{request.param}.onnx"
    onnx.save(model(nodes, dtype, shape), path)
    x = np.random.default_rng(0).standard_normal(shape) - (2 if fault is PAD else 0)  # zeros are greater than it
    return fault, path, x.astype(dtype)


def run(path: Path, x: np.ndarray, level: onnxruntime.GraphOptimizationLevel) -> np.ndarray | None:
    """The result of a plain session; None if it fails."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level
    try:
        return np.asarray(onnxruntime.InferenceSession(str(path), options).run(None, {"x": x})[0])
    except Exception:  # ONNX Runtime's exceptions share no public base
        return None


def equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and np.allclose(a, b, atol=1e-4)


def test_this_version_has_it_and_load_avoids_it(hit: tuple[Fault, Path, np.ndarray]) -> None:
    fault, path, x = hit
    right = run(path, x, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    found = run(path, x, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
    if fault.is_in(onnxruntime.__version__):
        assert not equal(found, right), f"ONNX Runtime {onnxruntime.__version__} is without the fault: say so in FAULTS"
    runner = load(path)
    assert equal(runner(x)[0], right)
    assert equal(load(path, session_config={CONFIG_KEY: "ConstantFolding"})(x)[0], right)
    assert equal(load(path, "reference")(x)[0], right)
    named = [name for name in runner.known_faults if str(fault) in name]
    assert bool(named) == fault.is_in(onnxruntime.__version__)


def test_doctor_and_serve_repo_name_it(tmp_path: Path) -> None:
    fault, nodes, dtype = FILES["vector"]
    onnx.save(model(nodes, dtype, (BATCH, 2, 6, 6)), tmp_path / "m.onnx")
    found = {each.runtime: each.known_faults for each in diagnose(tmp_path / "m.onnx").runtimes}
    assert found["onnxruntime"][0].startswith(str(fault))
    assert found["reference"] == []
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "m.onnx")])
    assert result.output.count("known fault: ONNX Runtime 1.18 and later does not transpose the matrix") == 1
    notes = write_repository(tmp_path / "m.onnx", tmp_path / "repository").notes
    assert any("MatmulTransposeFusion" in note and "--backend python" in note for note in notes)


def test_files_without_the_pattern_are_left_alone(tmp_path: Path) -> None:
    nodes = [
        node("Pad", ["x", "p"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2]),
        node("Transpose", ["c"], ["t"], perm=[1, 0, 2, 3]),
        node("MatMul", ["t", "m"], ["y"]),
    ]
    onnx.save(model(nodes, "float32", (BATCH, 2, 6, 6)), tmp_path / "m.onnx")
    assert load(tmp_path / "m.onnx").known_faults == []


def test_a_damaged_graph_ends_the_search() -> None:
    proto = model([node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])], "float32", (1, 1, 4, 4))
    del proto.graph.node[:]
    circle = [node("Identity", ["a"], ["b"]), node("Identity", ["b"], ["a"]), node("MaxPool", ["a"], ["y"])]
    proto.graph.node.extend(circle)
    assert faults_of(ModelFile(Path("m.onnx"), proto, {})) == []


def test_versions() -> None:
    assert FLOAT64.is_in("1.26.0")
    assert not FLOAT64.is_in("1.27.1")
    assert FLOAT16.is_in("1.23.0")
    assert not FLOAT16.is_in("1.22.1")
    assert PAD.is_in("1.31.1")
    assert not PAD.is_in("1.32.0")
    assert VECTOR.is_in("2.0.0")


class Padded(nn.Module):
    """What two of the faults hit, as PyTorch writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.vector = layers.BatchNormalNorm2d(2), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x) - 3
        return F.max_pool2d(F.pad(h, (1, 1, 1, 1)), 3), h.transpose(-1, -2) @ self.vector


@pytest.mark.slow
def test_a_model_of_pytorch_is_exported_and_verified(tmp_path: Path) -> None:
    network, x = Padded().eval(), torch.randn(3, 2, 6, 6)
    path = export(network, x, tmp_path / "m.onnx").path  # raised ParityError
    report = verify(path, network, x)
    assert report
    is_hit = [fault.is_in(onnxruntime.__version__) for fault in (PAD, VECTOR)]
    names = [name for name, hit in zip(("Pad_Fusion", "MatmulTransposeFusion"), is_hit, strict=True) if hit]
    for found, name in zip(report.known_faults, names, strict=True):
        assert f"a fault of its {name}" in found
    options = onnxruntime.SessionOptions()
    register(options)
    plain = onnxruntime.InferenceSession(str(path), options).run(None, {"x": x.numpy()})
    assert [not equal(a, b) for a, b in zip(plain, load(path)(x.numpy()), strict=True)] == is_hit


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = layers.LayerNormalNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.attention(h, h, h, need_weights=False)[0]
        return y


CRASHING = """
import sys
import onnxruntime
onnxruntime.InferenceSession(sys.argv[1])
"""


def opens(path: Path) -> bool:
    """Whether a plain session opens the file, in a process of its own, which the fault ends."""
    done = subprocess.run([sys.executable, "-c", CRASHING, str(path)], check=False, capture_output=True, timeout=300)
    return done.returncode == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the fault is in optimizations for x86")
def test_a_transpose_before_a_float16_product_ends_the_process(tmp_path: Path) -> None:
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]), helper.make_node("MatMul", ["t", "m"], ["y"])]
    path = tmp_path / "m.onnx"
    onnx.save(model(nodes, "float16", ("n", 5, 6)), path)
    assert opens(path) != FLOAT16.is_in(onnxruntime.__version__)
    assert any(str(FLOAT16) in name for name in load(path).known_faults)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["portable", "primitives"])
def test_export_writes_float16_attention_that_every_session_opens(tmp_path: Path, form: str) -> None:
    """Its Transposes stand behind the products."""
    path = export(Attending().eval(), torch.randn(3, 5, 16), tmp_path / "m.onnx", dtype="fp16", form=form).path
    assert opens(path)
    assert not load(path).known_faults

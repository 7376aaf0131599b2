"""What runs a file here: ONNX Runtime with the kernels, ONNX Runtime with the bodies, onnx's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from nnorm_export import library, load
from nnorm_export.runtimes import Runner

_OPTIONS: dict[str, dict[str, Any]] = {
    "kernel": {"kernels": True},
    "body": {"kernels": False},
    "reference": {"runtime": "reference"},
}
# Without a compiler nnorm_export has no kernels; tests/custom_ops/test_library.py shows that it has them elsewhere.
HAS_KERNELS = library.find_library() is not None
BACKENDS = tuple(backend for backend in _OPTIONS if HAS_KERNELS or backend != "kernel")
needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="nnorm_export is installed without its kernels, because there was no C++ compiler"
)


def newest_opset() -> int:
    """The newest opset that the installed ONNX Runtime reads."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    for opset in range(onnx.defs.onnx_opset_version(), 18, -1):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:  # ONNX Runtime refuses a newer opset; its exceptions have no common base
            continue
        return opset
    return 18


def open_with(path: str | Path, backend: str) -> Runner:
    """Opens a file and asserts that every normalization which is a node of it is run by this backend."""
    runner = load(path, **_OPTIONS[backend])
    assert set(runner.implementations.values()) <= {"kernel" if backend == "kernel" else "body"}
    return runner

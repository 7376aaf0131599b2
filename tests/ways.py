"""The ways to run a file here: ONNX Runtime with the kernels, ONNX Runtime with the bodies, onnx's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnorm_export import load
from nnorm_export.runtimes import Runner

_OPTIONS: dict[str, dict[str, Any]] = {
    "kernel": {"kernels": True},
    "body": {"kernels": False},
    "reference": {"runtime": "reference"},
}
WAYS = tuple(_OPTIONS)


def open_with(path: str | Path, way: str) -> Runner:
    """Opens a file and proves that every normalization which is a node of it is run this way."""
    runner = load(path, **_OPTIONS[way])
    assert set(runner.implementations.values()) <= {"kernel" if way == "kernel" else "body"}
    return runner

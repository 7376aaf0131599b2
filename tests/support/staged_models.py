"""Models of one weight that are written and read again, and writers that are killed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from nnorm_export.files import staging
from nnorm_export.files.staging import save, staged


def model(value: float) -> ir.Model:
    """A graph of one weight, which it returns; external data has room for it."""
    weight = onnx.numpy_helper.from_array(np.full((64, 64), value, np.float32), "w")
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64, 64])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["y"])], f"g{value}", [], [y], [weight])
    opsets = [onnx.helper.make_opsetid("", 18)]
    return ir.serde.deserialize_model(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))


def write(path: Path, value: float, external_data: bool) -> None:
    with staged(path) as new:
        save(model(value), new, external_data)


def value_in(path: Path) -> float:
    """The weight; an error if graph and data do not belong together."""
    proto = onnx.load(path)
    weights = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    assert proto.graph.name == f"g{float(weights[0, 0])}"
    return float(weights[0, 0])


def weights_of(path: Path) -> set[str]:
    """The files beside ``path`` that have the hash of their content in their names."""
    files = {entry.name: entry for entry in path.parent.glob(f"{path.name}.*.data")}
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return {name for name, digest in digests.items() if name == f"{path.name}.{digest[:16]}.data"}


class Killed(BaseException):
    """Ends a writer as SIGKILL does: nothing is cleaned up."""


def kill_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ends the writer at its ``steps``-th rename, unlink or flush."""
    left = [steps]

    def counted(function: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)  # type: ignore[operator]

        return call

    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    clean_up = staging._clean_up
    monkeypatch.setattr(staging, "_clean_up", lambda *paths: None if left[0] < 0 else clean_up(*paths))

"""Small files for what serves: without PyTorch where the operators do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned
from nnorm_export.runtimes.processor import cores_here, processor

SERVICE = {"instances": 3, "threads": 2, "max_batch": 8, "max_delay_us": 500}


def write_negation(path: Path, weights: int = 0) -> Path:
    """A file that negates rows of three numbers, with so many ``weights`` of float32 in a second file."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
    zeros = [numpy_helper.from_array(np.zeros(weights, np.float32), "w")] if weights else []
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    if weights:
        nodes.append(helper.make_node("Neg", ["w"], ["unused"]))
    graph = helper.make_graph(nodes, "net", tensors[:1], tensors[1:], zeros)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path, save_as_external_data=bool(weights), location=f"{path.name}.data")
    return path


def write_settings(path: Path, service: dict[str, int] | None = None, **options: object) -> Path:
    """The settings that tune would write for the file ``path``."""
    tuned = Tuned(
        path=path.with_suffix(".tuned.json"),
        file=path,
        sha256=file_sha256(path),
        runtime="onnxruntime",
        options=dict(options),
        batch=1,
        objective="latency",
        processor=processor(),
        cores=cores_here(),
        service=service,
        measured={"winner": {}},
    )
    tuned.path.write_text(tuned.text)
    assert json.loads(tuned.text)["file"] == path.name
    return tuned.path

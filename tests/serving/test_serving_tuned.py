"""What a tuned file says to Triton, and what the caller says wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from nnorm_export import ExportError, write_repository
from nnorm_export.serving.tuned import arguments_of

SERVICE = {"instances": 2, "threads": 3, "max_batch": 8, "max_delay_us": 500}


@dataclass
class Tuned:
    runtime: str = "onnxruntime"
    options: Mapping[str, Any] = field(default_factory=dict)
    service: Mapping[str, int] | None = None
    file: Path = Path("model.onnx")


def test_the_service_is_written_into_the_configuration(tmp_path: Path) -> None:
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "net", tensors[:1], tensors[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    config = write_repository(path, tmp_path / "models", **arguments_of(Tuned(service=SERVICE))).config
    assert "max_batch_size: 8\n" in config
    assert "dynamic_batching { max_queue_delay_microseconds: 500 }" in config
    assert "count: 2 }" in config
    assert 'key: "intra_op_thread_count" value: { string_value: "3" }' in config
    alone = Tuned(service={**SERVICE, "max_batch": 1, "max_delay_us": 0})
    config = write_repository(path, tmp_path / "models", name="alone", **arguments_of(alone)).config
    assert "max_batch_size: 0\n" in config
    assert "dynamic_batching" not in config


def test_the_caller_wins() -> None:
    given = {"instances": 1, "threads": 0, "max_batch_size": None, "max_queue_delay_microseconds": 0, "name": "net"}
    assert arguments_of(Tuned(service=SERVICE), **given) == {**given, "max_batch_size": 8}


def test_without_a_service_the_threads_of_the_session_are_left() -> None:
    assert arguments_of(Tuned(options={"intra_op_num_threads": 2, "kernels": True})) == {"threads": 2}
    assert arguments_of(Tuned(), name=None) == {}
    of_service = arguments_of(Tuned(options={"intra_op_num_threads": 2}, service=SERVICE))
    assert of_service["threads"] == 3, "the session of the service, not the one that is fastest alone"


def test_an_engine_has_no_threads() -> None:
    assert "threads" not in arguments_of(Tuned("tensorrt", service=SERVICE))


def test_what_triton_cannot_serve() -> None:
    message = "model.onnx: it was tuned for the runtime openvino, and Triton's backends run onnxruntime, "
    with pytest.raises(ExportError, match=message):
        arguments_of(Tuned("openvino"))
    with pytest.raises(ExportError, match=r"its service has no threads, max_batch; tune the model again"):
        arguments_of(Tuned(service={"instances": 1, "max_delay_us": 0}))

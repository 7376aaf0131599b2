"""onnx's own reference evaluator: slow, complete, and independent of any runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from nnorm_export.dtypes import Array
from nnorm_export.files import onnx_file
from nnorm_export.runtimes.bodies_runner import BodiesRunner
from nnorm_export.runtimes.runtime import Component, Runtime


class BatchNormalization(OpRun):
    """The operator before opset 14, with the statistics that are given.

    onnx's own (1.23) replaces them by those of the batch unless momentum is None, and the default of momentum is 0.9.
    """

    op_domain = ""

    def _run(self, x: Array, *parameters: Array, epsilon: float, **_: Any) -> tuple[Array]:
        scale, bias, mean, variance = (each.reshape(-1, *[1] * (x.ndim - 2)) for each in parameters)
        return ((scale * (x - mean) / np.sqrt(variance + epsilon) + bias).astype(x.dtype),)


class ReferenceRunner(BodiesRunner):
    """A model in ``onnx.reference.ReferenceEvaluator``."""

    runtime = "reference"
    library = "the reference evaluator"

    def _open(self) -> None:
        proto = onnx_file.read_with_weights(self._file.path)  # onnx's own reader refuses links
        _rename_overloads(proto)
        self._evaluator = ReferenceEvaluator(proto, new_ops=[BatchNormalization] if 0 < self._file.opset < 14 else [])

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        with np.errstate(all="ignore"):  # other runtimes do not warn about NaN and infinity either
            results = self._evaluator.run(None, feed)
        # The evaluator computes some operators in a wider dtype than the graph's (float16 in onnx 1.2x).
        return [np.asarray(result).astype(info.dtype) for info, result in zip(self.outputs, results, strict=True)]


def _rename_overloads(proto: onnx.ModelProto) -> None:
    """Gives each overload of a function in ``proto`` a name of its own.

    onnx's evaluator (1.23) looks functions up by domain and name, and would run one overload for all.
    """
    functions = {onnx_file.identifier(function) for function in proto.functions}
    for node in onnx_file.all_nodes(proto):
        if node.overload and onnx_file.identifier(node) in functions:
            node.op_type, node.overload = f"{node.op_type}:{node.overload}", ""
    for function in proto.functions:
        if function.overload:
            function.name, function.overload = f"{function.name}:{function.overload}", ""


def _components() -> list[Component]:
    opsets = f"{onnx.__version__}, opsets up to {onnx.defs.onnx_opset_version()}, IR up to {onnx.IR_VERSION}"
    return [Component("onnx", opsets)]


RUNTIMES = (
    Runtime(
        name=ReferenceRunner.runtime,
        runner=ReferenceRunner,
        packages=("onnx",),
        opens_onnx=True,
        components=_components,
    ),
)

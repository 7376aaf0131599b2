"""onnx's own reference evaluator: slow, complete, and independent of any runtime."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from nnorm_export.dtypes import Array
from nnorm_export.errors import ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid
from nnorm_export.files.tensors import inputs_of, outputs_of
from nnorm_export.runtimes.runner import Runner
from nnorm_export.runtimes.runtime import Component, Runtime


class ReferenceRunner(Runner):
    """A model in ``onnx.reference.ReferenceEvaluator``."""

    runtime = "reference"

    def __init__(self, path: str | Path) -> None:
        self._file = onnx_file.read(path)
        self.noted, self.lengths = self._file.metadata, self._file.lengths
        refuse_invalid(self._file)
        if not self._file.has_bodies:
            raise ModelFileError(
                f"{path}: the file is in the form '{self._file.form}', whose nnorm nodes have no bodies, and the "
                "reference evaluator runs bodies only; export the form 'portable' or 'primitives' instead"
            )
        proto = onnx_file.read_with_weights(path)  # onnx's own reader refuses links
        _rename_overloads(proto)
        try:
            self._evaluator = ReferenceEvaluator(proto)
        except Exception as error:  # unknown operators and attributes: errors of many types
            raise ModelFileError(
                f"{path}: the reference evaluator cannot load it: {str(error) or type(error).__name__}"
            ) from error
        self.inputs, self.outputs = inputs_of(self._file.proto), outputs_of(self._file.proto)

    @cached_property
    def implementations(self) -> dict[str, str]:
        return {onnx_file.name_of(node): "body" for node in self._file.normalizations}

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

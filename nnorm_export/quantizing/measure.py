"""measure(): calibrates the float graph of a file, and chooses the nodes that compute in int8."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from nnorm_export._version import __version__
from nnorm_export.files.staging import save
from nnorm_export.graphs.forms import apply_form
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, METADATA_PREFIX
from nnorm_export.quantizing.activations import ACTIVATIONS, join_activations
from nnorm_export.quantizing.calibration import ranges_of
from nnorm_export.quantizing.calibration_data import Feed, count_of
from nnorm_export.quantizing.dynamic import without_weight
from nnorm_export.quantizing.float_graph import ASKED_FOR, FloatGraph
from nnorm_export.quantizing.layers import kept_nodes
from nnorm_export.quantizing.request import Request
from nnorm_export.quantizing.suitable import unsuitable, without_range
from nnorm_export.runtimes import Runner, load


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A float graph with the ranges of its tensors.

    Attributes:
        ranges: those of ONNX Runtime's calibrator; None for the method ``dynamic``.
        samples: the number of samples that the ranges come from.
        floats: name of a node that stays float -> why.
        names: the nodes that compute in int8.
    """

    request: Request
    graph: FloatGraph
    ranges: Any
    samples: int
    floats: dict[str, str]
    names: list[str]

    def quantized(self, names: Sequence[str]) -> tuple[ir.Model, set[str]]:
        """The model with the nodes ``names`` in int8, and the names of the norms that are tables in it."""
        request, source = self.request, self.request.source
        model, tables = self.graph.quantized(self.ranges, names, request.settings)
        if any(node.domain == DOMAIN for node in model.graph):
            model.opset_imports[DOMAIN] = DOMAIN_VERSION
            apply_form(model, request.form)
        model.producer_name, model.producer_version = "nnorm_export", __version__
        by = request.method if request.settings.dynamic else f"{request.method} on {self.samples} samples"
        about = f"{request.settings}, {by}"
        entries = {"version": __version__, "quantization": about}
        if source.normalizations:
            entries["form"] = request.form
        if "layers" in source.noted:
            op_types = {node.name: node.op_type for node in model.graph}
            layers = [{**layer, "op_type": op_types.get(layer["node"], layer["op_type"])} for layer in source.layers]
            entries["layers"] = json.dumps(layers)
        model.metadata_props.update({METADATA_PREFIX + key: value for key, value in entries.items()})
        return model, tables

    def runner(self, names: Sequence[str]) -> Runner:
        """A runner of the model with the nodes ``names`` in int8."""
        path = self.graph.path.with_name("quantized.onnx")
        save(self.quantized(names)[0], path, None)
        return load(path, "onnxruntime", session_config=self.request.scheme.session_config)


def measure(request: Request, feeds: Sequence[Feed], folder: Path) -> Calibrated:
    """Measures the ranges of all tensors on ``feeds``; the float graph is written into ``folder``.

    Raises:
        InputError: a name in ``keep`` is unknown, or the file does not run on ``feeds``.
        ModelFileError: nothing can be quantized.
    """
    settings, graph = request.settings, FloatGraph(request.source, folder, with_tables=request.has_tables)
    floats = dict.fromkeys(kept_nodes(graph.proto, request.keep), ASKED_FOR)
    if request.has_tables:
        join_activations(graph.proto, set(floats))
    floats = unsuitable(graph.proto, settings) | floats
    if settings.dynamic:
        floats = without_weight(graph.proto) | floats
    graph.names(settings, floats)  # raises its error before the calibration, which takes long
    ranges = None
    if not settings.dynamic:
        op_types = (*settings.op_types, *ACTIVATIONS)
        ranges = ranges_of(graph.path, op_types, feeds, request.method, request.percentile, request.progress)
        floats = without_range(graph.proto, ranges) | floats
    return Calibrated(
        request=request,
        graph=graph,
        ranges=ranges,
        samples=count_of(feeds),
        floats=floats,
        names=graph.names(settings, floats),
    )

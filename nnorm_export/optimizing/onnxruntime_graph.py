"""The graph that ONNX Runtime optimizes a file to on this machine, with the metadata of the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export._version import __version__
from nnorm_export.files.kept_io_types import KEY, to_json
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.files.optimized_for import METADATA_KEY, OPTIMIZED, Machine
from nnorm_export.names import METADATA_PREFIX
from nnorm_export.runtimes.onnxruntime.blocked_layout.nchwc import read_graph
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner


def optimized_graph(file: ModelFile) -> ir.Model:
    """Returns ``file`` as ONNX Runtime optimizes it on the CPU of this machine with the kernels, in memory.

    Raises:
        ModelFileError: ONNX Runtime cannot load the file.
        RuntimeMissingError: the library of kernels is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        OnnxRuntimeRunner(file.path, optimize=False, kernels=True).write_graph(path)
        model = read_graph(path, file.path)
        ir.external_data.load_to_model(model)
    for domain in model.opset_imports.keys() - {"", *(node.domain for node in RecursiveGraphIterator(model.graph))}:
        del model.opset_imports[domain]  # ONNX Runtime lists all of its domains, an older version has fewer
    return model


def carry_over(file: ModelFile, model: ir.Model, machine: Machine) -> None:
    """Writes the metadata of ``file`` into ``model``, which was optimized from it for ``machine``."""
    model.producer_name, model.producer_version = "nnorm_export", __version__
    model.graph.name = file.proto.graph.name
    model.metadata_props.update({prop.key: prop.value for prop in file.proto.metadata_props})
    notes = {node.name: {prop.key: prop.value for prop in node.metadata_props} for node in file.proto.graph.node}
    op_types = {}
    for node in model.graph:
        if node.name:
            node.metadata_props.update(notes.get(node.name, {}))
            op_types[node.name] = node.op_type
    about: dict[str, str] = {"version": __version__, "form": OPTIMIZED, METADATA_KEY: machine.to_json()}
    if "layers" in file.noted:
        layers = [{**entry, "op_type": op_types.get(entry["node"], entry["op_type"])} for entry in file.layers]
        about["layers"] = json.dumps(layers)
    if kept := file.kept_io_types:
        about[KEY] = to_json(kept)
    model.metadata_props.update({METADATA_PREFIX + key: value for key, value in about.items()})

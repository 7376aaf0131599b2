"""load()'s part of the blocked layout: whether a file may gain, and ONNX Runtime's graph of it, rewritten.

The graph lies in a temporary folder while a session is opened. Its weights are the file that ONNX Runtime wrote beside
it. The session maps this file into memory, so that its space on the disk is free again when the session ends. Windows
cannot remove a file that is mapped: there the weights are in the file of the graph, which is read as a whole.

Making the graph takes about as long as opening the file once more.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from nnorm_export.domain import OPERATORS
from nnorm_export.errors import RuntimeMissingError, first_line
from nnorm_export.files.onnx_file import ModelFile

MOST_BYTES = 1 << 30  # of a file with its weights, which load() rewrites without being asked
KEEPS_MAPPED_FILES = os.name == "nt"  # whether the system refuses to remove a file that is mapped into memory


def may_gain(file: ModelFile, block: int | None) -> bool:
    """Whether the file has convolutions, and norms that can work in blocks of ``block`` channels."""
    graph = file.proto.graph
    if block is None or not any(node.op_type == "Conv" and not node.domain for node in graph.node):
        return False
    channels = {tensor.name: tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) == 1}
    return any(
        # Channels of an unknown number may be whole blocks.
        operator.blocked_twin is not None and channels.get(node.input[1], 0) % block == 0
        for node in file.normalizations
        if (operator := OPERATORS.get(node.op_type)) is not None
    )


def is_large(file: ModelFile) -> bool:
    """Whether load() does not rewrite the file without being asked, because its weights would be written once more."""
    files = (file.path, *(file.path.parent / name for name in file.external_data))
    # Opening the file reports external data that are missing.
    return sum(path.stat().st_size for path in files if path.exists()) > MOST_BYTES


def rewrite(written: Path, rewritten: Path, block: int, source: Path) -> list[str]:
    """Writes ``written``, the graph of ``source``, again beside it, with norms in blocks, and returns their names.

    Raises:
        RuntimeMissingError: onnx_ir or networkx is not installed.
        ModelFileError: the graph is not valid.
        OSError: the file cannot be written.
    """
    try:  # here, because they take 0.3 seconds to import
        ir = importlib.import_module("onnx_ir")
        nchwc = importlib.import_module("nnorm_export.runtimes.onnxruntime.blocked_layout.nchwc")
    except ImportError as error:
        raise RuntimeMissingError(f"{first_line(error)}; pip install onnx_ir networkx") from error
    model = nchwc.read_graph(written, source)
    left = nchwc.use_blocks(model, block)
    in_blocks = [node.name for node in nchwc.norms_of(model) if node not in left]
    if in_blocks:
        if KEEPS_MAPPED_FILES:
            ir.external_data.load_to_model(model)
        ir.save(model, rewritten)
    return in_blocks

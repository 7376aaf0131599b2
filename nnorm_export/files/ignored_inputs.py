"""The inputs of a file on whose values no output depends.

A trace leaves out what the example does not need: transformers drops a mask of ones, and the file then ignores every
other mask too.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from nnorm_export.errors import ModelFileError
from nnorm_export.files.archive import is_archive
from nnorm_export.files.onnx_file import read, with_nested

_READ_LENGTHS_ALONE = ("Shape", "Size")


def ignored_inputs(path: Path) -> list[str]:
    """The ignored inputs of the ONNX file ``path``; none of another file."""
    try:
        return [] if is_archive(path) else ignored_of(read(path, large_weights=False).proto.graph)
    except ModelFileError:  # it is an engine or behind a URL
        return []


def ignored_of(graph: onnx.GraphProto) -> list[str]:
    """The inputs without a path to an output; one of which only the lengths are read has none."""
    needed = {value.name for value in graph.output}
    for node in reversed(graph.node):
        is_of_lengths = node.op_type in _READ_LENGTHS_ALONE and node.domain in ("", "ai.onnx")
        if not is_of_lengths and not needed.isdisjoint(node.output):
            needed.update(name for each in with_nested([node]) for name in each.input)
            for attribute in node.attribute:  # a graph may return an outer value as it is
                needed.update(value.name for inner in (attribute.g, *attribute.graphs) for value in inner.output)
    weights = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in needed | weights]


def about_ignored_inputs(names: list[str]) -> str:
    """Says which inputs are ignored; empty for none."""
    return (
        f"no output depends on the values of {', '.join(names)}. If the model needs them, export it with an example in "
        "which they matter"
        if names
        else ""
    )

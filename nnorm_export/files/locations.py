"""Weights that lie in other files than the model: which file a location may name. Every reader asks here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from onnx.external_data_helper import uses_external_data

from nnorm_export.errors import ModelFileError
from nnorm_export.reading import size_of


def locate(model: Path, location: str) -> Path:
    """Returns the file that ``location``, in the file ``model``, names. It need not exist.

    It is a regular file in the folder of ``model`` or below, after links are followed. If ``model`` is a link itself,
    as in the cache of Hugging Face, it may also lie beside the file that ``model`` leads to.

    Raises:
        ModelFileError: the location is empty, absolute, has ``..``, or leaves the folder by a link; or it names
            something other than a regular file, or the model itself.
    """
    paths = PurePosixPath(location), PureWindowsPath(location)
    leaves = any(path.is_absolute() or path.drive or path.root or ".." in path.parts for path in paths)
    if not location or "\0" in location or not paths[0].name:
        raise ModelFileError(f"{model}: a weight names the file {location!r} for its data, which is not a name")
    file = model.parent / location
    try:
        real, folder, target = file.resolve(), model.parent.resolve(), model.resolve()
        exists = _exists(real)
    except (OSError, RuntimeError) as error:  # links in a circle; a name that is too long
        raise ModelFileError(f"{model}: its weights lie in {location!r}, which cannot be found ({error})") from None
    if leaves or not (real.is_relative_to(folder) or (file.is_symlink() and real.parent == target.parent)):
        raise ModelFileError(
            f"{model}: its weights lie in {location!r}, outside of its folder; save the model again with the weights "
            "beside it"
        )
    if real == target:
        raise ModelFileError(f"{model}: its weights lie in {location!r}, which is the model itself; save it again")
    if exists:
        size_of(real, ModelFileError, f", and {model} has weights there")
    return file


def _exists(path: Path) -> bool:
    """Whether there is something at ``path``.

    Raises:
        OSError: the system cannot tell; Path.exists() says no then, since Python 3.14.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def locations(proto: onnx.ModelProto) -> list[str]:
    """What the tensors of ``proto`` name, in graphs, constants and functions, each once."""
    return sorted({_location(tensor) for tensor in external_tensors(proto)})


def external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors of ``proto`` whose data lie in other files, in graphs, constants and functions."""
    return filter(uses_external_data, _tensors(proto))


def unread_bytes(model: Path, proto: onnx.ModelProto) -> dict[str, int]:
    """The number of bytes behind the last weight, of each file beside ``model`` that has any."""
    ends: dict[str, int] = {}
    for tensor in external_tensors(proto):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = locate(model, _location(tensor))
        try:
            length = int(entries["length"]) if "length" in entries else file.stat().st_size
            end = int(entries.get("offset", 0)) + length
        except (OSError, ValueError):  # a runtime says what is wrong with it
            continue
        ends[_location(tensor)] = max(end, ends.get(_location(tensor), 0))
    sizes = {location: locate(model, location).stat().st_size for location in ends if locate(model, location).exists()}
    return {location: size - ends[location] for location, size in sizes.items() if size > ends[location]}


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _graphs(proto):
        yield from graph.node
    for function in proto.functions:
        yield from function.node


def _location(tensor: onnx.TensorProto) -> str:
    return next((entry.value for entry in reversed(tensor.external_data) if entry.key == "location"), "")


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in _graphs(proto):
        yield from graph.initializer
        yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
    for node in _nodes(proto):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            sparse = (attribute.sparse_tensor, *attribute.sparse_tensors)
            yield from (part for each in sparse for part in (each.values, each.indices))


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph of ``proto``, and the graphs in its nodes and in those of its functions."""
    nodes = [node for function in proto.functions for node in function.node]
    graphs = [proto.graph, *(training.initialization for training in proto.training_info)]
    graphs += [training.algorithm for training in proto.training_info]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield graph
            nodes += graph.node
        else:
            for attribute in nodes.pop().attribute:
                graphs += [inner for inner in (attribute.g, *attribute.graphs) if inner.node or inner.initializer]

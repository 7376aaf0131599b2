"""Reading an ONNX file without running it: its graph, and the metadata that export() wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import ModelFileError
from nnorm_export.files import kept_io_types, lengths
from nnorm_export.files.archive import is_archive, read_archive
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.inlined import refuse_many
from nnorm_export.files.layer_entries import check_layers
from nnorm_export.files.least_batch import LEAST_BATCH, least_rows
from nnorm_export.files.locations import load_weights, locate, locations
from nnorm_export.files.text import find_undecoded
from nnorm_export.files.wire import read_without_weights
from nnorm_export.names import DOMAIN, METADATA_PREFIX
from nnorm_export.reading import PROTOBUF_BYTES, damage_of, parse_json, read_bytes, size_of

_REMEDY = "; nnorm_export.export makes one from a PyTorch model"
# Of an ONNX model in protobuf's encoding: the version of its format, and the header of one of the next fields.
_BEGINNING = re.compile(rb"\x08[\x03-\x1f][\x12\x1a\x22\x28\x32\x3a\x42]")


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file: its graph, without the weights in external data, and what export() noted in its metadata."""

    path: Path
    proto: onnx.ModelProto
    noted: dict[str, str]

    @property
    def form(self) -> str:
        """``portable``, ``primitives``, ``custom``, ``optimized``; ``unknown`` for a file that others wrote."""
        return self.noted.get("form", "unknown")

    @property
    def opset(self) -> int:
        """The version of the standard operators; 0 if the file does not import them."""
        return next((entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), 0)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The entries that export() wrote about each normalization, checked by :func:`.check_layers`."""
        layers: list[dict[str, Any]] = json.loads(self.noted.get("layers", "[]"))
        return layers

    @property
    def lengths(self) -> dict[str, tuple[int, int | None]]:
        """The lengths of the dynamic axes at which the file is right (:mod:`.lengths`)."""
        return lengths.from_json(self.noted.get(lengths.KEY, "{}"))

    @property
    def least_batch(self) -> str:
        """See :mod:`.least_batch`."""
        return self.noted.get(LEAST_BATCH, "")

    @property
    def kept_io_types(self) -> dict[str, str]:
        """Name of a float32 input or output that is half-precision inside -> its dtype (:mod:`.kept_io_types`)."""
        graph = self.proto.graph
        return kept_io_types.kept_io_types(graph, with_nested(graph.node), self.noted)

    @property
    def normalizations(self) -> list[onnx.NodeProto]:
        """The nodes of the domain ``nnorm``, also those in branches and loops."""
        return [node for node in with_nested(self.proto.graph.node) if node.domain == DOMAIN]

    @property
    def has_normalizations_in_branches(self) -> bool:
        """Whether a normalization is in a branch or a loop."""
        return len(self.normalizations) > len([node for node in self.proto.graph.node if node.domain == DOMAIN])

    @property
    def has_normalizations_in_functions(self) -> bool:
        return len(self.normalizations) < sum(node.domain == DOMAIN for node in all_nodes(self.proto))

    @property
    def has_bodies(self) -> bool:
        return not self.bare

    @property
    def bare(self) -> frozenset[str]:
        """The operators without a body in the file, among the normalizations of the graph and of functions."""
        bodies = {identifier(function) for function in self.proto.functions}
        nodes = [node for node in all_nodes(self.proto) if node.domain == DOMAIN]
        return frozenset(node.op_type for node in nodes if identifier(node) not in bodies)

    @property
    def external_data(self) -> list[str]:
        """The names of the files with weights beside the model; :func:`.locate` has accepted each name."""
        return locations(self.proto)

    def holds(self, *dtypes: int) -> bool:
        """Whether an input, an output or a weight has one of these dtypes of ``onnx.TensorProto``; also a kept one."""
        graph = self.proto.graph
        types = {weight.data_type for weight in graph.initializer if len(weight.dims) >= 2}
        types |= {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        types |= {DTYPES[name].onnx_type for name in self.kept_io_types.values()}
        return not types.isdisjoint(dtypes)

    @property
    def has_float16(self) -> bool:
        """Whether any value is float16, intermediate values included."""
        kind = onnx.TensorProto.FLOAT16
        return self.holds(kind) or any(_makes(node, kind) for node in all_nodes(self.proto))


def identifier(called: onnx.NodeProto | onnx.FunctionProto) -> tuple[str, str, str]:
    """(domain, name, overload) of a function, or of the function that a node calls."""
    name = called.name if isinstance(called, onnx.FunctionProto) else called.op_type
    return called.domain, name, called.overload


def name_of(node: onnx.NodeProto) -> str:
    """The name of ``node``; for a node without a name, the name that TensorRT's parser gives it."""
    return node.name or default_name(node.output[0])


def default_name(output: str) -> str:
    """The name that TensorRT's parser gives to a node without a name whose first output is ``output``."""
    return f"node_of_{output}"


def all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of ``proto``, also those in its functions and in the graphs of nodes."""
    yield from with_nested(proto.graph.node)
    for function in proto.functions:
        yield from with_nested(function.node)
        for default in function.attribute_proto:
            for graph in (default.g, *default.graphs):
                yield from with_nested(graph.node)


def with_nested(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields each of ``nodes``, followed by the nodes of the graphs in its attributes."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from with_nested(graph.node)


def _makes(node: onnx.NodeProto, dtype: int) -> bool:
    """Whether ``node`` is a Cast to ``dtype`` or a constant with this dtype."""
    return any(
        (attribute.name == "to" and attribute.i == dtype) or attribute.t.data_type == dtype
        for attribute in node.attribute
    )


def read(path: str | Path, *, large_weights: bool = True) -> ModelFile:
    """Reads the graph and the metadata of ``path``, without external data.

    Args:
        large_weights: whether to read the data of large weights in the file.

    Raises:
        ModelFileError: ``path`` is missing, unreadable, or not ONNX; its metadata is damaged; :func:`.locate` refuses
            the location of a weight; or its functions make far too many nodes (:mod:`.inlined`).
    """
    path = Path(path)
    try:
        content = read_bytes(path, PROTOBUF_BYTES, ModelFileError) if large_weights else read_without_weights(path)
        proto = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise _not_a_model(path) from None
    if not proto.opset_import or not proto.HasField("graph"):
        raise _not_a_model(path)
    if not proto.graph.output:
        raise ModelFileError(f"{path}: an ONNX model without outputs{_REMEDY}")
    if undecoded := find_undecoded(proto):
        raise ModelFileError(f"{path}: its {undecoded[0]} is {undecoded[1][:40]!r}, which is not UTF-8{_REMEDY}")
    noted = {
        prop.key.removeprefix(METADATA_PREFIX): prop.value
        for prop in proto.metadata_props
        if prop.key.startswith(METADATA_PREFIX)
    }
    for location in locations(proto):
        locate(path, location)
    refuse_many(path, proto)
    try:
        check_layers(parse_json(noted.get("layers", "[]")))
        lengths.from_json(noted.get(lengths.KEY, "{}"))
        kept_io_types.from_json(noted.get(kept_io_types.KEY, "{}"))
        least_rows(noted.get(LEAST_BATCH, ""))
    except ValueError as error:
        raise ModelFileError(f"{path}: its metadata is damaged ({error}); export the model again") from None
    return ModelFile(path, proto, noted)


def _not_a_model(path: Path) -> ModelFileError:
    """The error for a file that protobuf cannot read, or that lacks what every ONNX model has."""
    if is_archive(path):
        try:
            title = FORMATS[read_archive(path).format].title
        except ModelFileError as error:
            return error
        return ModelFileError(
            f"{path}: {title}, and this takes ONNX files; give the file that nnorm_export.export writes without target="
        )
    return ModelFileError(f"{path}: {damage_of(path, _BEGINNING) or f'not an ONNX model{_REMEDY}'}")


def refuse_unknown_types(source: ModelFile) -> None:
    """Raises ModelFileError if the type of a value or a weight does not exist in ONNX."""
    graph, known = source.proto.graph, set(onnx.TensorProto.DataType.values())
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    types |= {weight.name: weight.data_type for weight in graph.initializer}
    unknown = [f"{name} has the type {kind}" for name, kind in types.items() if kind not in known]
    # The type 0 of a value means that the type is unknown. A weight must have a type.
    unknown += [f"{weight.name} has the type 0" for weight in graph.initializer if weight.data_type == 0]
    if unknown:
        raise ModelFileError(f"{source.path}: it is damaged: {unknown[0]}, which ONNX does not have; export it again")


def read_with_weights(path: str | Path) -> onnx.ModelProto:
    """Reads the whole model ``path``, with external data.

    Raises:
        ModelFileError: as :func:`read`; or a file with weights is missing or too short.
    """
    file = read(path)
    load_weights(file.path, file.proto)
    return file.proto


def companions(path: Path) -> list[Path]:
    """The files that hold weights of ``path``; none for a file that is not ONNX.

    Raises:
        ModelFileError: ``path`` cannot be read, or :func:`.locate` refuses the location of a weight.
    """
    if size_of(path, ModelFileError) > PROTOBUF_BYTES:
        return []
    try:
        proto = onnx.ModelProto.FromString(read_without_weights(path))
    except DecodeError:
        return []
    return [locate(path, location) for location in locations(proto)]

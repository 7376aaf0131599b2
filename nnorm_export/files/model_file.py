"""Reading a model file without running it: errors in words, and the metadata that export() wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from nnorm_export.errors import ModelFileError
from nnorm_export.names import DOMAIN, METADATA_PREFIX


@dataclass(frozen=True)
class ModelFile:
    """A model file: its graph (weights in external data stay there) and what nnorm_export noted in it."""

    path: Path
    proto: onnx.ModelProto
    metadata: dict[str, str]

    @property
    def form(self) -> str:
        """``portable``, ``primitives``, ``custom``, ``optimized``, or ``unknown`` for a file of someone else's."""
        return self.metadata.get("form", "unknown")

    @property
    def layers(self) -> list[dict[str, Any]]:
        layers: list[dict[str, Any]] = json.loads(self.metadata.get("layers", "[]"))
        return layers

    @property
    def normalizations(self) -> list[onnx.NodeProto]:
        """The nodes of the domain ``nnorm``."""
        return [node for node in self.proto.graph.node if node.domain == DOMAIN]

    @property
    def has_bodies(self) -> bool:
        bodies = {function.name for function in self.proto.functions if function.domain == DOMAIN}
        return all(node.op_type in bodies for node in self.normalizations)

    def holds(self, *dtypes: int) -> bool:
        """Whether an input, an output or a weight has one of these dtypes of ``onnx.TensorProto``."""
        graph = self.proto.graph
        types = {weight.data_type for weight in graph.initializer if len(weight.dims) >= 2}
        types |= {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        return not types.isdisjoint(dtypes)

    @property
    def has_float16(self) -> bool:
        """Whether any value is float16, inside too."""
        kind = onnx.TensorProto.FLOAT16
        return self.holds(kind) or any(_makes(node, kind) for node in _all_nodes(self.proto))


def _all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Those of functions and of graphs in nodes too."""
    waiting = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            waiting += [inner for graph in (attribute.g, *attribute.graphs) for inner in graph.node]


def _makes(node: onnx.NodeProto, dtype: int) -> bool:
    """Whether ``node`` is a Cast to ``dtype`` or a constant of it."""
    return any(
        (attribute.name == "to" and attribute.i == dtype) or attribute.t.data_type == dtype
        for attribute in node.attribute
    )


def read(path: str | Path) -> ModelFile:
    """Raises ModelFileError where ``path`` is missing, unreadable, or not ONNX."""
    path = Path(path)
    try:
        proto = onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except DecodeError:
        raise ModelFileError(f"{path}: not an ONNX model") from None
    if not proto.opset_import or not proto.graph.output:
        raise ModelFileError(f"{path}: not an ONNX model")
    metadata = {
        prop.key.removeprefix(METADATA_PREFIX): prop.value
        for prop in proto.metadata_props
        if prop.key.startswith(METADATA_PREFIX)
    }
    return ModelFile(path, proto, metadata)

"""Reading a model file without running it: errors in words, and the metadata that export() wrote."""

from __future__ import annotations

import json
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

"""What a TensorRT engine says of itself: its inputs and outputs, and which normalizations are plugins in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nnorm_export.errors import ModelFileError
from nnorm_export.runtimes.base import TensorInfo

_DTYPES: dict[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT64": np.int64,
    "INT32": np.int32,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "BOOL": np.bool_,
}
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^|\]]*[^|\] ])")  # what the parser notes: "[ONNX Layer: norm/Op | …]"
_MADE_UNIQUE = re.compile(r"_\d+$")  # and what it appends to a layer's name that is taken
_OURS = "NormalNorm"  # in the names of all our operators


def plugin_nodes(engine: Any, tensorrt: Any, path: Path) -> set[str]:
    """The ONNX nodes that are plugins of ours in ``engine``, by its inspector.

    Raises:
        ModelFileError: the engine was built without noting what its layers are.
    """
    inspector = engine.create_engine_inspector()
    names: set[str] = set()
    for index in range(engine.num_layers):
        layer = json.loads(inspector.get_layer_information(index, tensorrt.LayerInformationFormat.JSON))
        if not isinstance(layer, dict):  # the name alone
            raise ModelFileError(
                f"{path}: the engine does not say what its layers are, so nobody can tell a plugin in it; build it "
                "with `nnorm-export engine`, or with trtexec --profilingVerbosity=detailed"
            )
        name, metadata, plugin = (str(layer.get(key, "")) for key in ("Name", "Metadata", "PluginType"))
        is_plugin = str(layer.get("LayerType", "")).startswith("Plugin")
        if is_plugin and any(_OURS in text for text in (name, metadata, plugin)):
            nodes = _ONNX_NODE.findall(metadata) or [name, _MADE_UNIQUE.sub("", name)]
            names |= {node for node in nodes if _OURS in node} or set(nodes)
    return names


def tensors_of(engine: Any, mode: str, path: Path) -> list[TensorInfo]:
    """The tensors of ``mode`` ``INPUT`` or ``OUTPUT``, in order; the engine knows no names of dynamic axes.

    Raises:
        ModelFileError: one is of a type that NumPy and ml_dtypes have no array for.
    """
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    infos = []
    for name in names:
        if engine.get_tensor_mode(name).name != mode:
            continue
        dtype = engine.get_tensor_dtype(name).name
        if dtype not in _DTYPES:
            raise ModelFileError(f"{path}: {name} is {dtype}, which nnorm_export does not pass on")
        shape = tuple(None if dim < 0 else int(dim) for dim in engine.get_tensor_shape(name))
        infos.append(TensorInfo(name, np.dtype(_DTYPES[dtype]), shape))
    return infos

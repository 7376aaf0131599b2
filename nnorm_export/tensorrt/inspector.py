"""Reading a TensorRT engine: its inputs and outputs, and which normalizations are plugins in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nnorm_export.domain import OPERATORS
from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import ModelFileError
from nnorm_export.files.tensors import TensorInfo

_DTYPES = {dtype.tensorrt: dtype.numpy for dtype in DTYPES.values() if dtype.tensorrt is not None}
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^|\]]*[^|\] ])")  # written by the parser: "[ONNX Layer: norm/Op | …]"
_PLUGIN_LAYERS = ("Plugin", "PluginV2", "PluginV3")  # TensorRT's own names for a layer that a plugin runs
_MADE_UNIQUE = re.compile(r"_\d+$")  # which the parser appends to a name that another layer has


def plugin_nodes(engine: Any, tensorrt: Any, path: Path) -> set[str]:
    """The normalizations of the ONNX file that are plugins in ``engine``, by its inspector.

    Raises:
        ModelFileError: the engine was built without a description of its layers.
    """
    inspector = engine.create_engine_inspector()
    names: set[str] = set()
    for index in range(engine.num_layers):
        layer = json.loads(inspector.get_layer_information(index, tensorrt.LayerInformationFormat.JSON))
        if not isinstance(layer, dict):  # the name alone
            raise ModelFileError(
                f"{path}: the engine does not say what its layers are, so its plugins cannot be told; build it with "
                "`nnorm-export engine`, or with trtexec --profilingVerbosity=detailed"
            )
        name, metadata, plugin = (str(layer.get(key, "")) for key in ("Name", "Metadata", "PluginType"))
        is_plugin = layer.get("LayerType") in _PLUGIN_LAYERS
        if is_plugin and any(_names_operator(text) for text in (name, metadata, plugin)):
            nodes = _ONNX_NODE.findall(metadata) or [name, _MADE_UNIQUE.sub("", name)]
            names |= set(filter(_names_operator, nodes)) or set(nodes)
    return names


def _names_operator(text: str) -> bool:
    return any(op_type in text for op_type in OPERATORS)


def tensors_of(engine: Any, mode: str, path: Path) -> list[TensorInfo]:
    """The tensors of ``mode`` ``INPUT`` or ``OUTPUT``, in order; an engine does not keep names of dynamic axes.

    Raises:
        ModelFileError: a tensor has a dtype that is not one of :data:`nnorm_export.dtypes.DTYPES`.
    """
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    infos = []
    for name in names:
        if engine.get_tensor_mode(name).name != mode:
            continue
        dtype = engine.get_tensor_dtype(name).name
        if dtype not in _DTYPES:
            raise ModelFileError(
                f"{path}: {name} is {dtype}, for which nnorm_export has no NumPy dtype; run the engine by TensorRT"
            )
        shape = tuple(None if dim < 0 else int(dim) for dim in engine.get_tensor_shape(name))
        infos.append(TensorInfo(name, _DTYPES[dtype], shape))
    return infos

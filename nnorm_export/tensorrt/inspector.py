"""Reading a TensorRT engine: its inputs and outputs, and which normalizations are plugins in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nnorm_export.domain import OPERATORS
from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import ModelFileError
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.tensorrt.network import onnx_nodes

_DTYPES = {dtype.tensorrt: dtype.numpy for dtype in DTYPES.values() if dtype.tensorrt is not None}
# What a layer that a plugin runs is called, by TensorRT and, in the last place, by TensorRT-RTX.
_PLUGIN_LAYERS = ("Plugin", "PluginV2", "PluginV3", "custom_layer")


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
            nodes = onnx_nodes(name, metadata)
            names |= set(filter(_names_operator, nodes)) or nodes
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

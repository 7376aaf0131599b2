"""The layer that a node of a graph came from."""

from __future__ import annotations

import ast
from typing import Any

import onnx_ir as ir

from nnorm_export.names import NAME_SCOPES


def layer_path(node: ir.Node) -> str:
    """The path of the innermost module whose forward made ``node``; empty for the model itself."""
    scopes: list[Any] = ast.literal_eval(node.metadata_props.get(NAME_SCOPES, "[]"))
    if len(scopes) >= 2:  # ['', 'layer1', 'layer1.0', 'layer1.0.norm1', 'batch_normal_norm']
        return str(scopes[-2])
    parameter = next((value for value in node.inputs if value is not None and value.is_initializer()), None)
    return str(parameter.name).rpartition(".")[0] if parameter is not None else ""

"""What a written file says of itself: versions, form, the table of its normalizations, the hash of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from nnorm_export._version import __version__
from nnorm_export.files.forms import nodes_of
from nnorm_export.names import LAYER_PATH, METADATA_PREFIX, PRODUCER


def layer_table(model: ir.Model, records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each ``nnorm`` node, in graph order.

    ``records`` maps the path of a layer to what :attr:`FrozenOperator.record` says of it.
    """
    table = []
    for node in nodes_of(model):
        path = node.metadata_props[LAYER_PATH]
        table.append({"node": node.name, "op_type": node.op_type, "path": path, **records.get(path, {})})
    return table


def weights_sha256(model: ir.Model) -> str:
    """A hash of every weight, by name: equal for the same trained model whatever the form's node order."""
    digest = hashlib.sha256()
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()


def stamp(model: ir.Model, form: str, table: list[dict[str, Any]], weights: str) -> None:
    model.producer_name = PRODUCER
    model.producer_version = __version__
    model.graph.name = "main_graph"
    model.metadata_props.update(
        {
            f"{METADATA_PREFIX}version": __version__,
            f"{METADATA_PREFIX}torch": torch.__version__.partition("+")[0],
            f"{METADATA_PREFIX}form": form,
            f"{METADATA_PREFIX}layers": json.dumps(table),
            f"{METADATA_PREFIX}weights_sha256": weights,
        }
    )

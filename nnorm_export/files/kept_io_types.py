"""Which inputs and outputs of a half-precision file are float32, with a Cast at each (``keep_io_types=True``).

A comparison takes the half-precision tensor inside for such an input or output (:mod:`.parity.as_computed`).

The note names them, because the graph alone does not tell: a model that computes under autocast has the same casts of
its own, and takes float32; and ONNX Runtime removes a Cast from a file that it optimizes. A file without any note of
this package, because a tool has removed it or another program wrote the file, is judged by its graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import onnx

from nnorm_export.dtypes import DTYPES
from nnorm_export.reading import parse_json

KEY = "kept_io_types"  # in the metadata, and in a config.pbtxt
KeptTypes = Mapping[str, str]  # name of an input or output that is float32 -> its dtype inside

_HALVES = {DTYPES[name].onnx_type: name for name in ("float16", "bfloat16")}
_FLOAT32 = DTYPES["float32"].onnx_type


def to_json(kept: KeptTypes) -> str:
    return json.dumps(dict(kept))


def from_json(text: str) -> dict[str, str]:
    """Raises ValueError if ``text`` is not what :func:`to_json` wrote."""
    entries = parse_json(text)
    if not isinstance(entries, dict):
        raise ValueError("the kept types are not a dict")
    for name, dtype in entries.items():
        if dtype not in _HALVES.values():
            raise ValueError(f"the kept type of {name} is {dtype!r}"[:200])
    return entries


def kept_io_types(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto], noted: Mapping[str, str]) -> dict[str, str]:
    """The float32 inputs and outputs of ``graph`` that are half-precision inside.

    Args:
        nodes: those of ``graph``, and of the graphs in them.
        noted: what export() noted in the file.
    """
    if KEY not in noted and "version" in noted:
        return {}
    float32 = {value.name for value in (*graph.input, *graph.output) if value.type.tensor_type.elem_type == _FLOAT32}
    known = {name: dtype for name, dtype in from_json(noted.get(KEY, "{}")).items() if name in float32}
    nodes = list(nodes)
    if noted.get("form") == "optimized":
        return known
    found = {name: dtype for name, dtype in _of_graph(graph, nodes).items() if name in float32}
    # A tool may have renamed all inputs and outputs; and a note in a file without half precision is wrong.
    return known if known and _has_half(graph, nodes) else found


def _of_graph(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> dict[str, str]:
    """The inputs that all readers cast to one half-precision dtype, and the outputs that are cast from one."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    types |= {weight.name: weight.data_type for weight in graph.initializer}
    readers: dict[str, set[str]] = {}
    made: dict[str, onnx.NodeProto] = {}
    for node in nodes:
        to = _cast_to(node)
        if to:
            types.setdefault(node.output[0], to)
            made[node.output[0]] = node
        for name in node.input:
            readers.setdefault(name, set()).add(_HALVES.get(to, ""))
    inputs = {value.name: min(readers.get(value.name, {""})) for value in graph.input}
    found = {name: dtype for name, dtype in inputs.items() if dtype}
    of_weights = (_HALVES.get(weight.data_type, "") for weight in graph.initializer)
    half = next(filter(None, (*found.values(), *of_weights)), "")
    for value in graph.output:
        if (cast := made.get(value.name)) is not None and cast.input[0]:
            kind = types.get(cast.input[0], 0)
            # Without value_info the dtype is not known: of a half-precision file it is that of the rest.
            inside = _HALVES.get(kind, "") if kind else half
            found |= {value.name: inside} if inside else {}
    return found


def _has_half(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> bool:
    types = {weight.data_type for weight in graph.initializer}
    return not types.isdisjoint(_HALVES) or any(_cast_to(node) in _HALVES for node in nodes)


def _cast_to(node: onnx.NodeProto) -> int:
    """The dtype to which ``node`` casts; 0 if it is not a Cast."""
    if node.op_type != "Cast" or node.domain not in ("", "ai.onnx"):
        return 0
    return next((attribute.i for attribute in node.attribute if attribute.name == "to"), 0)

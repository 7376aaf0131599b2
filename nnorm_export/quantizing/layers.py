"""The layers of a graph that may be quantized, by the paths that a user knows."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable

import onnx

from nnorm_export.errors import InputError
from nnorm_export.files.parts import nodes_of, scopes_of
from nnorm_export.names import DOMAIN, LAYER_PATH
from nnorm_export.quantizing.qdq import NORMS, PRODUCTS


def name_nodes(proto: onnx.ModelProto) -> None:
    """Gives each node of the graph a name of its own: the quantizer knows nodes by name."""
    taken: set[str] = set()
    for index, node in enumerate(proto.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}/{index}"
        taken.add(node.name)


def layers_of(proto: onnx.ModelProto, names: Iterable[str]) -> dict[str, list[str]]:
    """Path of a layer -> those of its nodes among ``names`` that are products or norms.

    A node of which no path is known stands for itself.
    """
    wanted, found = set(names), defaultdict(list)
    for node in proto.graph.node:
        is_layer = node.op_type in PRODUCTS if node.domain == "" else node.domain == DOMAIN and node.op_type in NORMS
        if is_layer and node.name in wanted:
            found[_path(node) or node.name].append(node.name)
    return dict(found)


def kept_nodes(proto: onnx.ModelProto, keep: Iterable[str]) -> set[str]:
    """The names of the nodes that ``keep`` names: nodes, or all nodes of a layer or of a module by its path.

    Frozen norms that read a kept product go with it (:func:`with_norms`).

    Raises:
        InputError: there is no such node, layer or module.
    """
    nodes = proto.graph.node
    kept: set[str] = set()
    for name in keep:
        found = {node.name for node in nodes if name in (node.name, _metadata(node).get(LAYER_PATH))}
        found |= {nodes[index].name for index in (nodes_of(proto, name) if name else ())}
        if not found:
            known = [*layers_of(proto, (node.name for node in nodes)), *(node.name for node in nodes)]
            near = difflib.get_close_matches(name, known, n=3) or known[:3]
            raise InputError(
                f"keep: the file has no node or layer {name!r}; give the path of a layer in the model or the name of a "
                f"node, {', '.join(dict.fromkeys(near))} for example"
            )
        kept |= found
    return with_norms(proto, kept)


def with_norms(proto: onnx.ModelProto, names: Iterable[str]) -> set[str]:
    """``names``, and those of the frozen norms that read what a product among them computes.

    A norm in int8 would have its input rounded to 8 bits, which the product in float is to avoid.
    """
    kept = set(names)
    made = {
        value for node in proto.graph.node if node.name in kept and node.op_type in PRODUCTS for value in node.output
    }
    readers = {
        node.name
        for node in proto.graph.node
        if node.domain == DOMAIN and node.op_type in NORMS and not made.isdisjoint(node.input)
    }
    return kept | readers


def _path(node: onnx.NodeProto) -> str:
    scopes = scopes_of(node)
    return _metadata(node).get(LAYER_PATH) or (scopes[-1] if scopes else "")


def _metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {prop.key: prop.value for prop in node.metadata_props}

"""Parts of an ONNX model: the nodes of a layer, its input and output, and the layer as a model of its own."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from numpy.typing import NDArray

from nnorm_export.domain import ALL_OPERATORS, OPERATORS, QUANTIZED_OPERATORS, Operator
from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import ModelFileError
from nnorm_export.files.onnx_file import ModelFile, name_of
from nnorm_export.names import DOMAIN, LAYER_PATH, NAME_SCOPES

MODULE = "(module)"  # the op_type of a part that is not a normalization


@dataclass(frozen=True)
class Part:
    """A layer in an ONNX graph.

    Attributes:
        name: the name of the node; the path of a module.
        path: the path of the layer in the PyTorch model.
        call: the number of this call of the layer, from 1.
        op_type: the operator of the node; ``(module)`` for a layer that is not a normalization.
        nodes: indices of the nodes in the graph.
        x, y: the names of the input and the output.
        operands: the names of the inputs of the epilogue, in the order of :attr:`.Operator.operands`.
        is_cut: whether the layer can run alone: all its other inputs are constants.
    """

    name: str
    path: str
    call: int
    op_type: str
    nodes: tuple[int, ...]
    x: str
    y: str
    operands: tuple[str, ...] = ()
    is_cut: bool = True

    @property
    def operator(self) -> Operator | None:
        """The operator; None for a layer that is not a normalization, or an operator that this version lacks."""
        return OPERATORS.get(self.op_type)


def refuse_quantized(file: ModelFile) -> None:
    """Raises ModelFileError if normalizations take quantized tensors, because PyTorch's values are not quantized."""
    if quantized := [node for node in file.normalizations if node.op_type in QUANTIZED_OPERATORS]:
        raise ModelFileError(
            f"{file.path}: {quantized[0].name or quantized[0].op_type} is a {quantized[0].op_type}, which takes "
            "integers, not PyTorch's values; give the float file from which this file was quantized"
        )


def parts_of(proto: onnx.ModelProto, modules: Iterable[str]) -> list[Part]:
    """The normalizations that are nodes, and the given modules, in the order in which they run.

    A normalization includes the offset that it subtracts before its node.
    """
    normalizations = [_with_offset(proto, part) for part in norms_of(proto)]
    known = {part.path for part in normalizations}
    parts = [*normalizations, *(part for path in modules if path not in known for part in _module(proto, path))]
    return sorted(parts, key=lambda part: max(part.nodes))


def norms_of(proto: onnx.ModelProto) -> list[Part]:
    """The normalizations that are nodes, without offsets, in the order of the file."""
    calls: Counter[str] = Counter()
    parts = []
    for index, node in enumerate(proto.graph.node):
        if node.domain == DOMAIN:
            path = _metadata(node).get(LAYER_PATH, "")
            calls[path] += 1
            operator = ALL_OPERATORS.get(node.op_type)
            given = dict(zip(operator.inputs, node.input, strict=False)) if operator else {}
            operands = tuple(given.get(name, "") for name in operator.operands) if operator else ()
            x, y = node.input[0], node.output[0]
            parts.append(Part(name_of(node), path, calls[path], node.op_type, (index,), x, y, operands))
    return parts


def _with_offset(proto: onnx.ModelProto, part: Part) -> Part:
    """``part`` with the subtraction of the offset before its node, and the casts around both."""
    graph, (index,) = proto.graph, part.nodes

    def is_own(other: int, kinds: Sequence[str]) -> bool:
        return graph.node[other].op_type in kinds and scopes_of(graph.node[other])[-1:] == [part.path]

    makers = {name: at for at, node in enumerate(graph.node) for name in node.output}
    nodes = [index]
    while (before := makers.get(graph.node[nodes[0]].input[0])) is not None and is_own(before, ("Sub", "Cast")):
        nodes.insert(0, before)
    readers = [at for at, node in enumerate(graph.node) if part.y in node.input]
    if len(readers) == 1 and len(nodes) > 1 and is_own(readers[0], ("Cast",)):
        nodes.append(readers[0])
    return replace(part, nodes=tuple(nodes), x=graph.node[nodes[0]].input[0], y=graph.node[nodes[-1]].output[0])


def _module(proto: onnx.ModelProto, path: str) -> list[Part]:
    """The module as a list with one part; empty if the file has no nodes of it."""
    graph = proto.graph
    inside = nodes_of(proto, path)
    if not inside:
        return []
    constants = {tensor.name for tensor in graph.initializer}
    made = {name for index in inside for name in graph.node[index].output}
    read = [name for index in inside for name in graph.node[index].input if name and name not in made | constants]
    outside = [name for index, node in enumerate(graph.node) if index not in inside for name in node.input]
    given = [name for name in made if name in outside or name in {value.name for value in graph.output}]
    y = given[0] if given else graph.node[inside[-1]].output[0]
    is_cut = len(set(read)) == 1 and len(given) == 1
    return [Part(path, path, 1, MODULE, tuple(inside), read[0] if read else y, y, is_cut=is_cut)]


def nodes_of(proto: onnx.ModelProto, path: str) -> list[int]:
    """The indices of the nodes that the forward of the module ``path`` made."""
    return [index for index, node in enumerate(proto.graph.node) if path in scopes_of(node)]


def _metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {prop.key: prop.value for prop in node.metadata_props}


def scopes_of(node: onnx.NodeProto) -> list[str]:
    """The paths of the modules, outermost first, whose forward made ``node``."""
    try:
        scopes: list[str] = ast.literal_eval(_metadata(node).get(NAME_SCOPES, "[]"))
    except (SyntaxError, ValueError):  # the metadata is damaged; it is only shown to users
        return []
    return scopes[:-1]


def with_outputs(proto: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy whose outputs are the values ``names``."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    known = {value.name: value for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
    made = {name for node in graph.node for name in node.output}
    del graph.output[:]
    for name in dict.fromkeys(names):
        if name in made:
            graph.output.append(known.get(name, onnx.ValueInfoProto(name=name)))
    return copy


def alone(
    proto: onnx.ModelProto,
    parts: Sequence[Part],
    feeds: Sequence[Sequence[NDArray[Any]]],
    results: Sequence[NDArray[Any]] | None = None,
) -> onnx.ModelProto:
    """A model of ``parts`` side by side, each with one output and its own inputs.

    Args:
        feeds: the arrays for the inputs of each part: x and the operands.
        results: arrays with the dtypes of the outputs; None if these are those of x.
    """
    results = [arrays[0] for arrays in feeds] if results is None else results
    nodes, inputs, outputs = [], [], []
    used: set[str] = set()
    names: set[str] = set()
    for number, (part, arrays) in enumerate(zip(parts, feeds, strict=True)):
        own = [proto.graph.node[index] for index in part.nodes]
        renamed = {name: f"{number}/{name}" for node in own for name in node.output}
        roles = ("x", *(part.operator.operands if part.operator else ()))
        own_inputs: dict[str, list[str]] = {}  # value -> new names; x may be an operand too
        for role, name, array in zip(roles, (part.x, *part.operands), arrays, strict=True):
            own_inputs.setdefault(name, []).append(f"{number}/{role}")
            inputs.append(_value_info(f"{number}/{role}", array, list(array.shape)))
        for node in own:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = _renamed(node.input, renamed, own_inputs)
            copy.output[:] = [renamed[name] for name in node.output]
            copy.name = node.name if node.name not in names else f"{node.name}, {number}"
            names.add(copy.name)
            used.update(copy.input)
            nodes.append(copy)
        outputs.append(_value_info(renamed[part.y], results[number], None))
    initializers = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    constants = [node for node in proto.graph.node if node.op_type == "Constant" and used.intersection(node.output)]
    graph = onnx.helper.make_graph([*constants, *nodes], "layers", inputs, outputs, initializers)
    model = onnx.helper.make_model(graph, functions=list(proto.functions), opset_imports=list(proto.opset_import))
    model.ir_version = proto.ir_version
    model.metadata_props.extend(proto.metadata_props)
    return model


def _renamed(names: Sequence[str], renamed: Mapping[str, str], inputs: Mapping[str, list[str]]) -> list[str]:
    """The inputs of a node under their new names. Each use of a value in ``inputs`` takes the next name there."""
    found = []
    for name in names:
        own = inputs.get(name, [renamed.get(name, name)])
        found.append(own.pop(0) if len(own) > 1 else own[0])
    return found


def _value_info(name: str, array: NDArray[Any], shape: list[int] | None) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, DTYPES[array.dtype.name].onnx_type, shape)

"""The check that kernels compute what the nodes of the domain ``nnorm`` in a file mean.

A model-local function, the body, defines the meaning of a node. A kernel or plugin replaces the body and never reads
it. If a file has another body, the kernel computes other values than the body. A node may also be invalid: its version
of the domain does not exist, or an attribute has the wrong type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data

from nnorm_export._version import __version__
from nnorm_export.domain import ALL_OPERATORS, BLOCKED_TWINS, Operator
from nnorm_export.domain.known_bodies import arithmetic_of
from nnorm_export.domain.quantized_batch_normal_norm import QuantizedOperator
from nnorm_export.errors import ModelFileError
from nnorm_export.files.onnx_file import ModelFile, all_nodes, identifier, with_nested
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, LAYER_PATH, PRODUCER

_STANDARD = ("", "ai.onnx")
_WITH_KERNEL = {**ALL_OPERATORS, **BLOCKED_TWINS}
_ARITHMETIC: dict[int, str] = {onnx.TensorProto.FLOAT: "float", onnx.TensorProto.DOUBLE: "double"}
_KINDS = {"int": onnx.AttributeProto.INT, "float": onnx.AttributeProto.FLOAT, "string": onnx.AttributeProto.STRING}
# Attributes by which TensorRT chooses a plugin, and the size of the blocks of an optimized file.
_OTHER_ATTRIBUTES = {"plugin_namespace": "string", "plugin_version": "string", "block": "int"}
_LEAST_VALUES = {"num_groups": 1, "block": 1, "epsilon": 0.0, "delta": 0.0}


def refuse_invalid(file: ModelFile) -> None:
    """Raises ModelFileError if a node of the domain ``nnorm`` is invalid. No implementation may run such a node."""
    if problem := next(invalid_nodes(file), ""):
        raise ModelFileError(f"{file.path}: {problem}")


def refuse_unknown_bodies(file: ModelFile, op_types: Collection[str] = tuple(_WITH_KERNEL)) -> None:
    """Raises ModelFileError if kernels or plugins for ``op_types`` would run nodes whose bodies are unknown."""
    unknown = {op_type: why for op_type, why in unknown_bodies(file).items() if op_type in op_types}
    if unknown:
        raise ModelFileError(f"{file.path}: {_unknown_text(file, unknown)}")


def problems_of(file: ModelFile) -> list[str]:
    """The reasons why nodes of the domain ``nnorm`` are invalid, and a text about unknown bodies."""
    unknown = unknown_bodies(file)
    return [*invalid_nodes(file), *([_unknown_text(file, unknown)] if unknown else [])]


def _unknown_text(file: ModelFile, unknown: dict[str, str]) -> str:
    """The text about unknown bodies: their operators, the reasons, and the remedy."""
    writer = file.noted.get("version", "")
    found = "; ".join(f"unknown body of {op_type}: {why}" for op_type, why in unknown.items())
    if _numbers(writer) > _numbers(__version__):
        remedy = f"{PRODUCER} {writer} wrote the file: upgrade {PRODUCER} to it"
    else:
        remedy = "The file was edited or damaged after export: export the model again"
    return (
        f"{found}. A kernel would compute other values than the file's bodies. {remedy}, or run the bodies: "
        "load(path, kernels=False), or the runtime reference"
    )


def unknown_bodies(file: ModelFile) -> dict[str, str]:
    """Operator -> the reason why its body is unknown. Operators without a kernel or a body are left out."""
    unknown = {}
    arithmetic: dict[tuple[str, str, str], str] = {}
    redefined = {function.name for function in file.proto.functions if function.domain in _STANDARD}
    for function in file.proto.functions:
        if function.domain != DOMAIN or function.name not in _WITH_KERNEL:
            continue
        found = arithmetic_of(function)
        shadowed = sorted(redefined.intersection(node.op_type for node in function.node))
        if found is None:
            unknown[function.name] = f"{PRODUCER} {__version__} does not know it"
        elif shadowed:
            unknown[function.name] = f"the file has a function of its own for {', '.join(shadowed)}"
        else:
            arithmetic[identifier(function)] = found
    for use in _uses(file):
        op_type, wanted = use.node.op_type, arithmetic.get(identifier(use.node))
        given = {_ARITHMETIC.get(tensor.data_type) for tensor in use.parameters.values()}
        if wanted is not None and given - {wanted, None}:
            unknown.setdefault(op_type, f"it computes in {wanted}, {use} has parameters of another dtype")
    return unknown


def invalid_nodes(file: ModelFile) -> Iterator[str]:
    """Yields each reason why a node of the domain ``nnorm`` is invalid, with the node and the remedy."""
    if wrong := _wrong_version(file):
        yield wrong
        return
    for use in _uses(file):
        for problem in (*_wrong_attributes(use), *_wrong_inputs(use), *_wrong_quantization(use)):
            yield f"{use}: {problem}; export the model again"


def _wrong_version(file: ModelFile) -> str:
    """The message that the version of the domain in the file does not exist; empty if it exists."""
    functions = file.proto.functions
    called = [node.domain for node in all_nodes(file.proto)] + [function.domain for function in functions]
    if DOMAIN not in called:  # ONNX Runtime's optimizer writes imports of all domains that it knows
        return ""
    imports = [file.proto.opset_import, *(function.opset_import for function in functions)]
    versions = {entry.version for entries in imports for entry in entries if entry.domain == DOMAIN}
    if others := sorted(versions - {DOMAIN_VERSION}):
        return (
            f"the file declares version {others[0]} of the domain {DOMAIN}, and {PRODUCER} {__version__} knows only "
            f"version {DOMAIN_VERSION}: upgrade {PRODUCER} if a newer one wrote the file, else export the model again"
        )
    return ""


@dataclass(frozen=True)
class _Use:
    """A node with a kernel; ``weights`` are the inputs of the node that are weights of the file."""

    node: onnx.NodeProto
    operator: Operator
    weights: dict[str, onnx.TensorProto]

    @property
    def parameters(self) -> dict[str, onnx.TensorProto]:
        return {name: tensor for name, tensor in self.weights.items() if name in self.operator.parameters}

    def __str__(self) -> str:
        layer = next((prop.value for prop in self.node.metadata_props if prop.key == LAYER_PATH), "")
        return f"node {self.node.name or self.node.op_type}{f' (layer {layer})' if layer else ''}"


def _uses(file: ModelFile) -> Iterator[_Use]:
    """The nodes with a kernel, also those in branches, loops and functions."""
    weights = {tensor.name: tensor for tensor in file.proto.graph.initializer}
    # A function has its own names: an input in a function is not the weight with the same name.
    scopes = [(file.proto.graph.node, weights), *((function.node, {}) for function in file.proto.functions)]
    for nodes, known in scopes:
        for node in with_nested(nodes):
            operator = _WITH_KERNEL.get(node.op_type)
            if node.domain == DOMAIN and operator is not None:
                names = zip(operator.inputs, node.input, strict=False)
                given = {name: known[value] for name, value in names if value in known}
                yield _Use(node, operator, given)


def _wrong_attributes(use: _Use) -> Iterator[str]:
    kinds = {name: kind for name, (kind, _) in use.operator.attributes.items()} | _OTHER_ATTRIBUTES
    names = [attribute.name for attribute in use.node.attribute]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the attribute {name} is given {names.count(name)} times"
    for attribute in use.node.attribute:
        kind = kinds.get(attribute.name)
        if kind is None:
            known = ", ".join(use.operator.attributes) or "none"
            yield f"{use.node.op_type} has no attribute {attribute.name}; its attributes are {known}"
        elif attribute.type != _KINDS[kind]:
            given = onnx.AttributeProto.AttributeType.Name(attribute.type).lower()
            yield f"the attribute {attribute.name} is of type {given}, it must be of type {kind}"
        elif attribute.name in _LEAST_VALUES and not attribute.ref_attr_name:
            value, least = attribute.i if kind == "int" else attribute.f, _LEAST_VALUES[attribute.name]
            if not least <= value < np.inf:  # NaN is refused
                yield f"the attribute {attribute.name} is {value}, it must be at least {least} and finite"


def _wrong_inputs(use: _Use) -> Iterator[str]:
    node, operator = use.node, use.operator
    if len(node.input) != len(operator.inputs) or not all(node.input) or len(node.output) != 1:
        yield f"{node.op_type} takes {', '.join(operator.inputs)} and returns Y, the node has {len(node.input)} inputs"
        return
    shapes = {name: [*tensor.dims] for name, tensor in use.parameters.items()}
    if not shapes:
        return
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        yield f"its parameters differ in shape: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"
    name, shape = next(iter(shapes.items()))
    given = {attribute.name: attribute.i for attribute in node.attribute if not attribute.ref_attr_name}
    groups, axis = given.get("num_groups", 1), given.get("axis", -len(shape))
    if operator.is_per_channel and len(shape) != 1:
        yield f"{name} has shape {shape}, it must have one number for each channel"
    elif operator.is_per_channel and groups > 0 and shape[0] % groups:
        yield f"the attribute num_groups is {groups}, which does not divide its {shape[0]} channels"
    if "axis" in operator.attributes and axis < 0 and axis != -len(shape):
        yield f"the attribute axis is {axis}, it must be {-len(shape)} for {name} of shape {shape}"


def _wrong_quantization(use: _Use) -> Iterator[str]:
    """Yields the errors in the axis, the scales and the zero points of a node between quantized tensors."""
    operator = use.operator
    if not isinstance(operator, QuantizedOperator):
        return
    for attribute in use.node.attribute:
        if attribute.name == "axis" and not attribute.ref_attr_name and attribute.i not in (1, -1):
            yield f"the attribute axis is {attribute.i}, it must be 1 or -1, the last"
    for name in (*operator.scales, *operator.zero_points):
        tensor = use.weights.get(name)
        if tensor is not None and [*tensor.dims] != []:
            yield f"{name} has shape {[*tensor.dims]}, it must be a scalar: the tensor has one for all channels"
        elif tensor is not None and name in operator.scales and not uses_external_data(tensor):
            scale = float(numpy_helper.to_array(tensor))
            if not 0 < scale < np.inf:  # NaN is refused
                yield f"{name} is {scale}, it must be greater than 0 and finite"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]

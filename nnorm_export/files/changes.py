"""Changes that other programs made to a file after export() wrote it, and the remedies.

After these changes a file is valid, or looks valid, but kernels or whole runtimes cannot run it. The messages name the
tools that are known for a change. Other tools may make the same change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data

from nnorm_export.domain import ALL_OPERATORS, BLOCKED_TWINS, OPERATORS
from nnorm_export.domain.known_bodies import OLDEST_OPSET, arithmetic_of, digest, digests
from nnorm_export.files.onnx_file import ModelFile, identifier, with_nested
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.names import DOMAIN

_HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_WIDE = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
_STANDARD = ("", "ai.onnx")
_LONGEST_FIRST = sorted([*ALL_OPERATORS, *BLOCKED_TWINS], key=len, reverse=True)  # a name may be the end of another
_RESTORE = "nnorm-export convert FILE --form portable"


def changes_of(file: ModelFile) -> list[str]:
    """A text for each change: the change, its effect and the remedy."""
    return [text for find in _CHECKS if (text := find(file))]


def unused_by_kernels(file: ModelFile) -> str:
    """The reason why kernels run no normalization, though the file's form is for kernels; empty if they do."""
    return renamed(file) or _inlined(file)


def renamed(file: ModelFile) -> str:
    """The text about operators of the domain ``nnorm`` whose names kernels do not know; empty if there are none."""
    names = {node.op_type: original for node in _nodes(file) if (original := original_name(node.op_type))}
    if not names:
        return ""
    functions = {function.name: function for function in file.proto.functions if function.domain == DOMAIN}
    runs = "the slower bodies run" if names.keys() <= functions.keys() else "nothing runs them"
    listed = ", ".join(f"{original} is now {name}" for name, original in sorted(names.items()))
    return (
        f"its operators were renamed after export ({listed}), as onnx.compose does: kernels and plugins do not know "
        f"these names, so {runs}. {_RESTORE} gives the names back"
    )


def original_name(op_type: str) -> str:
    """The operator that became ``op_type`` when a tool added a prefix; empty if ``op_type`` is not such a name."""
    name = next((name for name in _LONGEST_FIRST if op_type.endswith(name)), "")
    return "" if name == op_type else name


def _without_bodies(file: ModelFile) -> str:
    if file.form in ("custom", OPTIMIZED):  # export() and optimize() write these forms without bodies
        return ""
    bodies = {identifier(function) for function in file.proto.functions}
    lost = [node for node in _nodes(file) if node.op_type in ALL_OPERATORS and identifier(node) not in bodies]
    if not lost:
        return ""
    return (
        f"{_counted(lost)} without bodies, though the file does not say that its form is custom: "
        "onnx.version_converter drops them, and onnx.utils.extract_model those of all overloads but one. The file runs "
        "only where kernels or plugins are. "
        f"{_RESTORE} puts the bodies back, and nnorm-export export --opset writes a file for another opset"
    )


def _with_bodies_for_other_exponents(file: ModelFile) -> str:
    functions = {identifier(function): function for function in file.proto.functions}
    weights = {tensor.name: tensor for tensor in file.proto.graph.initializer}
    merged = []
    for node in _nodes(file):
        operator, function = ALL_OPERATORS.get(node.op_type), functions.get(identifier(node))
        arithmetic = None if function is None else arithmetic_of(function)
        if operator is None or function is None or arithmetic is None:
            continue
        parameters = {
            name: _array(weights.get(given)) for name, given in zip(operator.inputs, node.input, strict=False)
        }
        if any(parameters.get(name) is None for name in operator.parameters):
            continue  # the weights are in another file, or are computed
        attributes = {attribute.name: np.array(attribute.i, np.int64) for attribute in node.attribute}
        if variant := operator.variant({**parameters, **attributes}):
            wanted = digest(operator.function(OLDEST_OPSET, arithmetic, variant))
            merged += [node] if wanted not in digests(function) else []
    if not merged:
        return ""
    return (
        f"{_counted(merged)} with exponents near 0 that call the body for other exponents: tools that do not know "
        "overloads of functions, such as onnxslim, merge two bodies into one. Kernels and ONNX Runtime's CPU provider "
        "still compute the same; runtimes whose Tanh is less accurate near 0 do not. A body for another axis fails. "
        f"{_RESTORE} puts the body back"
    )


def _array(tensor: onnx.TensorProto | None) -> Any:
    """The elements of a weight; None if they are not in the file, or are not float32 or float64."""
    if tensor is None or tensor.data_type not in _WIDE or uses_external_data(tensor):
        return None
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError):  # the weight is damaged, or its elements are not in the file
        return None


def half_parameters(file: ModelFile) -> str:
    """The text about normalizations with float16 parameters, which no runtime runs; empty if there are none."""
    weights = {tensor.name: tensor.data_type for tensor in file.proto.graph.initializer}
    turned = [
        node
        for node in _nodes(file)
        if (operator := ALL_OPERATORS.get(node.op_type)) is not None
        and any(
            weights.get(given) in _HALF
            for name, given in zip(operator.inputs, node.input, strict=False)
            if name in operator.parameters
        )
    ]
    return _half_text(f"the parameters of {_counted(turned)}", "no runtime takes the file") if turned else ""


def _with_half_arithmetic(file: ModelFile) -> str:
    if file.form != "primitives" or not file.layers or not file.has_float16:
        return ""
    types = Counter(_types_of_logarithms(file.proto))
    # Every body has a logarithm. Further logarithms in float16 belong to the model itself.
    if sum(types[kind] for kind in _WIDE) >= len(file.layers) or not any(types[kind] for kind in _HALF):
        return ""
    count = f"the arithmetic of its {len(file.layers)} normalizations"
    return _half_text(count, "their results lose digits, and may be NaN, because 1 + ε is 1 in float16")


def _half_text(what: str, effect: str) -> str:
    blocked = ", ".join(repr(name) for name in OPERATORS)
    return (
        f"a converter to float16 has converted {what} too, which must stay float32: {effect}. Export in float16 "
        "(nnorm-export export --dtype fp16), or convert the portable file by onnxconverter_common with "
        f"op_block_list=[*DEFAULT_OP_BLOCK_LIST, {blocked}]"
    )


def _types_of_logarithms(proto: onnx.ModelProto) -> Iterator[int]:
    """The type of the input of each Log.

    The output of a node is assumed to have the type of its first input of a known floating type, as in arithmetic.
    """
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    declared = {name: made for node in proto.graph.node if (made := _declared_type(node)) for name in node.output}
    types |= declared  # before the nodes that use them: converters append their Casts at the end
    for node in proto.graph.node:
        given = [types.get(name, 0) for name in node.input]
        if node.domain in _STANDARD and node.op_type == "Log":
            yield from given[:1]
        like = given[1:] if node.op_type == "CastLike" else given
        made = next((kind for kind in like if kind in (*_HALF, *_WIDE)), 0)
        types |= {name: made for name in node.output if name not in declared}


def _declared_type(node: onnx.NodeProto) -> int:
    """The output type of a Cast or a Constant; 0 for other nodes."""
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to":
            return int(attribute.i)
        if node.op_type == "Constant" and attribute.name == "value":
            return int(attribute.t.data_type)
    return 0


def _inlined(file: ModelFile) -> str:
    if file.form not in ("portable", "custom") or not file.layers or _nodes(file):
        return ""
    return (
        f"its {len(file.layers)} normalizations are not nodes any more: a tool such as onnx.inliner has replaced "
        "them by their bodies. The file computes the same, but no kernel or plugin runs it; serve the file that export "
        "wrote if there are kernels"
    )


def _nodes(file: ModelFile) -> list[onnx.NodeProto]:
    return [node for node in with_nested(file.proto.graph.node) if node.domain == DOMAIN]


def _counted(nodes: Iterable[onnx.NodeProto]) -> str:
    counts = Counter(node.op_type for node in nodes)
    return ", ".join(f"{count} {op_type}" for op_type, count in sorted(counts.items()))


_CHECKS: tuple[Callable[[ModelFile], str], ...] = (
    _without_bodies, renamed, _with_bodies_for_other_exponents, half_parameters, _with_half_arithmetic, _inlined,
)  # fmt: skip

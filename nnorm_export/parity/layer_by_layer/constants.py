"""Which constants of a file differ from those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper
from torch import Tensor

from nnorm_export.domain import ALL_OPERATORS
from nnorm_export.dtypes import Array, is_float, to_numpy
from nnorm_export.files.parts import scopes_of
from nnorm_export.names import DOMAIN, LAYER_PATH
from nnorm_export.parity.layer_by_layer.between import Folded

_ROUNDINGS = 4  # units in the last place, by which a constant may differ that was computed in another order


def differing_constants(
    proto: onnx.ModelProto, nodes: Iterable[int], state: Mapping[str, Tensor], folded: Folded
) -> list[str]:
    """The constants that ``nodes`` read and that differ from the frozen model's: ``scale: 1 of 64 values, by 2 %``.

    A constant that the exporter made of several is not compared.

    Args:
        proto: the file, with its weights.
        state: the parameters and buffers of the frozen model.
    """
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    found: dict[str, str] = {}
    for index in nodes:
        for name, key in _read(proto.graph.node[index], tensors, state, folded):
            actual, expected = numpy_helper.to_array(tensors[name]), to_numpy(state[key])
            if name not in state and actual.ndim == 2 and key.endswith(".weight"):
                expected = expected.T  # of a Linear on more than two axes
            if key not in found and (text := _difference(actual, expected)):
                found[key] = f"{key}: {text}"
    return list(found.values())


def _read(
    node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto], state: Mapping[str, Tensor], folded: Folded
) -> Iterator[tuple[str, str]]:
    """The constants of a node, each with the name of the tensor of the model that it is.

    A constant that is equal in two layers is in the file once, under one of their names.
    """
    path = next((entry.value for entry in node.metadata_props if entry.key == LAYER_PATH), None)
    if node.domain == DOMAIN and path is not None and node.op_type in ALL_OPERATORS:
        roles = zip(ALL_OPERATORS[node.op_type].inputs, node.input, strict=False)
        pairs = [(name, f"{path}.{role}".lstrip(".")) for role, name in roles]
    else:
        layer = next(iter(scopes_of(node)[-1:]), "")
        if layer in folded.modules and folded.why(layer):
            return
        of_layer = f"{layer}.weight"
        pairs = [(name, name if name in state or node.op_type != "MatMul" else of_layer) for name in node.input]
    yield from ((name, key) for name, key in pairs if name in tensors and key in state)


def _difference(actual: Array, expected: Array) -> str:
    """How ``actual`` differs from ``expected``; empty if it does not."""
    if actual.shape != expected.shape:
        return "" if actual.size == expected.size else f"shape {list(actual.shape)}, not {list(expected.shape)}"
    if not is_float(actual.dtype):
        count = int((actual != expected).sum())
        return f"{count} of {actual.size} values" if count else ""
    expected = expected.astype(actual.dtype)
    if swapped := _swapped(actual, expected):
        return swapped
    # float64 holds the values of all dtypes, and the differences of all but its own.
    rounding = _ROUNDINGS * 2.0 ** (1 - _bits(actual.dtype))
    wide, wanted = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(wide - wanted)
        wrong = ~((errors <= rounding * np.abs(wanted)) | (wide == wanted) | (np.isnan(wide) & np.isnan(wanted)))
    if not wrong.any():
        return ""
    count = int(wrong.sum())
    most = "at most " if count > 1 else ""
    if (wanted[wrong] == 0).any() or not np.isfinite(errors[wrong]).all():
        by = f"{errors[wrong].max():.2g}"
    else:
        by = f"{float(f'{100 * (errors[wrong] / np.abs(wanted[wrong])).max():.2g}'):g} %"
    return f"{count} of {actual.size} values, by {most}{by}"


def _swapped(actual: Array, expected: Array) -> str:
    """Says which two entries along an axis have changed places, if that is the whole difference."""
    for axis in range(min(2, actual.ndim)):
        found, wanted = np.moveaxis(actual, axis, 0), np.moveaxis(expected, axis, 0)
        places = np.flatnonzero((found != wanted).reshape(len(found), -1).any(axis=1))
        if len(places) == 2 and np.array_equal(found[places], wanted[places[::-1]]):
            of_axis = f" of axis {axis}" if actual.ndim > 1 else ""
            return f"entries {places[0]} and {places[1]}{of_axis} are swapped"
    return ""


def _bits(dtype: np.dtype[np.generic]) -> int:
    """The bits of a significand, with the first."""
    return {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}[dtype.name]

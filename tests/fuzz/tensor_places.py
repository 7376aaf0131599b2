"""A model with a tensor in each place that the ONNX schema allows, found in the schema itself.

The file fuzzer draws from these places, and the tests of external data try all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

Place = tuple[str, ...]


def places() -> list[Place]:
    """The paths of fields from a ModelProto to a TensorProto; a path takes each field of the schema at most once."""
    return list(_paths(onnx.ModelProto.DESCRIPTOR, ()))


def _paths(descriptor: Any, taken: tuple[tuple[str, str], ...]) -> Iterator[Place]:
    if descriptor.name == "TensorProto":
        yield tuple(name for _, name in taken)
        return
    for field in descriptor.fields:
        edge = descriptor.name, field.name
        if field.message_type is not None and edge not in taken:
            yield from _paths(field.message_type, (*taken, edge))


def tensor_at(model: onnx.ModelProto, place: Place) -> onnx.TensorProto:
    """A new tensor at ``place`` in ``model``; repeated fields get an entry more."""
    message: Any = model
    for name in place:
        value = getattr(message, name)
        if hasattr(value, "add"):
            message = value.add()
            if name == "functions":
                message.name = "f"  # one without a name would be what a node without an operator calls
        else:
            value.SetInParent()
            message = value
    tensor: onnx.TensorProto = message
    return tensor


def make_external(tensor: onnx.TensorProto, location: str) -> None:
    tensor.CopyFrom(onnx.TensorProto(data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL))
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)

"""The inputs and outputs of a model: name, dtype and shape of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from nnorm_export.dtypes import DTYPES, numpy_of_onnx
from nnorm_export.reports import Report

Axes = tuple[int | str | None, ...]

_OPERATION = re.compile(r"[*/()+]| - ")  # a minus needs spaces: other programs have names of axes such as "batch-size"
_LINEAR = re.compile(r"(?:(?P<factor>\d+)\*)?(?P<name>[A-Za-z_]\w*)(?: (?P<sign>[+-]) (?P<offset>\d+))?")


@dataclass(frozen=True)
class LinearLength:
    """The length of an axis that depends on another axis: ``factor·name + offset``, as ``2*batch`` and ``seq + 1``."""

    name: str
    factor: int
    offset: int

    def at(self, length: int) -> int:
        """The length if the axis ``name`` has ``length``."""
        return self.factor * length + self.offset

    @classmethod
    def parse(cls, dim: int | str | None) -> LinearLength | None:
        """The length that ``dim`` describes; None for a number, an axis without a name, and any other expression."""
        if not isinstance(dim, str):
            return None
        match = _LINEAR.fullmatch(dim)
        if match is None:
            return None if _OPERATION.search(dim) else cls(dim, 1, 0)
        offset = int(match["offset"] or 0) * (-1 if match["sign"] == "-" else 1)
        return cls(match["name"], int(match["factor"] or 1), offset)


@dataclass(frozen=True)
class TensorInfo(Report):
    """An input or output.

    Attributes:
        dtype: a NumPy dtype, ``ml_dtypes.bfloat16`` for bfloat16; ``object`` if NumPy has no dtype for the elements, or
            if the value is not a tensor.
        shape: for each axis a length, the name of a dynamic axis, or None for a dynamic axis without a name.
        has_rank: False if the model does not state the number of axes. Then ``shape`` is empty, as for a scalar.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Axes
    has_rank: bool = True

    def __str__(self) -> str:
        axes = ", ".join("?" if dim is None else str(dim) for dim in self.shape) if self.has_rank else "..."
        return f"{self.name}: {self.dtype}[{axes}]"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape may be the tensor."""
        return not self.has_rank or (
            len(shape) == len(self.shape)
            and all(not isinstance(dim, int) or dim == size for dim, size in zip(self.shape, shape, strict=True))
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype.name,
            "shape": list(self.shape) if self.has_rank else None,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> TensorInfo:
        """The inverse of :meth:`to_json`. Raises ValueError, KeyError or TypeError for any other ``entry``."""
        name, dtype, shape = str(entry["name"]), str(entry["dtype"]), tuple(entry["shape"] or ())
        if not all(isinstance(axis, (int, str, type(None))) for axis in shape):
            raise ValueError(f"the shape of {name} is {shape}")
        known = DTYPES.get(dtype)
        return cls(name, known.numpy if known else np.dtype(dtype), shape, entry["shape"] is not None)


def inputs_of(model: onnx.ModelProto) -> list[TensorInfo]:
    """The inputs of ``model`` without weights, which are inputs with a default value in old files."""
    initializers = {initializer.name for initializer in model.graph.initializer}
    return [info_of(value) for value in model.graph.input if value.name not in initializers]


def outputs_of(model: onnx.ModelProto) -> list[TensorInfo]:
    return [info_of(value) for value in model.graph.output]


def info_of(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim)
    return TensorInfo(value.name, numpy_of_onnx(tensor.elem_type), shape, tensor.HasField("shape"))

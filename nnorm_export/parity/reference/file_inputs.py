"""The user's inputs as a file takes them: their order, and the floating-point dtype of the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.dtypes import is_float
from nnorm_export.models.arguments import in_order, tensors_in
from nnorm_export.parity.reference.beyond_float16 import large_inputs
from nnorm_export.runtimes import Runner


def dtype_of(runner: Runner, model: nn.Module) -> torch.dtype | None:
    """The dtype of the file's first floating-point input or output; None if there is none.

    float64 counts only if it is the dtype of all, or the model has weights of it: other models cast to or from it.
    """
    names = [info.dtype.name for info in (*runner.inputs, *runner.outputs) if is_float(info.dtype)]
    is_double = any(tensor.dtype == torch.float64 for tensor in (*model.parameters(), *model.buffers()))
    narrow = [] if is_double else [name for name in names if name != "float64"]
    return getattr(torch, (narrow or names)[0]) if names else None


def as_taken(runner: Runner, example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bound inputs in the file's order, their floating-point tensors cast to the dtypes that the file takes."""
    example = in_order(dict(example), [info.name for info in runner.inputs])
    dtypes = iter(info.dtype for info in runner.inputs)

    def converted(value: Any) -> Any:
        dtype = next(dtypes, None) if isinstance(value, Tensor) else None
        if dtype is None or not (is_float(dtype) and value.is_floating_point()):
            return value
        return value.to(getattr(torch, dtype.name))

    taken: dict[str, Any] = pytree.tree_map(converted, dict(example))
    return taken


def inputs_beyond_float16(runner: Runner, example: Mapping[str, Any]) -> list[str]:
    """Names the bound inputs that a file takes in float16 and that are infinite there."""
    ordered = in_order(dict(example), [info.name for info in runner.inputs])
    return large_inputs(ordered, [tensor.dtype for tensor in tensors_in(as_taken(runner, example))])

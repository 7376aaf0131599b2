"""The dynamic axes of an exported program, and examples at other lengths of these axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from nnorm_export.models.arguments import tensors_in, unbind, with_tensors
from nnorm_export.process import without_warnings

Lengths = dict[str, int]  # symbol of torch.export -> its value


def at_other_lengths(
    program: torch.export.ExportedProgram, module: torch.nn.Module, example: dict[str, Any]
) -> list[tuple[Lengths, dict[str, Any]]]:
    """(length of each symbol, ``example`` cut or repeated to it): at the smallest lengths, and at other ones.

    Lengths that the program itself refuses are left out. A symbol keeps its length if no axis has this length alone
    (an axis may have ``2*s``).

    Args:
        program: the placeholders of the program say which axes are dynamic.
        module: the module of ``program``.
        example: the inputs with which the program was traced, by the names of the module's parameters.
    """
    tensors = tensors_in(example)
    shapes = shapes_of(program)
    if len(shapes) != len(tensors):
        return []
    own = {
        length: int(tensor.shape[axis])
        for shape, tensor in zip(shapes, tensors, strict=True)
        for axis, length in enumerate(shape)
        if isinstance(length, sympy.Symbol)
    }
    least, others = {}, {}
    for offset, (symbol, length) in enumerate(own.items()):
        low, high = range_of(program, symbol)
        least[symbol] = low
        longer = length + 1 + offset
        others[symbol] = longer if longer <= high else max(low, length - 1)
    found = []
    for lengths in (least, others):
        if lengths == own:
            continue
        other = resized(example, tensors, shapes, lengths)
        if other is not None and runs(module, other):
            found.append(({str(symbol): length for symbol, length in lengths.items()}, other))
    return found


def shapes_of(program: torch.export.ExportedProgram) -> list[tuple[Any, ...]]:
    """The shape of each input tensor of the program; the length of a dynamic axis is an expression of sympy."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = (values.get(str(name)) for name in program.graph_signature.user_inputs)
    return [
        tuple(length.node.expr if isinstance(length, torch.SymInt) else length for length in value.shape)
        for value in inputs
        if isinstance(value, Tensor)
    ]


def range_of(program: torch.export.ExportedProgram, symbol: Any) -> tuple[int, float]:
    """The least and the greatest length of the axes of ``symbol`` that ``program`` takes."""
    bounds = program.range_constraints.get(symbol)
    if bounds is None:
        return 1, math.inf
    low, high = (int(bound) if bound.is_Integer else None for bound in (bounds.lower, bounds.upper))
    return max(1, low or 1), math.inf if high is None else high


def resized(
    example: dict[str, Any], tensors: list[Tensor], shapes: list[tuple[Any, ...]], lengths: Mapping[Any, int]
) -> dict[str, Any] | None:
    """``example`` at ``lengths``; None if the length of an axis that depends on them would not be positive."""
    tensors_at = []
    for original, shape in zip(tensors, shapes, strict=True):
        tensor = original
        for axis, length in enumerate(shape):
            wanted = length.subs(lengths) if isinstance(length, sympy.Expr) else tensor.shape[axis]
            if not getattr(wanted, "is_number", True):  # contains a symbol that keeps its length
                continue
            if tensor.shape[axis] == 0 or int(wanted) != wanted or wanted < 1:
                return None
            if int(wanted) != tensor.shape[axis]:
                index = torch.arange(int(wanted), device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, index)
        tensors_at.append(tensor)
    return with_tensors(example, tensors_at)


def runs(module: torch.nn.Module, example: dict[str, Any], *, finite: bool = False) -> bool:
    """Whether ``module`` runs on ``example``, and returns finite numbers alone if they shall be ``finite``."""
    args, kwargs = unbind(module, with_tensors(example, [tensor.clone() for tensor in tensors_in(example)]))
    try:
        with torch.no_grad(), without_warnings():  # the user did not choose these lengths
            results = module(*args, **kwargs)
    except Exception:  # the guards and the operators of the program raise errors of many types
        return False
    return not finite or all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(results))

"""Writes operators that torch's exporter translates wrongly in others, which it translates right.

    x << n, x >> n            uint8 comes out as int8; counts below 0 or beyond the width of x are undefined in ONNX
    div(x, y, rounding_mode)  integers are divided in float32
    x // y, x % y             floating-point quotients are rounded before they are floored: 1 // 0.1 is 9, not 10
    logaddexp, logsigmoid     exp(x) overflows
    mean(x, dtype)            integers are divided as integers
    addmm(c, x, y, beta=0)    0·c is NaN where c is NaN or infinite; PyTorch ignores c
    scatter_reduce "mean"     ONNX has no mean
    batch_norm in training    running statistics are taken where there are any; PyTorch takes those of the batch
    any, all                  uint8 comes out as bool

Each call becomes a call of a Python function. torch traces it as the model's own code, with the path of its layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from nnorm_export.exporting.passes.program import nodes_of, program_copy

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
Number = int | float


def with_exact_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` itself, or a copy without such operators, which torch can decompose."""
    if not any(map(_replacement, nodes_of(program))):
        return program
    program = program_copy(program)
    for node in nodes_of(program):
        node.target = _replacement(node) or node.target
    return program


def _replacement(node: fx.Node) -> Callable[..., Tensor] | None:
    row = _TABLE.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    return row.function if row is not None and row.is_wrong(node) else None


def _shifted_left(x: Tensor, n: Tensor | int) -> Tensor:
    dtype, wide, count = _of_shift(x, n)
    bits = torch.iinfo(dtype).bits
    if not isinstance(count, Tensor):
        return _narrowed(wide << count, dtype) if 0 <= count < bits else torch.zeros_like(wide).to(dtype)
    is_within = (count >= 0) & (count < bits)
    shifted = _narrowed(torch.bitwise_left_shift(wide, count.clamp(0, bits - 1)), dtype)
    return torch.where(is_within, shifted, torch.zeros_like(shifted))


def _shifted_right(x: Tensor, n: Tensor | int) -> Tensor:
    dtype, wide, count = _of_shift(x, n)
    last = torch.iinfo(dtype).bits - (dtype != torch.uint8)  # leaves the sign, or 0 of a byte
    if not isinstance(count, Tensor):
        return _narrowed(wide >> (count if 0 <= count <= last else last), dtype)
    count = torch.where((count >= 0) & (count <= last), count, torch.full_like(count, last))
    return _narrowed(torch.bitwise_right_shift(wide, count), dtype)


def _of_shift(x: Tensor, n: Tensor | int) -> tuple[torch.dtype, Tensor, Tensor | int]:
    """The dtype of the result of a shift, and its arguments in a signed dtype."""
    dtype = torch.result_type(x, n)
    signed = torch.int32 if dtype == torch.uint8 else dtype
    return dtype, x.to(signed), n.to(signed) if isinstance(n, Tensor) else n


def _narrowed(result: Tensor, dtype: torch.dtype) -> Tensor:
    return (result & 255).to(dtype) if dtype == torch.uint8 else result


def _divided(x: Tensor, y: Tensor | Number, *, rounding_mode: str) -> Tensor:
    if rounding_mode == "floor":
        return _floor_divided(x, y)
    floored, rest = torch.floor_divide(x, y), torch.remainder(x, y)
    return floored + ((rest != 0) & ((x < 0) != (y < 0))).to(floored.dtype)


def _floor_divided(x: Tensor, y: Tensor | Number) -> Tensor:
    dtype, x, y = _of_division(x, y)
    if not dtype.is_floating_point:
        return torch.floor_divide(x, y)
    rest = torch.fmod(x, y)
    quotient = torch.round((x - rest) / y)  # a multiple of y, up to a rounding
    quotient = torch.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)
    if isinstance(y, Tensor):
        quotient = torch.where(y == 0, x / y, quotient)  # fmod(x, 0) is NaN
    return (quotient if isinstance(y, Tensor) or y != 0 else x / y).to(dtype)


def _remainder(x: Tensor, y: Tensor | Number) -> Tensor:
    dtype, x, y = _of_division(x, y)
    if not dtype.is_floating_point:
        return torch.remainder(x, y)
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest).to(dtype)


def _of_division(x: Tensor | Number, y: Tensor | Number) -> tuple[torch.dtype, Tensor, Tensor | Number]:
    """The dtype of the result of a division, and its arguments in the dtype that PyTorch divides in."""
    dtype = torch.result_type(x, y)
    x = x if isinstance(x, Tensor) else torch.full_like(torch.as_tensor(y), x, dtype=dtype)
    wide = torch.float32 if dtype in _HALVES else dtype
    return dtype, x.to(wide), y.to(wide) if isinstance(y, Tensor) else y


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    dtype, x, y = _of_logarithm(x, y)
    difference = torch.where(x == y, torch.zeros_like(x), x - y)  # ∞ - ∞ is NaN
    return (torch.maximum(x, y) + torch.log1p(torch.exp(-difference.abs()))).to(dtype)


def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    return _logaddexp(x * math.log(2), y * math.log(2)) / math.log(2)


def _logsigmoid(x: Tensor) -> Tensor:
    dtype, x, zeros = _of_logarithm(x, torch.zeros_like(x))
    return (torch.minimum(x, zeros) - torch.log1p(torch.exp(-x.abs()))).to(dtype)


def _of_logarithm(x: Tensor, y: Tensor) -> tuple[torch.dtype, Tensor, Tensor]:
    dtype = torch.result_type(x, y)
    wide = torch.float32 if dtype in _HALVES else dtype
    return dtype, x.to(wide), y.to(wide)


def _mean(x: Tensor, *axes: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    return torch.mean(x.to(dtype), *axes, **kwargs)


def _scattered_mean(x: Tensor, dim: int, index: Tensor, source: Tensor, _: str, *, include_self: bool = True) -> Tensor:
    sums = x.scatter_reduce(dim, index, source, "sum", include_self=include_self)
    counts = torch.ones_like(x) if include_self else torch.zeros_like(x)
    counts = counts.scatter_add(dim, index, torch.ones_like(source)).clamp(min=1)
    return sums / counts if x.is_floating_point() else torch.floor_divide(sums, counts)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, _mean: object, _variance: object, *others: Any
) -> Tensor:
    normalized: Tensor = _aten.batch_norm.default(x, weight, bias, None, None, *others)
    return normalized


def _only(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def computed(_: Tensor, x: Tensor, y: Tensor, *, beta: Number, alpha: Number = 1) -> Tensor:
        return product(x, y) if alpha == 1 else product(x, y) * alpha

    return computed


def _of_bytes(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: function(x != 0, *args, **kwargs).to(torch.uint8)


class _Row(NamedTuple):
    function: Callable[..., Tensor]
    is_wrong: Callable[[fx.Node], bool] = lambda _: True


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _rounds_wrongly(node: fx.Node) -> bool:
    mode = node.kwargs.get("rounding_mode")
    return mode == "floor" or (mode == "trunc" and not _dtype(node).is_floating_point)


def _has_beta_0(node: fx.Node) -> bool:
    return bool(node.kwargs.get("beta", 1) == 0)


def _is_mean(node: fx.Node) -> bool:
    return "mean" in (*node.args, *node.kwargs.values())


def _trains_with_statistics(node: fx.Node) -> bool:
    *_, mean, variance, training, _momentum, _eps, _cudnn = node.args
    return training is True and (mean is not None or variance is not None)


_ROWS = {
    _aten.__lshift__: _Row(_shifted_left),
    _aten.bitwise_left_shift: _Row(_shifted_left),
    _aten.__rshift__: _Row(_shifted_right),
    _aten.bitwise_right_shift: _Row(_shifted_right),
    _aten.div: _Row(_divided, _rounds_wrongly),
    _aten.floor_divide: _Row(_floor_divided, lambda node: _dtype(node).is_floating_point),
    _aten.remainder: _Row(_remainder, lambda node: _dtype(node).is_floating_point),
    _aten.logaddexp: _Row(_logaddexp),
    _aten.logaddexp2: _Row(_logaddexp2),
    _aten.log_sigmoid: _Row(_logsigmoid),
    _aten.mean: _Row(_mean, lambda node: node.kwargs.get("dtype") is not None),
    _aten.scatter_reduce: _Row(_scattered_mean, _is_mean),
    _aten.batch_norm: _Row(_batch_norm, _trains_with_statistics),
    _aten.addmm: _Row(_only(torch.mm), _has_beta_0),
    _aten.addmv: _Row(_only(torch.mv), _has_beta_0),
    _aten.addr: _Row(_only(torch.outer), _has_beta_0),
    _aten.baddbmm: _Row(_only(torch.bmm), _has_beta_0),
    _aten.addbmm: _Row(_only(lambda x, y: torch.bmm(x, y).sum(0)), _has_beta_0),
    _aten.any: _Row(_of_bytes(torch.any), lambda node: _dtype(node) == torch.uint8),
    _aten.all: _Row(_of_bytes(torch.all), lambda node: _dtype(node) == torch.uint8),
}
_IN_PLACE = {"__lshift__": "__ilshift__", "__rshift__": "__irshift__"}


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))


def _of_number(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: function(torch.full_like(y, x, dtype=torch.result_type(x, y)), y)


def _named(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _overloads() -> Iterator[tuple[Any, _Row]]:
    """The overloads of the operators that take tensors, those that work in place too, and their rows."""
    for packet, row in _ROWS.items():
        for overload in _named(packet):
            kinds = [str(argument.type) for argument in overload._schema.arguments]
            if "Tensor" not in kinds or any(argument.is_out for argument in overload._schema.arguments):
                continue
            yield overload, row if kinds[0] == "Tensor" else _Row(_of_number(row.function), row.is_wrong)
        name = packet.__name__
        in_place = getattr(_aten, _IN_PLACE.get(name, f"{name}_"), None)
        for overload in () if in_place is None else _named(in_place):
            yield overload, _Row(_in_place(row.function), row.is_wrong)


_TABLE = dict(_overloads())

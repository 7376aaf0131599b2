"""Random last bits: what a model's result is when its weights and inputs move by one unit in the last place.

A stochastic arithmetic (CADNA; Parker's Monte Carlo arithmetic): the spread of a few such results shows, for each
element, how much rounding errors matter there.

Runtimes compute a sigmoid to an absolute accuracy, and PyTorch to a relative one: at -10 ONNX Runtime's is 1e-2 of
the result off. The sigmoids of these runs therefore have the error of a runtime too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnorm_export.errors import InputError

_ATEN = torch.ops.aten
_T = TypeVar("_T")

_CHUNK = 1 << 20  # elements at a time: random numbers for a whole weight would take as much memory as the weight

# dtype -> the integer of its size, and the bits of its exponent
_BITS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


@contextmanager
def random_last_bits(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside the block, every floating-point weight and buffer of ``model`` has a random last bit.

    The bits are flipped in place and flipped again afterwards: no copy of the weights is made.
    """
    tensors = [*model.parameters(), *model.buffers()]
    flip_last_bits(tensors, seed)
    try:
        yield
    finally:
        flip_last_bits(tensors, seed)


def flip_last_bits(tensors: Iterable[Tensor], seed: int) -> None:
    """Flips the last bit of a random half of the elements, in place; with the same seed again, flips them back.

    Zeros, infinite elements, NaN, and tensors whose elements share memory are left as they are.
    """
    generator = np.random.Generator(np.random.SFC64(seed))
    for tensor in tensors:
        if tensor.dtype not in _BITS or tensor.layout != torch.strided or _is_expanded(tensor):
            continue
        integer, exponent = _BITS[tensor.dtype]
        bits = tensor.detach().view(integer)
        for part in torch.split(bits.view(-1), _CHUNK) if bits.is_contiguous() else [bits]:
            count = part.numel()
            drawn = np.frombuffer(generator.bytes(-(-count // 8)), np.uint8)
            flips = torch.from_numpy(np.unpackbits(drawn, count=count)).view(part.shape).to(part.device)
            # Without the last bit, so that both calls flip the same elements.
            magnitude = part & (torch.iinfo(integer).max - 1)
            if count and not 0 < int(magnitude.min()) <= int(magnitude.max()) < exponent:
                flips[(magnitude == 0) | (magnitude >= exponent)] = 0
            part.bitwise_xor_(flips)


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


class AbsoluteSigmoids(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Inside the block, float32 log1p, sigmoids, and what runtimes compute with them or exp(x) - 1, are off by 2⁻²⁴.

    The sign of the error is random. ONNX Runtime's sigmoid is at most three times as far off, and 0 below -18. Its tanh
    is up to 5·2⁻²⁴ of the result off, where PyTorch's is 2⁻²⁴ at most; and GELU has 1 + erf(x).

    Attributes:
        dtypes: the names of the floating-point dtypes that the operators returned.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        scale_of = _SCALES.get(packet)
        if scale_of is None:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype in _BITS:
                self.dtypes.add(str(result.dtype).removeprefix("torch."))
            return result
        scale = scale_of(*args, **(kwargs or {}))  # before an in-place function overwrites its argument
        result = func(*args, **(kwargs or {}))
        moved = result[0] if isinstance(result, tuple) else result
        if moved.dtype == torch.float32:
            signs = torch.empty(moved.shape).bernoulli_(0.5, generator=self._generator).mul_(2).sub_(1)
            off = torch.minimum(torch.full_like(moved, 2.0**-24) * scale, moved.abs() * _LARGEST_SHARE)
            moved.add_(signs.to(moved.device) * off)
        return result


def with_absolute_sigmoids(seed: int, run: Callable[..., _T], *args: Any) -> tuple[_T, set[str]]:
    """Returns what ``run`` returns for ``args`` with :class:`AbsoluteSigmoids`, and the dtypes that it computes in.

    A model that does not run inside the mode, as one with torch.cond, runs without it; an error of its own comes again.
    """
    mode = AbsoluteSigmoids(seed)
    try:
        with mode:
            return run(*args), mode.dtypes
    except (RuntimeError, InputError):  # of torch, and what ``run`` makes of it
        torch.compiler.reset()  # Dynamo would remember that it failed
        return run(*args), set()


_LARGEST_SHARE = 0.875  # of the result: a probability stays above 0, so that its logarithm is finite


# What a function multiplies its sigmoid by.
_SCALES: dict[Any, Callable[..., Tensor | float]] = {
    **dict.fromkeys((_ATEN.sigmoid, _ATEN.sigmoid_, _ATEN.log_sigmoid_forward), lambda _: 1.0),
    **dict.fromkeys((_ATEN.elu, _ATEN.elu_), lambda *_, **__: 1.0),
    **dict.fromkeys((_ATEN.silu, _ATEN.silu_), lambda x: x.abs()),
    **dict.fromkeys((_ATEN.expm1, _ATEN.expm1_), lambda x: 2 * x.expm1().abs()),
    # exp(η·log1p(h)) moves by η·log1p(h) times the relative error of the logarithm.
    **dict.fromkeys((_ATEN.log1p, _ATEN.log1p_), lambda x: x.log1p().abs()),
    **dict.fromkeys((_ATEN.tanh, _ATEN.tanh_), lambda x: x.tanh().abs()),
    _ATEN.gelu: lambda x, **_: x.abs() / 2,
    _ATEN.glu: lambda x, dim=-1: x.chunk(2, dim)[0].abs(),
}

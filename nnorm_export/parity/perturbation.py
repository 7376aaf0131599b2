"""Random last bits: what a model's result is when its weights and inputs move by one unit in the last place.

A stochastic arithmetic (CADNA; Parker's Monte Carlo arithmetic): the spread of a few such results shows, for each
element, how much rounding errors matter there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_CHUNK = 1 << 20  # elements: random numbers for a whole weight would take as much memory as the weight

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
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        if tensor.dtype not in _BITS or tensor.layout != torch.strided or _is_expanded(tensor):
            continue
        integer, exponent = _BITS[tensor.dtype]
        bits = tensor.detach().view(integer)
        for part in torch.split(bits.view(-1), _CHUNK) if bits.is_contiguous() else [bits]:
            flips = torch.empty(part.shape, dtype=integer).random_(0, 2, generator=generator).to(part.device)
            # Neither test reads the last bit, so that both calls flip the same elements.
            flips[((part & exponent) == exponent) | ((part & ~1) & ~_sign(integer) == 0)] = 0
            part.bitwise_xor_(flips)


def _sign(integer: torch.dtype) -> int:
    return torch.iinfo(integer).min


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))

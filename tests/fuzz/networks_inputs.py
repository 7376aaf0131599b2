"""The further inputs of random networks, and the layers that take them: maps, vectors, indices, integers, masks."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from fuzz.networks_attention import MASKS, MaskedAttention, groups_of
from torch import Tensor, nn

INTEGERS: dict[str, tuple[torch.dtype, ...]] = {
    "b & 7": (torch.uint8, torch.int32, torch.int64),
    "b >> 1": (torch.uint8, torch.int32, torch.int64),
    "b // 3": (torch.uint8, torch.int32, torch.int64),
    "b % 5": (torch.uint8, torch.int32, torch.int64),
    "b.clamp(2, 9)": (torch.uint8, torch.int32, torch.int64),
    "b.abs()": (torch.int32, torch.int64),
    "(b > 100).long()": (torch.uint8, torch.int32, torch.int64),
    "b.logical_not().long()": (torch.uint8, torch.int64, torch.bool),
    "b.cumsum(-1) % 100": (torch.uint8, torch.int32, torch.bool),
}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "b & 7": lambda b: b & 7,
    "b >> 1": lambda b: b >> 1,
    "b // 3": lambda b: b // 3,
    "b % 5": lambda b: b % 5,
    "b.clamp(2, 9)": lambda b: b.clamp(2, 9),
    "b.abs()": lambda b: b.abs(),
    "(b > 100).long()": lambda b: (b > 100).long(),
    "b.logical_not().long()": lambda b: b.logical_not().long(),
    "b.cumsum(-1) % 100": lambda b: b.cumsum(-1) % 100,
}


class OtherInput(nn.Module):
    """Joins another input of the network."""

    def __init__(self, how: str, argument: int, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.how, self.argument, self.layer = how, argument, layer

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.how in MASKS:
            assert self.layer is not None
            y: Tensor = self.layer(x, other)
            return y
        if self.how == "mask":
            return torch.where(other, x, -0.5 * x)
        if self.how == "same":
            return x + other
        if self.how in _FUNCTIONS:
            other = _FUNCTIONS[self.how](other).to(x.dtype) / 64
        elif self.layer is not None:
            other = self.layer(other)
            other = other.mean(1) if self.how == "index" else other
        return x + other.reshape(*other.shape, *(1,) * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"{self.how}, argument {self.argument}"


def other_input(rng: random.Random, inputs: list[Tensor], y: Tensor) -> OtherInput:
    """A layer that joins another input to ``y``; the input is appended to ``inputs``."""
    batch, channels, argument = y.shape[0], y.shape[1], len(inputs)
    how = rng.choice(["same", "vector", "index", "integers", "mask", *["attention"] * 8 * (y.dim() == 3)])
    if how == "attention":
        how = rng.choice(MASKS)
        inputs.append(_keys(rng, batch, channels, whole_rows=how not in ("extended", "lowest")))
        width = y.shape[2]
        return OtherInput(how, argument, MaskedAttention(width, groups_of(rng, width), how))
    if how == "integers":
        how = rng.choice([*INTEGERS])
        dtype = rng.choice(INTEGERS[how])
        least, greatest = {torch.uint8: (0, 256), torch.bool: (0, 2)}.get(dtype, (-300, 300))
        inputs.append(torch.randint(least, greatest, (batch, channels)).to(dtype))
        return OtherInput(how, argument)
    inputs.append({
        "same": torch.randn_like(y), "vector": torch.randn(batch, 3),
        "index": torch.randint(0, 7, (batch, 2)), "mask": torch.rand(y.shape) < 0.5,
    }[how])  # fmt: skip
    layers = {"index": lambda: nn.Embedding(7, channels), "vector": lambda: nn.Linear(3, channels)}
    return OtherInput(how, argument, layers[how]() if how in layers else None)


def _keys(rng: random.Random, batch: int, length: int, whole_rows: bool) -> Tensor:
    """Which keys of each row are seen: some, all, or, if ``whole_rows``, none."""
    seen = torch.rand(batch, length) < rng.choice([0.3, 0.7, 1.0])
    if whole_rows and rng.random() < 0.5:
        seen[rng.randrange(batch)] = False
    else:
        seen[:, 0] = True
    return seen

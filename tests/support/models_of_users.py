"""Models in the idioms that people write: lengths as numbers of Python, loops, shapes in texts, tuples and dicts.

Each function is the forward of a model in :data:`MODELS`, with the layers of :class:`Base`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import layers

FEATURES = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(4, FEATURES), layers.LayerNormalNorm(FEATURES)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.position, self.head = nn.Embedding(16, FEATURES), nn.Linear(FEATURES, 3)
        self.token = nn.Parameter(torch.randn(1, 1, FEATURES))
        self.activation = functools.partial(F.leaky_relu, negative_slope=0.2)
        self.cache: Tensor | None = None

    def tokens(self, x: Tensor) -> Tensor:
        return self.norm(self.embed(x))


MODELS: dict[str, type[Base]] = {}


def model(forward: Callable[..., Any]) -> Callable[..., Any]:
    MODELS[forward.__name__] = type(forward.__name__, (Base,), {"forward": forward})
    return forward


def example(name: str, rows: int) -> tuple[Any, ...]:
    """Inputs of ``rows`` rows for a model."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, 4, generator=generator)
    mask = (torch.rand(rows, 6, generator=generator) > 0.3).float()
    of_name = {
        "tuple_or_tensor": ((x, mask),),
        "dict_of_tensors": ({"x": x, "mask": mask},),
        "lengths_of_rows": (x, torch.arange(rows) % 6 + 1),
        "data_class": (Batch(x, mask),),
    }
    return of_name.get(name, (x,))


@model
def expand_by_len(self: Base, x: Tensor) -> Tensor:
    return self.head(torch.cat([self.token.expand(len(x), -1, -1), self.tokens(x)], 1).mean(1))


@model
def size_of_zero(self: Base, x: Tensor) -> Tensor:
    return self.head(self.tokens(x).view(x.size(0), -1, FEATURES).mean(1))


@model
def int_of_shape(self: Base, x: Tensor) -> Tensor:
    b = int(x.shape[0])
    return self.head(self.tokens(x).reshape(b, -1)[:, :FEATURES])


@model
def loop_over_layers(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x)
    for i, block in enumerate(self.blocks):
        h = h + block(h) if i % 2 == 0 else F.gelu(block(h))
    return self.head(h.flatten(1).view(len(x), -1, FEATURES))


@model
def loop_over_steps(self: Base, x: Tensor) -> Tensor:
    h, state = self.tokens(x), x.new_zeros(len(x), FEATURES)
    for t in range(x.shape[1]):
        state = torch.tanh(h[:, t] + self.blocks[0](state))
    return self.head(state)


@model
def shape_in_text(self: Base, x: Tensor) -> Tensor:
    text = f"a batch of {x.shape[0]} x {tuple(x.shape[1:])}"
    assert text.startswith("a batch")
    return self.head(self.tokens(x))


@model
def assertions(self: Base, x: Tensor) -> Tensor:
    assert x.shape[0] > 0, f"an empty batch: {x.shape}"
    assert x.ndim == 3, "not a sequence"
    return self.head(self.tokens(x))


@model
def tensor_of_shape(self: Base, x: Tensor) -> Tensor:
    size = torch.tensor(x.shape, dtype=torch.float32)
    return self.head(self.tokens(x)) / size.prod().sqrt()


@model
def view_by_len(self: Base, x: Tensor) -> Tensor:
    return self.blocks[0](self.tokens(x).mean(1)).view(len(x), -1)


@model
def positions(self: Base, x: Tensor) -> Tensor:
    position = self.position(torch.arange(x.shape[1], device=x.device))
    return self.head(self.tokens(x) + position[None].repeat(len(x), 1, 1))


@model
def if_training(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x)
    if self.training:
        h = h + torch.randn(len(x), 1, 1)
    return self.head(h)


@model
def zip_of_chunks(self: Base, x: Tensor) -> Tensor:
    parts = self.tokens(x).chunk(2, dim=1)
    return self.head(sum(block(part) for block, part in zip(self.blocks, parts, strict=True)))


@model
def half_of_batch(self: Base, x: Tensor) -> Tensor:
    h, half = self.tokens(x), x.shape[0] // 2
    return self.head(torch.cat([h[half:], h[:half]]))


@model
def split_by_len(self: Base, x: Tensor) -> Tensor:
    first, second = torch.split(self.tokens(x), [len(x) // 2, len(x) - len(x) // 2])
    return self.head(torch.cat([second, first]))


@model
def star_of_shape(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x).view(*x.shape[:-1], 2, FEATURES // 2)
    return h.transpose(-1, -2).reshape(*x.shape[:-1], -1)


@model
def tuple_or_tensor(self: Base, x: Any) -> Tensor:
    x, mask = x if isinstance(x, tuple) else (x, x.new_ones(len(x), x.shape[1]))
    return self.head((self.tokens(x) * mask[..., None]).sum(1)) + x.new_zeros(len(x), 1)


@model
def dict_of_tensors(self: Base, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    h = self.tokens(batch["x"])
    mask = batch.get("mask")
    if mask is not None:
        h = h * mask.view(len(batch["x"]), -1, 1)
    return {"logits": self.head(h.mean(1)), "features": h}


@dataclass
class Batch:
    x: Tensor
    mask: Tensor


torch.export.register_dataclass(Batch)


@model
def data_class(self: Base, batch: Batch) -> Tensor:
    return self.head((self.tokens(batch.x) * batch.mask.unsqueeze(-1)).sum(1)).reshape(len(batch.x), -1)


@model
def partial_function(self: Base, x: Tensor) -> Tensor:
    flat = functools.partial(torch.reshape, shape=(len(x), -1))
    return flat(self.head(self.activation(self.tokens(x))))


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@model
def named_tuple(self: Base, x: Tensor) -> Pair:
    h = self.tokens(x)
    return Pair(self.head(h.sum(1)), h.reshape(len(h), -1))


@model
def lengths_of_rows(self: Base, x: Tensor, lengths: Tensor) -> Tensor:
    keep = torch.arange(x.size(1))[None].expand(len(lengths), -1) < lengths[:, None]
    return self.head((self.tokens(x) * keep[..., None]).sum(1) / lengths[:, None])


@model
def attention(self: Base, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q = self.tokens(x).reshape(b, n, 2, -1).permute(0, 2, 1, 3)
    mask = torch.triu(torch.full((n, n), float("-inf"), device=x.device), diagonal=1)
    y = (q @ q.mT / math.sqrt(q.shape[-1]) + mask.expand(len(x), 1, n, n)).softmax(-1) @ q
    return self.head(y.transpose(1, 2).reshape(b, n, -1))


@model
def numbers_of_lengths(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x)
    return self.head(h) * (h.numel() / len(h)) ** -0.5 / max(len(x), 2) * math.sqrt(len(x))


@model
def eye_of_len(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x).mean(1)
    similar = (h @ h.t()).masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), 0)
    return self.head(h) + similar.sum(1, keepdim=True)


@model
def if_one_row(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x)
    if len(x) == 1:
        return self.head(h.mean(1))
    return self.head(h.mean(dim=1))


@model
def table_made_when_needed(self: Base, x: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.linspace(0, 1, 32)
    return self.head(self.tokens(x) + self.cache[: x.shape[1], None]).view(len(x), -1)


# torch.export makes no program of these for a batch of any size.
REFUSED: dict[str, type[Base]] = {}


def refused(forward: Callable[..., Any]) -> Callable[..., Any]:
    REFUSED[forward.__name__] = type(forward.__name__, (Base,), {"forward": forward})
    return forward


@refused
def loop_over_rows(self: Base, x: Tensor) -> Tensor:
    return torch.stack([self.head(self.tokens(x[i])) for i in range(len(x))])


@refused
def rows_as_list(self: Base, x: Tensor) -> Tensor:
    rows = []
    for row in self.tokens(x):
        rows.append(row.mean(0))
    return self.head(torch.stack(rows))


@refused
def range_of_shape(self: Base, x: Tensor) -> Tensor:
    h, total = self.tokens(x), torch.zeros(FEATURES)
    for b in range(x.shape[0]):
        total = total + h[b].sum(0)
    return self.head(h + total)


@refused
def len_and_text(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x).view(len(x), -1, FEATURES)
    assert f"{x.shape[0]} rows".endswith("rows")
    return self.head(h)


@refused
def len_and_log(self: Base, x: Tensor) -> Tensor:
    logging.getLogger("model").debug("%s rows", x.shape[0])
    return self.head(self.tokens(x).view(len(x), -1, FEATURES))


@refused
def number_of_rows(self: Base, x: Tensor) -> Tensor:
    return self.head(self.tokens(x).reshape(5, -1, FEATURES))


@refused
def value_of_sum(self: Base, x: Tensor) -> Tensor:
    h = self.tokens(x)
    return self.head(h) if h.sum() > 0 else -self.head(h)

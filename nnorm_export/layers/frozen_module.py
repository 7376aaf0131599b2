"""Frozen layers compute in float32 or float64, also in a model of another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


def arithmetic_of(tensors: Iterable[Tensor]) -> torch.dtype:
    """float64 for a layer that has a float64 tensor, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


class FrozenModule(nn.Module):
    """A layer frozen for inference: its buffers stay float32 (or float64) when the model is cast to a narrower dtype.

    Args:
        tensors: name -> buffer; None for a buffer that the layer lacks.
        arithmetic: the dtype of the buffers, float32 or float64; None decides for each tensor by its own dtype.
    """

    def __init__(self, tensors: Mapping[str, Tensor | None], arithmetic: torch.dtype | None = None) -> None:
        super().__init__()
        for name, value in tensors.items():
            kept = value if value is None else value.detach().to(arithmetic or arithmetic_of([value]))
            self.register_buffer(name, kept if kept is None else kept.contiguous().clone())
        self.training = False

    def train(self, mode: bool = True) -> FrozenModule:
        """Set the flag ``training`` only: the statistics stay frozen, and no noise is added."""
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenModule:
        def keep_arithmetic(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        nn.Module._apply(self, keep_arithmetic, recurse=False)
        if recurse:
            for child in self.children():
                child._apply(fn)
        return self

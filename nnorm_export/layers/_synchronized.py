"""Statistics of a batch whose samples are spread over several processes, with gradients through all of them.

Each process has a part of the batch, of any size, and it may be empty. Every process takes part in every collective,
forward and backward, and in the same order. Otherwise the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


class SharedGroup:
    """Holds a process group, which cannot be copied. Copies of a layer communicate over the group of the layer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedGroup:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a layer with process_group= cannot be pickled, because a group exists in the running processes only; save "
            "model.state_dict(), or set process_group to None first"
        )


class _AllReduce(torch.autograd.Function):
    """The sum over the processes. Every process's loss depends on it, so its gradient is the sum over them too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_with_gradient(gradient, ctx.group), None


def _sum_with_gradient(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return cast("Tensor", _AllReduce.apply(x, group))  # type: ignore[no-untyped-call]  # torch does not annotate it


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class PartOfBatch:
    """Statistics over all processes of a batch of which this process has ``x``.

    Args:
        x: [N, C, ...], N may be 0.
        group: the processes; None for all of them.

    Attributes:
        mean, variance: of each channel, with axes of length 1. The variance is biased.
        count: the number of values of a channel in all processes.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._dim = [0, *range(2, x.dim())]
        self._own_count = x.numel() // x.shape[1]
        if self._own_count:
            variance, mean = torch.var_mean(x, self._dim, correction=0, keepdim=True)
        else:
            variance = mean = x.mean(self._dim, keepdim=True)
        own = self._stack([mean, variance])
        row = torch.cat([own.flatten(), own.new_full((1,), self._own_count)])[None]
        # The rows of all processes, because sums of x and x² lose the variance of a channel with a great mean.
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        rows = torch.cat([row.new_zeros(rank, row.shape[1]), row, row.new_zeros(size - rank - 1, row.shape[1])])
        rows = _sum_with_gradient(rows, group)
        counts = rows[:, -1].detach().reshape(-1, *(1 for _ in mean.shape))
        self.count = counts.sum()
        shares = counts / self._divisor
        means, variances = rows[:, :-1].reshape(size, 2, *mean.shape).unbind(1)
        self.mean = (shares * means).sum(0)
        distances = means - self.mean
        self.variance = (shares * (variances + distances * distances)).sum(0)

    @property
    def is_empty(self) -> bool:
        """Whether the parts of all processes are empty."""
        return self._own_count == 0 and not bool(self.count > 0.0)

    @property
    def _divisor(self) -> Tensor:
        return self.count.clamp(min=1.0)  # the whole batch may be empty

    def _stack(self, means: Sequence[Tensor]) -> Tensor:
        """``means`` as one tensor. Those of no values become 0 and keep their gradient: backward has to take part."""
        stacked = torch.stack(list(means))
        return stacked if self._own_count else stacked.nan_to_num()

    def means_of_all(self, means: Sequence[Tensor]) -> list[Tensor]:
        """The means over all processes, from those over this process's part."""
        sums = _sum_with_gradient(self._stack(means) * self._own_count, self._group)
        return list((sums / self._divisor).unbind())

    def mean_absolute_deviation(self, x: Tensor) -> Tensor:
        """s̄ = mean|x − mean x| over all processes; no gradient flows through it."""
        x = x.detach()
        return self._mean((x - self._mean(x)).abs())

    def _mean(self, x: Tensor) -> Tensor:
        return _sum(x.sum(self._dim, keepdim=True), self._group) / self._divisor

"""Running statistics of the training batches, for inference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nnorm_export.layers._normalization import Normalization, require_flag, require_number


def in_recomputation() -> bool:
    """Whether this forward pass repeats an earlier one, as activation checkpointing does: its batch is counted already.

    A forward pass within a backward pass is a repetition. All ways of checkpointing have this in common: the two of
    torch.utils.checkpoint, nested or stopped early, those of other libraries, and the adjoint method of differential
    equations. The grad mode tells less: a reentrant checkpoint within another one repeats its forward pass without
    gradients first. The hooks of saved tensors tell less: a reentrant checkpoint has none. A forward pass in a user's
    own backward hook passes for a repetition too.

    A graph of torch.compile has no such question: a checkpoint within it repeats the operators that backward needs, and
    the changes of buffers are not among them.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class RunningStatistics(Normalization):
    """new = m·batch + (1 − m)·old, m the momentum; None for the cumulative average, m = 1/``num_batches_tracked``."""

    num_batches_tracked: Tensor

    def _init_running_stats(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        momentum: float | None,
        track_running_stats: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        require_number("momentum", momentum, optional=True)
        require_flag("track_running_stats", track_running_stats)
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device))
        self.reset_running_stats()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_running_stats()

    @abstractmethod
    def reset_running_stats(self) -> None:
        """Set the statistics to their values before the first batch."""

    def _count_batch(self) -> None:
        if self.training and self.track_running_stats and not in_recomputation():
            self.num_batches_tracked.add_(1)

    def _move(self, name: str, batch_value: Tensor) -> None:
        if in_recomputation():
            return
        buffer: Tensor = getattr(self, name)
        batch_value = batch_value.reshape(buffer.shape)
        # A tensor, because reading the count as a Python number would break the graph of torch.compile.
        counted = self.num_batches_tracked.to(batch_value.dtype)
        factor = 1.0 / counted if self.momentum is None else self.momentum
        buffer.copy_(factor * batch_value + (1.0 - factor) * buffer.to(batch_value.dtype))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The authors' layers keep the count as a plain attribute, so their checkpoints do not contain it.
        current = self.num_batches_tracked
        default = torch.zeros_like(current, device="cpu") if current.is_meta else current
        state_dict.setdefault(f"{prefix}num_batches_tracked", default)
        super()._load_from_state_dict(state_dict, prefix, *args)

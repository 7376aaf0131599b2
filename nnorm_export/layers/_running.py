"""Running statistics of the training batches, for inference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

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


class _Held:
    """A second reference to the numbers of each statistic. Copies and pickles of a layer do not have those of it."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.dtypes = {name: buffer.dtype for name, buffer in buffers.items()}
        self.values = {name: (buffer, buffer.detach()) for name, buffer in buffers.items()}

    def __reduce__(self) -> Any:
        return _Held, ({},)


class RunningStatistics(Normalization):
    """new = m·batch + (1 − m)·old, m the momentum; None for the cumulative average, m = 1/``num_batches_tracked``.

    The statistics keep the dtype that the layer was made with or converted to (``half()``, ``to()``). FSDP's
    ``MixedPrecision(buffer_dtype=…)`` casts buffers by ``buffer.data = …`` instead, and an average in bfloat16 stands
    still where a step is below about 1/256 of it. The layer takes such a cast back.
    """

    num_batches_tracked: Tensor
    _held: _Held

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
        self._hold_statistics()

    def _compute(self, x: Tensor) -> Tensor:
        self._take_back_cast()
        if self.training and self.track_running_stats:
            self._check_vmap(x)
            if not in_recomputation():
                self.num_batches_tracked.add_(1)
        return super()._compute(x)

    def _check_vmap(self, x: Tensor) -> None:
        if not torch.compiler.is_compiling() and not _vmaps(x) <= _vmaps(self.num_batches_tracked):
            raise RuntimeError(
                f"{type(self).__name__}: vmap maps over the input, but there is one set of running statistics; map "
                "over the buffers too (torch.func.stack_module_state), set track_running_stats=False, or call eval()"
            )

    def _hold_statistics(self) -> None:
        self._held = _Held(
            {name: value for name, value in self.named_buffers(recurse=False) if value.is_floating_point()}
        )

    def _take_back_cast(self) -> None:
        buffers = cast("dict[str, Tensor]", self._buffers)  # getattr is slow
        if any(buffers[name].dtype != dtype for name, dtype in self._held.dtypes.items()):
            self._restore_statistics()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not annotate it
    def _restore_statistics(self) -> None:
        for name, (buffer, held) in self._held.values.items():
            if getattr(self, name) is not buffer or buffer.dtype == held.dtype:
                continue  # a caller put a tensor of its own in the place of the buffer, as functional_call does
            # The numbers before the cast, unless the buffer has moved on since.
            is_cast = torch.equal(held.to(buffer), buffer)
            buffer.data = held.to(buffer.device) if is_cast else buffer.to(held.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningStatistics:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._hold_statistics()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._hold_statistics()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_running_stats()

    @abstractmethod
    def reset_running_stats(self) -> None:
        """Set the statistics to their values before the first batch."""

    def _move(self, name: str, batch_value: Tensor) -> None:
        if in_recomputation():
            return
        buffer: Tensor = getattr(self, name)
        batch_value = batch_value.reshape(buffer.shape)
        # A tensor, because reading the count as a Python number would break the graph of torch.compile.
        factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(batch_value.dtype)
        buffer.copy_(factor * batch_value + (1.0 - factor) * buffer.to(batch_value.dtype))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._take_back_cast()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._take_back_cast()
        # The authors' layers keep the count as a plain attribute, so their checkpoints do not contain it.
        current = self.num_batches_tracked
        default = torch.zeros_like(current, device="cpu") if current.is_meta else current
        state_dict.setdefault(f"{prefix}num_batches_tracked", default)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._hold_statistics()  # load_state_dict(assign=True) replaces the buffers


def _vmaps(x: Tensor) -> set[int]:
    """The levels of torch.func.vmap that map over ``x``."""
    functorch, levels = torch._C._functorch, set()
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            levels.add(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return levels

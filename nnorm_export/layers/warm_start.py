"""The running statistics of norms, estimated from a few batches: before fine-tuning, or for averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nnorm_export.errors import InputError
from nnorm_export.layers._base import NormalNorm
from nnorm_export.layers._running import RunningStatistics
from nnorm_export.models.modules import modes_kept

Tracking = RunningStatistics | _BatchNorm


def estimate_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    """Set the running statistics and λ of every norm in ``model`` to their averages over ``batches``.

    Norms are this package's layers and the batch norms of torch.nn. Averaged weights
    (:class:`torch.optim.swa_utils.AveragedModel`) need new statistics; torch's ``update_bn`` estimates them for
    torch.nn's norms only, and does not warn of others. The rest of the model is in eval mode meanwhile. Nothing is
    trained, and no noise is added. Norms with ``track_running_stats=False`` keep their statistics.

    Args:
        model: changed in place; its modes stay.
        batches: batches on the model's device: each is a tensor, a sequence whose first element is the input (a
            DataLoader over images and labels), or a dict of arguments.

    Raises:
        ValueError: ``batches`` is empty, or the model has no norm with running statistics.
    """
    if isinstance(batches, Tensor):
        raise InputError("estimate_statistics takes batches, got a tensor; write [tensor] for one batch")
    if not _tracking(model.modules()):
        raise ValueError(f"{type(model).__name__} has no layer with running statistics; it needs no estimate")
    estimate_over(model, model.modules(), batches, "batches is empty")


def estimate_over(model: nn.Module, layers: Iterable[nn.Module], batches: Iterable[Any], none: str) -> None:
    """:func:`estimate_statistics` for the norms among ``layers``; ``none`` is the error if there are no batches."""
    norms = _tracking(layers)
    count = 0
    with _averaging(model, norms), torch.no_grad():
        for batch in batches:
            _run(model, batch)
            count += 1
    if count == 0:
        raise ValueError(f"{none}; give a few, for example itertools.islice(loader, 20)")


def _tracking(layers: Iterable[nn.Module]) -> list[Tracking]:
    return [layer for layer in layers if isinstance(layer, (RunningStatistics, _BatchNorm)) and _moves(layer)]


def _moves(layer: Tracking) -> bool:
    return layer.track_running_stats and layer.num_batches_tracked is not None


@contextmanager
def _averaging(model: nn.Module, norms: Sequence[Tracking]) -> Iterator[None]:
    """Only ``norms`` are in training mode, without noise, and their statistics become averages over all batches."""
    settings = [
        {name: getattr(norm, name) for name in ("momentum", "noise_train") if hasattr(norm, name)} for norm in norms
    ]
    counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    before = [count.clone() for count in counts]
    with modes_kept(model):
        try:
            model.eval()
            for norm in norms:
                norm.train()
                norm.momentum = None
                if isinstance(norm, NormalNorm):
                    norm.noise_train = 0.0
            for count in counts:
                count.zero_()
            yield
        finally:
            for norm, kept in zip(norms, settings, strict=True):
                for name, value in kept.items():
                    setattr(norm, name, value)
            for count, value in zip(counts, before, strict=True):
                count.copy_(value)


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, Sequence):  # (images, labels)
        model(batch[0])
    else:
        model(batch)

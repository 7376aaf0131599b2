"""The statistics and λ of new batch norms, estimated from a few batches before a pretrained network is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nnorm_export.layers._base import NormalNorm
from nnorm_export.layers._running import RunningStatistics


def estimate_statistics(model: nn.Module, layers: Iterable[nn.Module], batches: Iterable[Any]) -> None:
    """Set the running statistics of the batch norms among ``layers`` to their averages over ``batches``.

    The rest of the model is in eval mode meanwhile; nothing is trained, and no noise is added.

    Raises:
        ValueError: there is no batch.
    """
    norms = [layer for layer in layers if isinstance(layer, RunningStatistics) and isinstance(layer, NormalNorm)]
    modes = {module: module.training for module in model.modules()}
    settings = {norm: (norm.momentum, norm.noise_train, norm.num_batches_tracked.clone()) for norm in norms}
    count = 0
    try:
        model.eval()
        for norm in norms:
            norm.train()
            norm.momentum, norm.noise_train = None, 0.0  # the average over all batches
            norm.num_batches_tracked.zero_()
        with torch.no_grad():
            for batch in batches:
                _run(model, batch)
                count += 1
    finally:
        for norm, (momentum, noise_train, tracked) in settings.items():
            norm.momentum, norm.noise_train = momentum, noise_train
            norm.num_batches_tracked.copy_(tracked)
        for module, training in modes.items():
            module.training = training
    if count == 0:
        raise ValueError("warm_start has no batch; give a few, for example itertools.islice(loader, 20)")


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, Sequence):  # (images, labels)
        model(batch[0])
    else:
        model(batch)

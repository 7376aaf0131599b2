"""Row of the table of layers: layers whose method ``frozen()`` returns their eval-mode form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nnorm_export.freezing.table import Row, refuse, register
from nnorm_export.layers.related._standard import Freezable


def freeze_standard(layer: nn.Module, path: str) -> nn.Module:
    """``layer.frozen()``, after a check of the layer's state."""
    assert isinstance(layer, Freezable)
    for name, value in layer.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            remedy = "the training has diverged or the checkpoint is damaged; load an earlier checkpoint"
            raise refuse(path, layer, f"{name} is not finite in {count} of {value.numel()} entries", remedy)
        if name == "running_var" and bool((value < 0).any()):
            raise refuse(path, layer, "running_var is negative", _DAMAGED)
        if name == "running_covariance" and value.numel():
            eigenvalues = torch.linalg.eigvalsh(value.detach().double())
            if bool((eigenvalues[..., 0] < -1e-3 * eigenvalues[..., -1].abs()).any()):
                raise refuse(path, layer, "running_covariance has a negative eigenvalue", _DAMAGED)
    return layer.frozen()


_DAMAGED = "the checkpoint is damaged; load an earlier one"


def _sample_size(layer: nn.Module, shape: Sequence[int]) -> int | None:
    assert isinstance(layer, Freezable)
    return layer.sample_size(shape)


register(Row((), (), freeze_standard, base=Freezable, sample_size=_sample_size))

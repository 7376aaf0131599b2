"""Rows of the table of layers: those that are standard operators at inference, and say themselves which."""

from __future__ import annotations

import torch
from torch import nn

from nnorm_export.freezing.table import Row, refuse, register

# name -> an attribute besides `frozen`, so that a class of the same name but another meaning is not mistaken for it
STANDARD = {
    "FilterResponseNorm": "tau",
    "EvoNormS0": "v",
    "BMLV": "running_mean",
    "LMBV": "running_var",
    "RegNorm": "regularizer",
    "PreLayerNorm": "linear",
    "PreRegNorm": "regularizer",
    "ProxyNorm": "proxy_moments",
    "SwitchableNorm": "mean_logits",
    "DecorrelatedBatchNorm1d": "num_groups",
    "DecorrelatedBatchNorm2d": "num_groups",
}


def freeze_standard(layer: nn.Module, path: str) -> nn.Module:
    """``layer.frozen()``, its state checked."""
    for name, value in layer.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            remedy = "the training has diverged or the checkpoint is damaged; load a checkpoint from before"
            raise refuse(path, layer, f"{name} is not finite in {count} of {value.numel()} entries", remedy)
        if name == "running_var" and bool((value < 0).any()):
            raise refuse(path, layer, "running_var is negative", "a variance cannot be; load another checkpoint")
        if name == "running_covariance" and value.numel():
            eigenvalues = torch.linalg.eigvalsh(value.detach().double())
            if bool((eigenvalues[..., 0] < -1e-3 * eigenvalues[..., -1].abs()).any()):
                raise refuse(path, layer, "running_covariance has a negative eigenvalue", "load another checkpoint")
    frozen: nn.Module = layer.frozen()  # type: ignore[operator]
    return frozen


for _name, _attribute in STANDARD.items():
    register(Row((_name,), ("frozen", _attribute), freeze_standard))

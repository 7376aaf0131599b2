"""Copies of models: PyTorch's deepcopy refuses what the older torch.nn.utils leave on a layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

WEIGHT_HOOKS = (WeightNorm, SpectralNorm)  # those of torch.nn.utils; a parametrization is no hook


def deepcopy(model: nn.Module, memo: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy, in which ``memo`` (id of an object -> its copy) is what it is asked for first.

    A weight that a hook of torch.nn.utils.weight_norm or spectral_norm has computed is copied without its gradient.
    """
    known = dict(memo or {})
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WEIGHT_HOOKS):
                weight = getattr(module, hook.name)
                known[id(weight)] = weight.detach().clone()
    duplicate: nn.Module = copy.deepcopy(model, known)
    return duplicate

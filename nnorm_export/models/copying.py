"""Copies of models, those with hooks of torch.nn.utils included: copy.deepcopy refuses the weights of these hooks."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

WEIGHT_HOOKS = (WeightNorm, SpectralNorm)  # of torch.nn.utils; a parametrization is not a hook


def deepcopy(model: nn.Module, memo: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy of ``model``.

    A weight that a hook of torch.nn.utils.weight_norm or spectral_norm has computed is copied without its gradient.

    Args:
        memo: id of an object -> the object to use instead of a copy of it.
    """
    known = dict(memo or {})
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WEIGHT_HOOKS):
                weight = getattr(module, hook.name)
                known[id(weight)] = weight.detach().clone()
    duplicate: nn.Module = copy.deepcopy(model, known)
    return duplicate

"""Modules of the user's model: how they are copied, and what keeps PyTorch from running their norms as others.

copy.deepcopy refuses the weights of the hooks of torch.nn.utils. In eval mode PyTorch's fused attention path runs one
kernel instead of a layer's code. It cannot be exported, and that of nn.TransformerEncoderLayer reads only eps, weight
and bias of its norms, so that another normalization in their place would run as a plain LayerNorm without a warning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from nnorm_export.process import LOCK

_blocks: list[bool] = []  # the blocks of without_fused_attention; the first entry is the setting before them

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


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Switches the fused path off for the process; the last of overlapping blocks restores what the first found."""
    with LOCK:
        if not _blocks:
            _blocks.append(torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        else:
            _blocks.append(False)
    try:
        yield
    finally:
        with LOCK:
            found = _blocks.pop()
            if not _blocks:
                torch.backends.mha.set_fastpath_enabled(found)


def keep_norms_from_fusion(model: nn.Module, norm: type[nn.Module]) -> None:
    """Excludes every transformer encoder in ``model`` that holds a ``norm`` from the fused path."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.norm1, norm) or isinstance(module.norm2, norm):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(isinstance(child, norm) for child in module.modules()):
            module.use_nested_tensor = False

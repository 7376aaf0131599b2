"""PyTorch's fused attention path, which in eval mode runs one kernel instead of a layer's code.

It cannot be exported. That of nn.TransformerEncoderLayer reads only eps, weight and bias of its norms, so that another
normalization in their place would run as a plain LayerNorm without a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Switches the fused path off for the process, and restores it afterwards."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def keep_norms_from_fusion(model: nn.Module, norm: type[nn.Module]) -> None:
    """Excludes every transformer encoder in ``model`` that holds a ``norm`` from the fused path."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.norm1, norm) or isinstance(module.norm2, norm):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(isinstance(child, norm) for child in module.modules()):
            module.use_nested_tensor = False

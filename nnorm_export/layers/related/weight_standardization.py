"""Weight standardization, as a parametrization of torch.nn's own layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nnorm_export.layers.related._standard import Kind


class WeightStandardization(nn.Module):
    r"""Ŵ = (W − mean W)/√(var W + ε) for each output channel, over its inputs and kernel.

    Qiao et al., *Micro-Batch Training with Batch-Channel Normalization and Weight Standardization* (2019). At
    inference Ŵ is a constant, which :func:`nnorm_export.freeze` folds into the layer, like any parametrization of
    ``torch.nn.utils.parametrize``, weight norm for example.

        parametrize.register_parametrization(conv, "weight", WeightStandardization())

    Args:
        eps: ε.
    """

    replaces: tuple[Kind, ...] = ("linear",)

    def __init__(self, eps: float = 1e-10) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        """Ŵ for W of shape [out, in, \\*kernel]."""
        variance, mean = torch.var_mean(weight, list(range(1, weight.dim())), correction=0, keepdim=True)
        return (weight - mean) / torch.sqrt(variance + self.eps)

    @classmethod
    def counterpart(cls, replaced: Sequence[nn.Module], eps: float = 1e-10) -> nn.Module:
        """Return the layer itself, with this parametrization added to its weight unless it is there already."""
        (layer,) = replaced
        present = getattr(getattr(layer, "parametrizations", None), "weight", ())
        if any(isinstance(parametrization, cls) for parametrization in present):
            return layer
        return parametrize.register_parametrization(layer, "weight", cls(eps))

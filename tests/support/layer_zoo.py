"""One small example of each training-time layer, for tests that every layer must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nnorm_export import layers

# name -> (the layer made from its options, the shape of an input); odd lengths throughout
EXAMPLES: dict[str, tuple[Callable[..., layers.NormalNorm], tuple[int, ...]]] = {
    "batch1d": (lambda **options: layers.BatchNormalNorm1d(3, **options), (7, 3)),
    "batch1d_sequence": (lambda **options: layers.BatchNormalNorm1d(3, **options), (2, 3, 5)),
    "batch2d": (lambda **options: layers.BatchNormalNorm2d(3, **options), (2, 3, 3, 1)),
    "batch3d": (lambda **options: layers.BatchNormalNorm3d(2, **options), (1, 2, 3, 1, 3)),
    "layer": (lambda **options: layers.LayerNormalNorm(7, **options), (2, 3, 7)),
    "layer_2d_shape": (lambda **options: layers.LayerNormalNorm([3, 5], **options), (2, 3, 5)),
    "group": (lambda **options: layers.GroupNormalNorm(6, 2, **options), (2, 6, 3, 1)),
    "group_flat": (lambda **options: layers.GroupNormalNorm(6, 2, **options), (3, 6)),
    "instance1d": (lambda **options: layers.InstanceNormalNorm1d(3, **options), (2, 3, 5)),
    "instance2d": (lambda **options: layers.InstanceNormalNorm2d(2, **options), (2, 2, 3, 3)),
    "instance3d": (lambda **options: layers.InstanceNormalNorm3d(2, **options), (1, 2, 3, 1, 3)),
}
BATCH = [name for name in EXAMPLES if name.startswith("batch")]
PER_SAMPLE = [name for name in EXAMPLES if not name.startswith("batch")]
# The state of a trained batch layer: exponents that vanish, are ordinary and are far out.
LMBDAS = (0.0, 1.3, 2.0)


def make(name: str, **options: Any) -> tuple[layers.NormalNorm, Tensor]:
    """The layer with random parameters and, where it has any, random running statistics, and a skewed input."""
    build, shape = EXAMPLES[name]
    layer = build(**options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
        if isinstance(getattr(layer, "running_lmbda", None), Tensor):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            layer.running_lmbda.copy_(torch.tensor(LMBDAS[: layer.running_lmbda.numel()]))
    dtype = options.get("dtype") or torch.float32
    return layer, (torch.randn(shape, dtype=dtype) + 0.3 * torch.randn(shape, dtype=dtype) ** 2)

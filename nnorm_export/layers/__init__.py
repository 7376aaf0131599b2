"""The training-time layers: normality-normalizing counterparts of torch.nn's normalizations."""

from __future__ import annotations

from nnorm_export.layers._base import Form, NormalNorm
from nnorm_export.layers.batch import BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d
from nnorm_export.layers.convert import convert_normal_norm
from nnorm_export.layers.group import GroupNormalNorm, InstanceNormalNorm1d, InstanceNormalNorm2d, InstanceNormalNorm3d
from nnorm_export.layers.layer import LayerNormalNorm

__all__ = [
    "BatchNormalNorm1d",
    "BatchNormalNorm2d",
    "BatchNormalNorm3d",
    "Form",
    "GroupNormalNorm",
    "InstanceNormalNorm1d",
    "InstanceNormalNorm2d",
    "InstanceNormalNorm3d",
    "LayerNormalNorm",
    "NormalNorm",
    "convert_normal_norm",
]

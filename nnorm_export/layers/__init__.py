"""The training-time layers: normality normalization, and the normalizations that its papers compare it with."""

from __future__ import annotations

from nnorm_export.pytorch_missing import check_pytorch, needed_by

with needed_by(__name__):
    check_pytorch()

from nnorm_export.layers._base import NormalNorm, Variant
from nnorm_export.layers.batch import BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d
from nnorm_export.layers.convert import convert_normal_norm
from nnorm_export.layers.diagnose import Diagnosis, LayerDiagnosis, diagnose
from nnorm_export.layers.group import GroupNormalNorm, InstanceNormalNorm1d, InstanceNormalNorm2d, InstanceNormalNorm3d
from nnorm_export.layers.layer import LayerNormalNorm
from nnorm_export.layers.lmbda_recorder import LmbdaRecorder
from nnorm_export.layers.related.decorrelated import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNormalNorm1d,
    DecorrelatedBatchNormalNorm2d,
)
from nnorm_export.layers.related.evo import EvoNormS0
from nnorm_export.layers.related.filter_response import FilterResponseNorm
from nnorm_export.layers.related.mixed import BMLV, LMBV
from nnorm_export.layers.related.pre_layer import PreLayerNorm, PreRegNorm, RegNorm, regularization_loss
from nnorm_export.layers.related.proxy import ProxyNorm
from nnorm_export.layers.related.swap import convert_norm
from nnorm_export.layers.related.switchable import SwitchableNorm
from nnorm_export.layers.related.weight_standardization import WeightStandardization
from nnorm_export.layers.warm_start import estimate_statistics

__all__ = [
    "BMLV",
    "LMBV",
    "BatchNormalNorm1d",
    "BatchNormalNorm2d",
    "BatchNormalNorm3d",
    "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d",
    "DecorrelatedBatchNormalNorm1d",
    "DecorrelatedBatchNormalNorm2d",
    "Diagnosis",
    "EvoNormS0",
    "FilterResponseNorm",
    "GroupNormalNorm",
    "InstanceNormalNorm1d",
    "InstanceNormalNorm2d",
    "InstanceNormalNorm3d",
    "LayerDiagnosis",
    "LayerNormalNorm",
    "LmbdaRecorder",
    "NormalNorm",
    "PreLayerNorm",
    "PreRegNorm",
    "ProxyNorm",
    "RegNorm",
    "SwitchableNorm",
    "Variant",
    "WeightStandardization",
    "convert_norm",
    "convert_normal_norm",
    "diagnose",
    "estimate_statistics",
    "regularization_loss",
]

"""The eval-mode operators of the ONNX domain ``nnorm``, by node name.

``NORMALIZATIONS`` are those that a traced model calls; ``OPERATORS`` are all that a file may hold.
"""

from nnorm_export.operators.batch_normal_norm import FrozenBatchNormalNorm
from nnorm_export.operators.batch_normal_norm_epilogues import BATCH_NORMAL_NORM_ADD_RELU, BATCH_NORMAL_NORM_RELU
from nnorm_export.operators.group_normal_norm import FrozenGroupNormalNorm
from nnorm_export.operators.layer_normal_norm import FrozenLayerNormalNorm
from nnorm_export.operators.spec import FrozenOperator, Operator, TracedOperator

NORMALIZATIONS: dict[str, TracedOperator] = {
    frozen.operator.op_type: frozen.operator
    for frozen in (FrozenBatchNormalNorm, FrozenLayerNormalNorm, FrozenGroupNormalNorm)
}

OPERATORS: dict[str, Operator] = {
    **NORMALIZATIONS,
    **{operator.op_type: operator for operator in (BATCH_NORMAL_NORM_RELU, BATCH_NORMAL_NORM_ADD_RELU)},
}

__all__ = [
    "NORMALIZATIONS",
    "OPERATORS",
    "FrozenBatchNormalNorm",
    "FrozenGroupNormalNorm",
    "FrozenLayerNormalNorm",
    "FrozenOperator",
    "Operator",
    "TracedOperator",
]

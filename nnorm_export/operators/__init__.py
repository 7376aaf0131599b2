"""The eval-mode operators of the ONNX domain ``nnorm``; ``OPERATORS`` lists them by node name."""

from nnorm_export.operators.batch_normal_norm import FrozenBatchNormalNorm
from nnorm_export.operators.group_normal_norm import FrozenGroupNormalNorm
from nnorm_export.operators.layer_normal_norm import FrozenLayerNormalNorm
from nnorm_export.operators.spec import FrozenOperator, Operator

OPERATORS: dict[str, Operator] = {
    frozen.operator.op_type: frozen.operator
    for frozen in (FrozenBatchNormalNorm, FrozenLayerNormalNorm, FrozenGroupNormalNorm)
}

__all__ = [
    "OPERATORS",
    "FrozenBatchNormalNorm",
    "FrozenGroupNormalNorm",
    "FrozenLayerNormalNorm",
    "FrozenOperator",
    "Operator",
]

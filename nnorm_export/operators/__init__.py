"""The operators of :mod:`nnorm_export.domain` in PyTorch; importing this registers them as ``torch.ops.nnorm``.

:data:`NORMALIZATIONS` has those that a traced model calls, by the name of their ONNX node. Operators with an epilogue
are not among them: a traced model has the norm and the operators after it apart.
"""

from nnorm_export.operators.batch_normal_norm import FrozenBatchNormalNorm
from nnorm_export.operators.group_normal_norm import FrozenGroupNormalNorm
from nnorm_export.operators.layer_normal_norm import FrozenLayerNormalNorm
from nnorm_export.operators.spec import FrozenOperator, TracedOperator

NORMALIZATIONS: dict[str, TracedOperator] = {
    frozen.operator.op_type: frozen.operator
    for frozen in (FrozenBatchNormalNorm, FrozenLayerNormalNorm, FrozenGroupNormalNorm)
}

__all__ = [
    "NORMALIZATIONS",
    "FrozenBatchNormalNorm",
    "FrozenGroupNormalNorm",
    "FrozenLayerNormalNorm",
    "FrozenOperator",
    "TracedOperator",
]

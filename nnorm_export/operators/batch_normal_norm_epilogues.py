"""BatchNormalNorm with what follows it folded in, its *epilogue*: Y = max(0, y) and Y = max(0, y + residual).

    BatchNormalNormRelu      Y = max(0, weight·ψ(scale·X + shift) + bias)
    BatchNormalNormAddRelu   Y = max(0, weight·ψ(scale·X + shift) + bias + residual)

y is BatchNormalNorm's, X and ``residual`` have one dtype and one shape. The arithmetic has the parameters' dtype and
rounds once, on output, where separate nodes round y to the dtype of X before they add. NaN stays NaN, as in PyTorch.

No torch op stands for them: a traced model has the norm, the sum and the ReLU apart, and
:func:`nnorm_export.exporting.epilogues.fuse_epilogues` finds them in the translated graph. They are operators of their
own because a body cannot branch on an attribute.
"""

from __future__ import annotations

from nnorm_export.operators.batch_normal_norm import NORMALIZE, FrozenBatchNormalNorm
from nnorm_export.operators.spec import Operator

_PARAMETERS = FrozenBatchNormalNorm.operator.parameters

BATCH_NORMAL_NORM_RELU = Operator(
    op_type="BatchNormalNormRelu",
    parameters=_PARAMETERS,
    body=f"""{NORMALIZE}
    rectified = Relu (y)
    Y = CastLike (rectified, X)
""",
)

BATCH_NORMAL_NORM_ADD_RELU = Operator(
    op_type="BatchNormalNormAddRelu",
    parameters=_PARAMETERS,
    operands=("residual",),
    body=f"""{NORMALIZE}
    wide_residual = CastLike (residual, scale)
    sum = Add (y, wide_residual)
    rectified = Relu (sum)
    Y = CastLike (rectified, X)
""",
)

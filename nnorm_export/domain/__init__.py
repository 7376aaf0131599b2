"""The ONNX domain ``nnorm``: what each operator is, declared once. Nothing here needs PyTorch.

:data:`OPERATORS` maps the name of a node to its :class:`Operator`; every other folder asks it for facts. A new epilogue
of BatchNormalNorm is one line of :data:`OPERATORS`, a new operator one file beside the others and one line.
"""

from __future__ import annotations

from nnorm_export.domain.batch_normal_norm import BATCH_NORMAL_NORM
from nnorm_export.domain.epilogues import ADD, RELU
from nnorm_export.domain.group_normal_norm import GROUP_NORMAL_NORM
from nnorm_export.domain.layer_normal_norm import LAYER_NORMAL_NORM
from nnorm_export.domain.operator import Operator, Step

OPERATORS: dict[str, Operator] = {
    operator.op_type: operator
    for operator in (
        BATCH_NORMAL_NORM,
        LAYER_NORMAL_NORM,
        GROUP_NORMAL_NORM,
        BATCH_NORMAL_NORM.followed_by(RELU),
        BATCH_NORMAL_NORM.followed_by(ADD, RELU),
    )
}

__all__ = ["OPERATORS", "Operator", "Step"]

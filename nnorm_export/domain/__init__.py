"""The ONNX domain ``nnorm``: what each operator is, declared once. Nothing here needs PyTorch.

:data:`OPERATORS` maps the name of a node to its :class:`Operator`; every other folder asks it for facts. A new epilogue
of BatchNormalNorm is one line of :data:`OPERATORS`, a new operator one file beside the others and one line.

:data:`QUANTIZED_OPERATORS` are those between quantized tensors. Exporters do not write them, and neither CUDA nor
TensorRT has kernels or plugins for them. :data:`ALL_OPERATORS` are what a file may have.

:data:`BLOCKED_TWINS` maps the name of each operator on ONNX Runtime's blocked layout to the operator whose twin it is.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from nnorm_export.domain.batch_normal_norm import BATCH_NORMAL_NORM
from nnorm_export.domain.epilogues import ADD, HARD_SWISH, RELU, SWISH
from nnorm_export.domain.group_normal_norm import GROUP_NORMAL_NORM
from nnorm_export.domain.layer_normal_norm import LAYER_NORMAL_NORM
from nnorm_export.domain.operator import Operator, Step
from nnorm_export.domain.quantized_batch_normal_norm import QUANTIZED_BATCH_NORMAL_NORM

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

QUANTIZED_OPERATORS: dict[str, Operator] = {
    operator.op_type: operator
    for operator in (
        QUANTIZED_BATCH_NORMAL_NORM,
        QUANTIZED_BATCH_NORMAL_NORM.followed_by(RELU),
        QUANTIZED_BATCH_NORMAL_NORM.followed_by(ADD, RELU),
        QUANTIZED_BATCH_NORMAL_NORM.followed_by(HARD_SWISH),
        QUANTIZED_BATCH_NORMAL_NORM.followed_by(SWISH),
    )
}

ALL_OPERATORS: Mapping[str, Operator] = ChainMap(OPERATORS, QUANTIZED_OPERATORS)

BLOCKED_TWINS: dict[str, Operator] = {
    operator.blocked_twin: operator for operator in ALL_OPERATORS.values() if operator.blocked_twin
}

__all__ = ["ALL_OPERATORS", "BLOCKED_TWINS", "OPERATORS", "QUANTIZED_OPERATORS", "Operator", "Step"]

"""QuantizedBatchNormalNorm: BatchNormalNorm between quantized tensors, as integer networks have it.

    Y = quantize(weight·ψ(scale·x + shift) + bias),      x = (X − x_zero_point)·x_scale
    quantize(y) = saturate(round(y / y_scale) + y_zero_point), to the nearest integer, ties to the even one

X, Y and the residual are uint8 or int8, each for itself; a zero point has the dtype of its tensor. Scales and zero
points are scalars. The body is DequantizeLinear, BatchNormalNorm's statements in float32, and QuantizeLinear.

Every element of Y depends on that element of X alone, so the kernel takes it from a table with 256 entries for each
channel. The table is exact: it is computed in float64 and rounded once. A body may differ from it by one step where y
is, up to the rounding of float32, halfway between two steps.

The channels are the axis 1 of X, or its last one (``axis = -1``), where ONNX Runtime's integer convolutions have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from nnorm_export.domain import batch_normal_norm
from nnorm_export.domain.batch_normal_norm import BATCH_NORMAL_NORM
from nnorm_export.domain.bodies import affine_along_the_last_axis, per_channel_affine
from nnorm_export.domain.operator import Array, Operator
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

CHANNELS_LAST = "channels_last"
_QUANTIZED_TYPES = ["tensor(uint8)", "tensor(int8)"]


def _quantization(tensor: str) -> tuple[str, str]:
    """The names of the scale and the zero point of X, Y or an operand."""
    return f"{tensor.lower()}_scale", f"{tensor.lower()}_zero_point"


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedOperator(Operator):
    """An operator whose X, Y and operands are quantized, uint8 or int8; its parameters are float32.

    Its inputs are X, the scale and the zero point of X and of Y, the parameters, and each operand with its scale and
    zero point. Y has the shape of X and the dtype of its zero point.
    """

    @property
    def inputs(self) -> tuple[str, ...]:
        operands = (name for operand in self.operands for name in (operand, *_quantization(operand)))
        return ("X", *_quantization("X"), *_quantization("Y"), *self.parameters, *operands)

    @property
    def scales(self) -> tuple[str, ...]:
        """The inputs that are scales: scalars, greater than 0."""
        return tuple(_quantization(tensor)[0] for tensor in ("X", "Y", *self.operands))

    @property
    def zero_points(self) -> tuple[str, ...]:
        """The inputs that are zero points: scalars of the dtype of their tensor."""
        return tuple(_quantization(tensor)[1] for tensor in ("X", "Y", *self.operands))

    @property
    def blocked_twin(self) -> str | None:
        """None: ONNX Runtime's integer convolutions have the channels last, and no blocks."""
        return None

    def widened(self, tensor: str) -> str:
        return f"DequantizeLinear ({', '.join((tensor, *_quantization(tensor)))})"

    def narrowed(self, y: str) -> str:
        return f"QuantizeLinear ({', '.join((y, *_quantization('Y')))})"

    def schema(self) -> onnx.defs.OpSchema:
        tensors = ("X", "Y", *self.operands)
        types = {name: f"T_{tensor.lower()}" for tensor in tensors for name in (tensor, _quantization(tensor)[1])}
        formal, attribute = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute
        return onnx.defs.OpSchema(
            self.op_type,
            DOMAIN,
            DOMAIN_VERSION,
            inputs=[formal(name, types.get(name, "tensor(float)")) for name in self.inputs],
            outputs=[formal("Y", types["Y"])],
            type_constraints=[(types[tensor], _QUANTIZED_TYPES, f"{tensor} and its zero point") for tensor in tensors],
            attributes=[attribute("axis", onnx.defs.OpSchema.AttrType.INT, required=False)],
        )


def _variant(values: Mapping[str, Array | None]) -> str:
    """The name of the body for a node with these parameters and attributes."""
    axis = values.get("axis")
    is_last = axis is not None and int(np.asarray(axis)) == -1
    return _name(is_last, batch_normal_norm.variant(values))


def _name(is_last: bool, of_parameters: str) -> str:
    return "_".join(filter(None, [CHANNELS_LAST if is_last else "", of_parameters]))


def _statements(is_last: bool, of_parameters: str, arithmetic: str) -> str:
    """The body for one axis; with another it fails, in Reshape: a tool may have taken the body of another node for it.

    (Only a Constant may refer to an attribute: onnx's reference evaluator passes it to no other operator.)
    """
    affine = affine_along_the_last_axis if is_last else per_channel_affine
    return f"""
    axis_given = Constant <value_int: int = @axis> ()
    axis_of_body = Constant <value_int = {-1 if is_last else 1}> ()
    is_axis = Equal (axis_given, axis_of_body)
    one_if_axis = Cast <to = {onnx.TensorProto.INT64}> (is_axis)
    channels = Shape (scale)
    channels_if_axis = Mul (channels, one_if_axis)
    scale_of_axis = Reshape <allowzero = 1> (scale, channels_if_axis)
{batch_normal_norm.statements(of_parameters, arithmetic, "scale_of_axis", affine)}"""


QUANTIZED_BATCH_NORMAL_NORM = QuantizedOperator(
    op_type="QuantizedBatchNormalNorm",
    parameters=BATCH_NORMAL_NORM.parameters,
    is_frozen=True,
    is_per_channel=True,
    attributes={"axis": ("int", 1)},
    variant=_variant,
    statements={
        _name(is_last, of_parameters): partial(_statements, is_last, of_parameters)
        for is_last in (False, True)
        for of_parameters in BATCH_NORMAL_NORM.statements
    },
)

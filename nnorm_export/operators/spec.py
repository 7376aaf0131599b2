"""What an operator is: its ONNX node, its body and its torch op. One instance stands beside each operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx
import onnx.defs
import onnxscript
import torch
from torch import Tensor

from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.operators.onnx_body import function_proto

OPSET = onnxscript.values.Opset(DOMAIN, DOMAIN_VERSION)

_FLOAT_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_ARITHMETIC_TYPES = ["tensor(float)", "tensor(double)"]
_ATTRIBUTE_TYPES = {"int": onnx.defs.OpSchema.AttrType.INT, "float": onnx.defs.OpSchema.AttrType.FLOAT}


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator of the ONNX domain ``nnorm``, version 1.

    Attributes:
        op_type: name of the ONNX node.
        parameters: inputs after X, float32 (float64 in a float64 model).
        body: ONNX statements that compute Y (see :mod:`nnorm_export.operators.onnx_body`).
        operands: inputs after the parameters, of the dtype and shape of X; nothing broadcasts.
        attributes: name -> (``int`` or ``float``, default). The default is what a missing attribute means in every
            implementation: body, kernel and plugin.
    """

    op_type: str
    parameters: tuple[str, ...]
    body: str
    operands: tuple[str, ...] = ()
    attributes: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("X", *self.parameters, *self.operands)

    def function(self, opset: int, arithmetic: str = "float") -> onnx.FunctionProto:
        """The body as a model-local function for a model at ``opset``; ``arithmetic`` is ``float`` or ``double``."""
        declarations = [f"{name}: {kind} = {default!r}" for name, (kind, default) in self.attributes.items()]
        return function_proto(self.op_type, self.inputs, declarations, self.body, opset, arithmetic)

    def schema(self) -> onnx.defs.OpSchema:
        """The ONNX schema, which torch's exporter needs registered while it translates."""
        parameter = onnx.defs.OpSchema.FormalParameter
        attribute = onnx.defs.OpSchema.Attribute
        return onnx.defs.OpSchema(
            self.op_type,
            DOMAIN,
            DOMAIN_VERSION,
            inputs=[parameter(name, "U" if name in self.parameters else "T") for name in self.inputs],
            outputs=[parameter("Y", "T")],
            type_constraints=[("T", _FLOAT_TYPES, "values"), ("U", _ARITHMETIC_TYPES, "parameters")],
            attributes=[
                attribute(name, _ATTRIBUTE_TYPES[kind], required=False) for name, (kind, _) in self.attributes.items()
            ],
        )


@dataclass(frozen=True, kw_only=True)
class TracedOperator(Operator):
    """An operator that a traced model calls.

    Attributes:
        torch_op: the ``torch.library`` op that stands for it there.
        aten_function: what ``torch_op`` computes, in ATen's operators alone; TorchScript compiles it.
        inductor_function: the same for Inductor (:mod:`nnorm_export.operators.inductor`).
        translate: writes the node for a call of ``torch_op``, as torch's ``custom_translation_table`` wants it.
    """

    torch_op: torch._ops.OpOverload
    aten_function: Callable[..., Tensor]
    inductor_function: Callable[..., Tensor]
    translate: Callable[..., Any]


class FrozenOperator(FrozenModule):
    """A normalization frozen for inference: buffers that hold the operator's parameters, and a call of its torch op.

    The parameters stay float32 (or float64) when the model around them is cast to float16 or bfloat16. In a file
    of TorchScript, scripted or traced, the operator's function takes the place of the torch op.

    Attributes:
        record: what the frozen layer was, for metadata and ``inspect``: ``path``, ``layer``, ``form`` and so on.
        expected: the shape of an input, in words.
    """

    if TYPE_CHECKING:  # TorchScript would take the annotations of a class for types of its own
        operator: TracedOperator
        record: dict[str, Any]
        expected: str
        weight: Tensor
        bias: Tensor

    def __init__(self, parameters: dict[str, Tensor], record: dict[str, Any], expected: str) -> None:
        super().__init__(parameters)
        self.record = record
        self.name = f"layer {record['path'] or '(the model itself)'} ({record['layer']})"
        self.expected = expected

    def _require_input(self, fits: bool, x: Tensor) -> None:
        if not fits:
            raise ValueError(f"{self.name}: expected an input of shape {self.expected}, got {list(x.shape)}")

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.record.items())

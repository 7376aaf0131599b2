"""The declaration of an operator: its node, its body, and the facts that the rest of the package asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
import onnx.defs
from numpy.typing import NDArray

from nnorm_export.domain.bodies import function_proto
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

Array = NDArray[Any]

_FLOAT_TYPES = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_ARITHMETIC_TYPES = ["tensor(float)", "tensor(double)"]
_ATTRIBUTE_TYPES = {"int": onnx.defs.OpSchema.AttrType.INT, "float": onnx.defs.OpSchema.AttrType.FLOAT}


@dataclass(frozen=True)
class Step:
    """A step of an epilogue: an elementwise ONNX operator that is applied to y.

    Attributes:
        op_type: the ONNX operator's name, which also names it in the operator with the epilogue.
        compute: the same in NumPy, called with y and, if there is one, the operand.
        operand: the name of its second input, which has the dtype and shape of X; None if y is its only input.
        gate: the ONNX operator g, with attributes, by which the body computes the step as y·g(y); "" if the body has
            the operator ``op_type`` itself.
    """

    op_type: str
    compute: Callable[..., Array]
    operand: str | None = None
    gate: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """An operator of the ONNX domain ``nnorm``, version 1.

    Its inputs are X, :attr:`parameters` and :attr:`operands`; its output Y has the dtype and shape of X.

    Attributes:
        op_type: the name of the ONNX node.
        parameters: the inputs after X, float32 (float64 in a float64 model).
        statements: name of a body -> arithmetic (``float`` or ``double``) -> ONNX statements that compute y from the
            parameters and x, which is X in their dtype; y is not yet rounded to the dtype of Y
            (:mod:`nnorm_export.domain.bodies`). The body without a name is right for any parameters, if the runtime's
            functions have small relative errors.
        variant: parameters and given attributes -> the name of the body for such a node; None stands for a parameter
            that is not a constant.
        is_frozen: whether statistics and λ are frozen into the parameters, so that an element of y depends on that
            element of X alone; else they are computed from X.
        is_per_channel: whether each parameter has one number for each channel, axis 1 of X; else it has the shape of
            the trailing axes of X that are normalized.
        attributes: name -> (``int`` or ``float``, default). The default is the meaning of a missing attribute in every
            implementation: body, kernel and plugin.
        epilogue: the steps that are applied to y before it is rounded.
        norm: the name of the operator without its epilogue.
    """

    op_type: str
    parameters: tuple[str, ...]
    statements: Mapping[str, Callable[[str], str]]
    is_frozen: bool
    is_per_channel: bool
    variant: Callable[[Mapping[str, Array | None]], str] = lambda _: ""
    attributes: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    epilogue: tuple[Step, ...] = ()
    norm: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", self.norm or self.op_type)

    def followed_by(self, *steps: Step) -> Operator:
        """The operator with ``steps`` as its epilogue. It has its own name: a body cannot branch on an attribute."""
        return replace(self, op_type=self.op_type + "".join(step.op_type for step in steps), epilogue=steps)

    @property
    def operands(self) -> tuple[str, ...]:
        """The inputs after the parameters, of the dtype and shape of X; they are not broadcast."""
        return tuple(step.operand for step in self.epilogue if step.operand is not None)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("X", *self.parameters, *self.operands)

    @property
    def blocked_twin(self) -> str | None:
        """The name of the same operator on ONNX Runtime's blocked layout; None if the domain lacks it.

        Where every element is computed from itself alone, the order of the elements in memory does not matter.
        """
        return f"Nchwc{self.op_type}" if self.is_frozen else None

    @property
    def is_faster_as_plugin(self) -> bool:
        """Whether the plugin is what TensorRT runs by default, not the body; not measured, and not so in TensorRT-RTX.

        A plugin reads each row once. A body that computes statistics from X reads it once for each reduction, unless
        the compiler fuses the body into one kernel. :mod:`nnorm_export.tensorrt.plugins` says what is known.
        """
        return not self.is_frozen

    def apply_epilogue(self, y: Array, *operands: Array) -> Array:
        """The epilogue of ``y`` in NumPy, with :attr:`operands` in order."""
        rest = iter(operands)
        for step in self.epilogue:
            y = step.compute(y) if step.operand is None else step.compute(y, next(rest))
        return y

    def body(self, arithmetic: str, variant: str = "") -> str:
        """ONNX statements that compute Y from the inputs."""
        lines, y = [f"    x = {self.widened('X')}", self.statements[variant](arithmetic)], "y"
        for step in self.epilogue:
            inputs = [y]
            if step.operand is not None:
                lines.append(f"    wide_{step.operand} = {self.widened(step.operand)}")
                inputs.append(f"wide_{step.operand}")
            result, op_type = f"{y}_{step.op_type}", step.op_type
            if step.gate:
                lines.append(f"    {result}_gate = {step.gate} ({y})")
                inputs.append(f"{result}_gate")
                op_type = "Mul"
            lines.append(f"    {result} = {op_type} ({', '.join(inputs)})")
            y = result
        return "\n".join([*lines, f"    Y = {self.narrowed(y)}"])

    def widened(self, tensor: str) -> str:
        """The ONNX expression for X or an operand in the dtype of the parameters."""
        return f"CastLike ({tensor}, {self.parameters[0]})"

    def narrowed(self, y: str) -> str:
        """The ONNX expression for ``y`` in the dtype of Y."""
        return f"CastLike ({y}, X)"

    def function(
        self, opset: int, arithmetic: str = "float", variant: str = "", overload: str = ""
    ) -> onnx.FunctionProto:
        """A body as a model-local function.

        Args:
            opset: that of the model.
            arithmetic: ``float`` or ``double``.
            variant: the name of the body.
            overload: the name by which nodes call it. A model has one function for each operator and overload.
        """
        declarations = [f"{name}: {kind} = {default!r}" for name, (kind, default) in self.attributes.items()]
        body = self.body(arithmetic, variant)
        function = function_proto(self.op_type, self.inputs, declarations, body, opset, arithmetic)
        function.overload = overload
        return function

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

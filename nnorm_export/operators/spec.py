"""An operator in PyTorch: its torch op, its functions, and the module that holds its frozen parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import onnxscript
import torch
from torch import Tensor

from nnorm_export.domain import Operator
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, layer_name
from nnorm_export.operators.aten import EXPONENT_NEAR_ZERO

_OPSET = onnxscript.values.Opset(DOMAIN, DOMAIN_VERSION)


@dataclass(frozen=True, kw_only=True)
class TracedOperator:
    """An operator of :mod:`nnorm_export.domain` in PyTorch, as a traced model calls it.

    Attributes:
        declaration: the operator in ONNX.
        torch_op: the ``torch.library`` op that a traced model calls.
        aten_function: what ``torch_op`` computes, in ATen's operators alone; TorchScript compiles it.
        near_zero_function: the same for files in which an exponent is near 0 (:mod:`nnorm_export.operators.aten`); it
            is ``aten_function`` where that is right in any runtime.
        inductor_function: the same for Inductor (:mod:`nnorm_export.operators.inductor`).
        frozen_exponents: the parameters that are exponents.
    """

    declaration: Operator
    torch_op: torch._ops.OpOverload
    aten_function: Callable[..., Tensor]
    near_zero_function: Callable[..., Tensor]
    inductor_function: Callable[..., Tensor]
    frozen_exponents: tuple[str, ...]

    @classmethod
    def register(
        cls,
        declaration: Operator,
        aten_function: Callable[..., Tensor],
        inductor_function: Callable[..., Tensor],
        differentiable_function: Callable[..., Tensor],
        *,
        near_zero_function: Callable[..., Tensor] | None = None,
        frozen_exponents: tuple[str, ...] = (),
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> TracedOperator:
        """Register the torch op ``nnorm::`` with the name and the signature of ``aten_function``.

        Args:
            declaration: the operator in ONNX.
            aten_function: takes the inputs of the declaration, then the attributes by their names.
            inductor_function: the same for Inductor.
            differentiable_function: the same by the formulas of :mod:`nnorm_export.mathematics`, for gradients.
            near_zero_function: the same for exponents near 0 in other runtimes; by default ``aten_function``.
            frozen_exponents: the parameters that are exponents.
            memory_format: of the output.
        """
        op = torch.library.custom_op(f"{DOMAIN}::{aten_function.__name__}", aten_function, mutates_args=())
        op.register_fake(lambda x, *rest: torch.empty_like(x, memory_format=memory_format))
        op.register_autograd(partial(_backward, differentiable_function), setup_context=_save_arguments)
        return cls(
            declaration=declaration,
            torch_op=op._opoverload,
            aten_function=aten_function,
            near_zero_function=near_zero_function or aten_function,
            inductor_function=inductor_function,
            frozen_exponents=frozen_exponents,
        )

    @property
    def op_type(self) -> str:
        """The name of the ONNX node."""
        return self.declaration.op_type

    @property
    def translate(self) -> Callable[..., Any]:
        """Writes the node for a call of :attr:`torch_op`, as torch's ``custom_translation_table`` needs it."""
        names = [argument.name for argument in self.torch_op._schema.arguments]
        count = len(self.declaration.inputs)

        def translate(*arguments: Any) -> Any:
            inputs, attributes = arguments[:count], dict(zip(names[count:], arguments[count:], strict=True))
            if not self.declaration.is_per_channel:  # the parameters have the shape of the normalized axes
                attributes["axis"] = -len(inputs[1].shape)
            return getattr(_OPSET, self.op_type)(*inputs, **attributes)

        return translate

    def has_exponent_near_zero(self, parameters: Mapping[str, Tensor | None]) -> bool:
        """Whether a call with ``parameters`` needs :attr:`near_zero_function` in a file that other runtimes may read.

        A parameter whose values are not known is None.
        """
        exponents = [parameters[name] for name in self.frozen_exponents]
        return any(values is None or bool((values.abs() <= EXPONENT_NEAR_ZERO).any()) for values in exponents)


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.attributes = [value for value in inputs if not isinstance(value, Tensor)]  # they follow the tensors


def _backward(function: Callable[..., Tensor], ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``function``, which computes the operator once more; create_graph=True gives theirs too."""
    needed = ctx.needs_input_grad[: len(ctx.saved_tensors)]
    has_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one of the tensors may be computed from another: its gradient would include the other's.
        tensors = [value.view_as(value) for value in ctx.saved_tensors]
        wanted = [value for value, is_needed in zip(tensors, needed, strict=True) if is_needed]
        y = function(*tensors, *ctx.attributes)
    found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=has_graph))
    return (*(next(found) if is_needed else None for is_needed in needed), *(None for _ in ctx.attributes))


class FrozenOperator(FrozenModule):
    """A normalization frozen for inference: buffers that hold the operator's parameters, and a call of its torch op.

    The parameters stay float32 (or float64) when the model around them is cast to float16 or bfloat16. In a file
    of TorchScript, scripted or traced, the operator's function replaces the torch op.

    Attributes:
        operator: the operator.
        function, near_zero_function: those of the operator, as static methods, which TorchScript compiles.
        has_exponent_near_zero: which of them TorchScript takes.
        record: what the frozen layer was, for metadata and ``inspect``: ``path``, ``layer``, ``variant`` and so on.
        expected: the shape of an input, in words.
    """

    if TYPE_CHECKING:  # TorchScript would read the annotations of a class as types of its own
        operator: TracedOperator
        function: Callable[..., Tensor]
        near_zero_function: Callable[..., Tensor]
        record: dict[str, Any]
        expected: str
        weight: Tensor
        bias: Tensor

    __constants__ = ("has_exponent_near_zero",)

    def __init_subclass__(cls) -> None:
        cls.function = staticmethod(cls.operator.aten_function)
        cls.near_zero_function = staticmethod(cls.operator.near_zero_function)

    def __init__(self, parameters: Mapping[str, Tensor | None], record: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.record = record
        self.name = f"layer {layer_name(record['path'])} ({record['layer']})"
        self.is_per_channel = self.operator.declaration.is_per_channel
        self.has_exponent_near_zero = self.operator.has_exponent_near_zero(parameters)
        lengths = ", ".join(str(length) for length in self.weight.shape)
        self.expected = f"[N, {lengths}, *spatial]" if self.is_per_channel else f"[*, {lengths}]"

    @abstractmethod
    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of the operator after x."""

    def _takes(self, x: Tensor) -> bool:
        """Whether the operator takes an input of the shape of ``x``."""
        if self.is_per_channel:
            return x.dim() >= 2 and x.shape[1] == self.weight.shape[0]
        leading = x.dim() - self.weight.dim()
        return leading >= 0 and x.shape[leading:] == self.weight.shape

    def _require_input(self, x: Tensor) -> None:
        if not self._takes(x):
            raise ValueError(f"{self.name}: expected an input of shape {self.expected}, got {list(x.shape)}")

    def _compute(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            if self.has_exponent_near_zero:
                y = self.near_zero_function(x, *self._arguments())
            else:
                y = self.function(x, *self._arguments())
        else:
            y = self.operator.torch_op(x, *self._arguments())
        return y

    def forward(self, x: Tensor) -> Tensor:
        self._require_input(x)
        return self._compute(x)

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.record.items())

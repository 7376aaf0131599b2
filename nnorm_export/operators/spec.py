"""An operator in PyTorch: its torch op, its functions, and the module that holds its frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnxscript
import torch
from torch import Tensor

from nnorm_export.domain import Operator
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

OPSET = onnxscript.values.Opset(DOMAIN, DOMAIN_VERSION)


@dataclass(frozen=True, kw_only=True)
class TracedOperator:
    """An operator of :mod:`nnorm_export.domain` in PyTorch, as a traced model calls it.

    Attributes:
        declaration: the operator in ONNX.
        torch_op: the ``torch.library`` op that a traced model calls.
        aten_function: what ``torch_op`` computes, in ATen's operators alone; TorchScript compiles it.
        inductor_function: the same for Inductor (:mod:`nnorm_export.operators.inductor`).
        translate: writes the node for a call of ``torch_op``, as torch's ``custom_translation_table`` wants it.
    """

    declaration: Operator
    torch_op: torch._ops.OpOverload
    aten_function: Callable[..., Tensor]
    inductor_function: Callable[..., Tensor]
    translate: Callable[..., Any]

    @property
    def op_type(self) -> str:
        """The name of the ONNX node."""
        return self.declaration.op_type


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

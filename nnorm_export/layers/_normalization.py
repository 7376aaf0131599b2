"""The base of every layer of the package: arithmetic, affine and the check of inputs."""

from __future__ import annotations

import contextlib
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_module_registration_hook

from nnorm_export.mathematics import expand_trailing


class Normalization(nn.Module, ABC):
    """The base of all layers. Subclasses define :meth:`_normalize` and :meth:`_check_input`.

    Inputs in float16 or bfloat16 are computed in float32, also under autocast; the output has the input's dtype.

    Args:
        eps: ε ≥ 0, added to a variance.

    Raises:
        ValueError: ``eps`` is negative or is not a number, or a flag is neither True nor False.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, eps: float) -> None:
        super().__init__()
        require_number("eps", eps)
        if eps < 0:
            raise ValueError(f"eps must not be negative, got {eps}; torch's default is 1e-5")
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it as a keyword
        """Normalize ``input``; shape and dtype of the output are those of the input."""
        if isinstance(input, fx.Proxy):
            return call_in_graph(self, input)
        if input.is_nested:
            return self._forward_nested(input)
        if not input.is_floating_point():  # torch.nn's norms refuse integers in the same way
            raise NotImplementedError(f"{type(self).__name__} is not implemented for {input.dtype}; pass x.float()")
        self._check_input(input)
        return self._compute(input)

    def _compute(self, x: Tensor) -> Tensor:
        with without_autocast(x.device):
            return self._normalize(x if x.dtype == torch.float64 else x.float()).to(x.dtype)

    def _forward_nested(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not take nested tensors; pass x.to_padded_tensor(0.0)")

    @abstractmethod
    def _check_input(self, x: Tensor) -> None:
        """Raise the errors of torch's own norms if the layer does not accept ``x``."""

    @abstractmethod
    def _normalize(self, x: Tensor) -> Tensor:
        """Compute the layer in the dtype of ``x`` (float32 or float64)."""

    def _init_affine(
        self,
        shape: Sequence[int],
        affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        bias: bool = True,
    ) -> None:
        require_flag("affine", affine)
        require_flag("bias", bias)
        # The bias is first, as in the authors' layers, because optimizer states index parameters by registration order.
        for name, is_there in (("bias", affine and bias), ("weight", affine)):
            parameter = nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype)) if is_there else None
            self.register_parameter(name, parameter)
        self._reset_affine()

    def reset_parameters(self) -> None:
        """Set the layer's own parameters and statistics to their initial values: weight 1, bias 0."""
        self._reset_affine()

    def _reset_affine(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _apply_affine(self, x: Tensor, trailing: int = 0) -> Tensor:
        """x·weight + bias, where ``trailing`` axes of ``x`` follow those of the parameters."""
        if self.weight is not None:
            x = x * expand_trailing(self.weight, trailing).to(x.dtype)
        if self.bias is not None:
            x = x + expand_trailing(self.bias, trailing).to(x.dtype)
        return x


def require_flag(name: str, value: object) -> None:
    """Raises a ValueError unless ``value`` is True, False, 1 or 0: torch's norms take arguments in another order."""
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {value!r}; {_USE_NAMES}")


def require_number(name: str, value: object, *, optional: bool = False) -> None:
    """Raises a ValueError if ``value`` is a flag or is not a number; None counts as a number if ``optional``."""
    if optional and value is None:
        return
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number{' or None' if optional else ''}, got {value!r}; {_USE_NAMES}")


_USE_NAMES = "give arguments by their names, because their places differ from those in torch.nn"


def _exclude_from_fusion(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Switch the fused kernel of nn.TransformerEncoderLayer off, which would compute a LayerNorm of eps, weight, bias.

    The encoder does not run the kernel if this attribute is 0. Copies and files of the encoder keep the attribute.
    """
    if isinstance(child, Normalization) and isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0


register_module_module_registration_hook(_exclude_from_fusion)


def call_in_graph(layer: nn.Module, x: fx.Proxy) -> Tensor:
    """The call of ``layer`` in a graph of :mod:`torch.fx`. The layer is a leaf module, like the layers of torch.nn."""
    tracer = x.tracer
    assert isinstance(tracer, fx.Tracer)
    return cast("Tensor", tracer.create_proxy("call_module", tracer.path_of_module(layer), (x,), {}))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not annotate it
def _has_autocast(device: str) -> bool:
    """Tell whether there is an autocast to switch off; the meta device (shape inference) has none.

    Up to PyTorch 2.12 torch.compile cannot trace the question, and would leave each layer to eager mode.
    """
    return torch.amp.is_autocast_available(device)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if _has_autocast(device.type):
        return torch.autocast(device_type=device.type, enabled=False)
    return contextlib.nullcontext()

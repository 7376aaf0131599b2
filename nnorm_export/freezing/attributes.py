"""Attributes of a normalization that the user's code may read: some are kept, others are explained in errors."""

from __future__ import annotations

import types
from collections.abc import Iterator

import torch
from torch import nn

from nnorm_export.layers.frozen_module import FrozenModule

_CONSTANTS = ("num_features", "num_channels", "num_groups", "normalized_shape", "eps")


def keep_constants(layer: nn.Module, frozen: nn.Module) -> None:
    """Give ``frozen`` the constants of ``layer`` that ``frozen`` lacks."""
    for name in _CONSTANTS:
        if hasattr(layer, name) and not hasattr(frozen, name):
            setattr(frozen, name, getattr(layer, name))


def explain(model: nn.Module, error: Exception) -> str:
    """The remedy for ``error`` of the frozen ``model``, if its cause is known; else empty.

    The cause may be an attribute that frozen layers lack, or gradients.

    FrozenModule has no ``__getattr__`` that would explain the error in place, because a ``__getattr__`` would change
    how tracers find the buffers.
    """
    if isinstance(error, AttributeError) and isinstance(layer := error.obj, FrozenModule):
        return (
            f"{getattr(layer, 'name', type(layer).__name__)} is frozen and has no attribute {error.name!r}, which the "
            "model's code reads; keep the value in an attribute or buffer of the module that reads it"
        )
    if isinstance(error, RuntimeError) and "dtype" in str(error) and _has_wider_norms(model):
        return (
            "give inputs that its forward takes. If its code reads the dtype of a normalization's parameters "
            "(norm.weight.dtype), which are float32 after freezing, let it read the dtype of a tensor or another layer"
        )
    return about_gradients(model)


def about_gradients(model: nn.Module) -> str:
    """The remedy for an error of a model whose forward computes gradients, by the names in its code; else empty."""
    for path, layer in model.named_modules():
        code = getattr(type(layer).forward, "__code__", None)
        if code is None or type(layer).__module__.startswith("torch."):
            continue
        names = {name for part in _with_inner(code) for name in part.co_names}
        if found := sorted(names & _GRADIENTS):
            where = f"layer {path}" if path else "the model"
            return (
                f"the forward of {where} ({type(layer).__name__}) computes gradients ({', '.join(found)}), which no "
                "file can hold; export the part of the model in front of them, or write the gradient as a formula of "
                "its own"
            )
    return ""


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code``, and the code of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


# Of torch.autograd, torch.func and tensors. ``grad`` may also be the attribute of a tensor, which needs ``backward``.
_GRADIENTS = frozenset({
    "grad", "grad_and_value", "backward", "vjp", "jvp", "jacrev", "jacfwd", "jacobian", "hessian", "hvp", "vhp",
})  # fmt: skip


def _has_wider_norms(model: nn.Module) -> bool:
    """Whether the model has parameters in float16 or bfloat16 and frozen layers, whose parameters stay float32."""
    is_narrow = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    return is_narrow and any(isinstance(module, FrozenModule) for module in model.modules())

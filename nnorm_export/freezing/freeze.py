"""freeze(): a deep copy of a model in eval mode, in which frozen operators replace the known normalizations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from nnorm_export.errors import FreezeError
from nnorm_export.freezing.attributes import keep_constants
from nnorm_export.freezing.table import is_named_norm, keeps_lmbda, refuse, row_for
from nnorm_export.freezing.understood import require_understood
from nnorm_export.freezing.unregistered import refuse_unregistered
from nnorm_export.freezing.verify_layer import require_same_results
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.models.ambient import neutral
from nnorm_export.models.modules import (
    WEIGHT_HOOKS,
    deepcopy,
    keep_norms_from_fusion,
    named_layers,
    refuse_meta,
    refuse_training,
)
from nnorm_export.names import layer_name, listed
from nnorm_export.operators import FrozenOperator


def freeze(model: nn.Module, *, passthrough: Iterable[str | type[nn.Module]] = (), strict: bool = False) -> nn.Module:
    """Return a copy of ``model`` for inference: running statistics, λ and affine folded into eval-mode operators.

    >>> frozen = nnorm_export.freeze(model)
    >>> type(frozen[1]).__name__
    'FrozenBatchNormalNorm'

    The model itself is not changed. Shared layers stay shared, and references to a layer from plain lists, dicts and
    attributes lead to its operator too. PyTorch's own layers, including its norms and classes that derive from them,
    are copied unchanged. Unknown layers with "norm" in their class names (an RMSNorm of another library, a norm of
    your own) are copied unchanged too, and one warning names all of them. Freezing a frozen model returns a copy.

    Args:
        model: any module; its normalizations are found by class name and attributes, subclasses included.
        passthrough: classes, or names of classes, to be copied unchanged without a warning: your own norms, and layers
            that only look like a known normalization.
        strict: whether an unknown norm is an error.

    Raises:
        FreezeError: a layer has a λ but is unknown; its code differs from that of the known class (a method that a
            subclass overrides or that was assigned to the instance, hooks, other results on a few small inputs); it
            cannot be frozen (no running statistics, a negative variance, a λ that is not finite, a mismatched shape);
            or it is not a registered submodule. The message names the layer's path in the model. With ``strict``, also
            for unknown norms.

    Warns:
        UserWarning: once, naming the unknown norms.
    """
    frozen, notice = frozen_copy(model, passthrough, strict=strict)
    if notice:
        warnings.warn(notice, UserWarning, stacklevel=2)
    return frozen


@neutral()
def frozen_copy(
    model: nn.Module, passthrough: Iterable[str | type[nn.Module]] = (), *, strict: bool = False
) -> tuple[nn.Module, str]:
    """The frozen copy, and the text of the warning of :func:`freeze`, empty if there is nothing to warn of."""
    if not isinstance(model, nn.Module):
        raise FreezeError(
            f"freeze() takes a torch.nn.Module, got {type(model).__name__}; build the model and load the state into it"
        )
    passthrough = listed(passthrough, "passthrough", FreezeError)
    names = {entry if isinstance(entry, str) else entry.__name__ for entry in passthrough}
    refuse_meta(model)
    unknown: dict[str, str] = {}
    frozen = _freeze(model, names, "", unknown)
    if strict and unknown:
        raise FreezeError(
            f"norms that nnorm_export does not know ({_by_class(unknown)}), and strict=True (--strict) refuses them; "
            f"{_remedies(unknown)}"
        )
    _fold_parametrizations(frozen)
    keep_norms_from_fusion(frozen, FrozenOperator)
    refuse_training(frozen.eval())
    return frozen, _notice(unknown) if unknown else ""


def _notice(unknown: dict[str, str]) -> str:
    return (
        f"norms that nnorm_export does not know are exported unchanged, as plain PyTorch code ({_by_class(unknown)}); "
        f"{_remedies(unknown)}"
    )


def _by_class(unknown: dict[str, str]) -> str:
    """The unknown norms by class, with their paths."""
    classes: dict[str, list[str]] = {}
    for path, name in unknown.items():
        classes.setdefault(name, []).append(layer_name(path))
    return "; ".join(
        f"{name}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
        for name, paths in classes.items()
    )


def _remedies(unknown: dict[str, str]) -> str:
    return (
        f"passthrough={sorted(set(unknown.values()))} (--passthrough) exports them unchanged without a warning, and "
        "nnorm_export.freezing.register adds a row for a normality normalization of your own"
    )


def _freeze(model: nn.Module, names: set[str], prefix: str, unknown: dict[str, str]) -> nn.Module:
    """The copy before parametrizations are folded. Adds the path and class of each unknown norm to ``unknown``."""
    # deepcopy reads its memo first: an operator in the memo replaces its layer wherever the model refers to the layer.
    memo: dict[int, object] = {}
    composites: list[str] = []
    for inner_path, layer in named_layers(model):
        path = f"{prefix}.{inner_path}".strip(".")
        # A layer may contain other layers, a norm and an activation for example: its frozen form freezes these itself.
        if any(inner_path.startswith(f"{composite}.") for composite in composites):
            continue
        has_children = next(layer.children(), None) is not None
        if id(layer) in memo:
            composites += [inner_path] * has_children
            continue
        if isinstance(layer, FrozenModule) or type(layer).__name__ in names:
            continue
        row = row_for(layer)
        if row is not None:
            require_understood(path, layer, row)
            frozen = _in_arithmetic_of(model, layer, row.freeze(layer, path))
            keep_constants(layer, frozen)
            require_same_results(path, layer, row.freeze)
            memo[id(layer)] = _freeze(frozen, names, path, unknown) if has_children else frozen
            composites += [inner_path] * has_children
        elif keeps_lmbda(layer):
            raise refuse(
                path,
                layer,
                "it looks like a normality normalization, but it is unknown to nnorm_export",
                "register a row for it (nnorm_export.freezing.register), or, if it is plain PyTorch code, "
                f"export it unchanged with passthrough=[{type(layer).__name__!r}] (--passthrough)",
            )
        elif is_named_norm(layer):
            unknown.setdefault(path, type(layer).__name__)
    refuse_unregistered(model, names)
    return deepcopy(model, memo)


def _fold_parametrizations(frozen: nn.Module) -> None:
    """Replace parametrizations (weight norm, weight standardization) by the weights that they compute."""
    for module in list(frozen.modules()):
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WEIGHT_HOOKS):
                remove = nn.utils.remove_weight_norm if isinstance(hook, WeightNorm) else nn.utils.remove_spectral_norm
                remove(module, hook.name)
        if parametrize.is_parametrized(module):
            weights = _computed_weights(module.eval())
            # torch's remove_parametrizations would change the class, which the user's own layer shares.
            module.__class__ = type(module).__bases__[0]
            del module.parametrizations
            for name, weight in weights.items():
                module.register_parameter(name, nn.Parameter(weight, requires_grad=False))


def _computed_weights(module: nn.Module) -> dict[str, Tensor]:
    """Name -> value of each parametrized tensor, computed in float64.

    A parametrization that does not run in float64, because a tensor in it is not a buffer, is computed in the dtype of
    the module.
    """
    exact = deepcopy(module).to(torch.float64)
    parametrizations = exact.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    names = list(parametrizations)
    with torch.no_grad():
        computed = {name: getattr(module, name) for name in names}
        try:
            return {name: getattr(exact, name).to(value.dtype) for name, value in computed.items()}
        except RuntimeError:
            return computed


def _in_arithmetic_of(model: nn.Module, layer: nn.Module, frozen: nn.Module) -> nn.Module:
    """Cast ``frozen`` to float64 if the layer has no tensor, and so no dtype, and the model is a float64 model."""
    has_dtype = any(tensor.is_floating_point() for tensor in layer.state_dict().values())
    is_double = any(tensor.dtype == torch.float64 for tensor in model.state_dict().values())
    return frozen if has_dtype or not is_double else frozen.to(torch.float64)

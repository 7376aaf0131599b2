"""Replace layers of torch.nn by a normalization of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from nnorm_export.errors import InputError
from nnorm_export.layers._base import NormalNorm
from nnorm_export.layers.convert import placement, train_alike
from nnorm_export.layers.held import places_of_layers
from nnorm_export.layers.related._standard import Kind
from nnorm_export.models.modules import require_module

_POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.Threshold,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
)  # fmt: skip
_KINDS: dict[Kind, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "norm": (_NormBase, nn.LayerNorm, nn.GroupNorm),
    "activation": _POINTWISE,
}
_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


Place = tuple[nn.Module, list[str], list[nn.Module]]  # (parent, names in the parent, layers)


class Replacement(Protocol):
    """A class that :func:`convert_norm` accepts: it declares the layers that it replaces."""

    replaces: tuple[Kind, ...]

    def counterpart(self, replaced: Sequence[nn.Module], **options: Any) -> nn.Module: ...


def convert_norm(module: nn.Module, to: Replacement, **options: Any) -> nn.Module:
    """Replace layers of torch.nn in ``module``, in place, by the layer ``to``.

    Most layers replace a normalization. EvoNormS0, FilterResponseNorm and ProxyNorm replace a normalization and the
    activation after it, PreLayerNorm a linear map and the normalization after it, and WeightStandardization the weight
    of every linear map and convolution. Two layers must be neighbors in an nn.Sequential, because the order of calls in
    a user's forward is unknown. The new layer keeps dtype, device, mode, ε, momentum, and the parameters and running
    statistics that both layers have. FilterResponseNorm and ProxyNorm keep their own ε, which is added to another
    quantity.

        convert_norm(model, FilterResponseNorm, learnable_eps=True)

    Args:
        module: the model.
        to: a class of this package, except the normality-normalization layers (see :func:`convert_normal_norm`).
        options: arguments of the constructor, except those that the replaced layers determine.

    Returns:
        ``module``, or its replacement if ``module`` itself is replaced.

    Raises:
        ValueError: ``module`` is not a torch.nn.Module, no layer in it can be replaced, ``to`` cannot replace a layer,
            or a plain list, dict or function of the model refers to a layer too, and would still call it. The model is
            then unchanged.
    """
    require_module("convert_norm", module)
    if not isinstance(to, type):
        raise InputError(f"to is {to!r}; it must be a class, such as EvoNormS0")
    if not hasattr(to, "replaces") or not hasattr(to, "counterpart"):
        remedy = "use convert_normal_norm"
        if not issubclass(to, NormalNorm):
            remedy = "give a layer of nnorm_export.layers, EvoNormS0 for example"
        raise InputError(f"convert_norm cannot insert {to.__name__}; {remedy}")
    holder = nn.ModuleList([module])  # so that the module itself has a parent
    found = list(_places(holder, to.replaces))
    if not found:
        kinds = " followed by ".join(to.replaces)
        where = "" if len(to.replaces) == 1 else ", next to each other in an nn.Sequential"
        raise ValueError(f"{type(module).__name__} has no {kinds} of torch.nn{where}; insert the layers by hand")
    for _, _, replaced in found:
        for layer in replaced:
            if isinstance(layer, LazyModuleMixin):
                name = type(layer).__name__
                raise ValueError(f"{name} has no shape yet. Run the model once on an example, then convert it.")
    # All layers are built before the first is put into the model, so that an error leaves the model unchanged. Shared
    # layers stay shared.
    built: dict[tuple[int, ...], nn.Module] = {}
    for _, _, replaced in found:
        key = tuple(map(id, replaced))
        if key not in built:
            built[key] = _like(replaced, module, to, options)
    _refuse_held(module, found, built)
    for parent, names, replaced in found:
        setattr(parent, names[0], built[tuple(map(id, replaced))])
        for name in names[1:]:
            setattr(parent, name, nn.Identity())
    return holder[0]


def _refuse_held(module: nn.Module, found: Sequence[Place], built: dict[tuple[int, ...], nn.Module]) -> None:
    held = places_of_layers(module)
    for _, _, replaced in found:
        for layer in replaced:
            if id(layer) in held and layer is not built[tuple(map(id, replaced))]:
                raise ValueError(
                    f"{type(layer).__name__} would still run from {held[id(layer)]}; keep it in an nn.ModuleList or "
                    "nn.ModuleDict there, or fill the list or dict after converting"
                )


def _places(module: nn.Module, kinds: tuple[Kind, ...]) -> Iterator[Place]:
    """Yield each sequence of layers of these kinds in ``module``."""
    for parent in module.modules():
        names = list(parent._modules)
        if (len(kinds) > 1 and not isinstance(parent, nn.Sequential)) or parametrize.is_parametrized(parent):
            continue
        for first in range(len(names) - len(kinds) + 1):
            chosen = names[first : first + len(kinds)]
            layers = [layer for layer in (parent._modules[name] for name in chosen) if layer is not None]
            if len(layers) == len(kinds) and all(map(_is_of_kind, layers, kinds)):
                yield parent, chosen, layers


def _is_of_kind(layer: nn.Module, kind: Kind) -> bool:
    return isinstance(layer, _KINDS[kind])


def _like(replaced: Sequence[nn.Module], root: nn.Module, to: Replacement, options: dict[str, Any]) -> nn.Module:
    new = to.counterpart(replaced, **options)
    old = next((layer for layer in replaced if _is_of_kind(layer, "norm")), None)
    if old is None or any(layer is new for layer in replaced):
        return new
    new = new.to(**placement(old, root))
    taken = []
    for name in _STATE:
        mine, value = getattr(new, name, None), getattr(old, name, None)
        if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
            setattr(new, name, value)
            taken.append(name)
    train_alike(new, taken)
    return new.train(old.training)

"""Put a normalization of this package in the place of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.modules import activation
from torch.nn.modules.batchnorm import _NormBase

from nnorm_export.layers._standard import Kind

_KINDS: dict[Kind, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "norm": (_NormBase, nn.LayerNorm, nn.GroupNorm),
    "activation": tuple(
        cls
        for cls in vars(activation).values()
        if isinstance(cls, type)
        and issubclass(cls, nn.Module)
        and cls not in (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.MultiheadAttention, nn.GLU)
    ),
}
_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

Model = TypeVar("Model", bound=nn.Module)


class Replacement(Protocol):
    """What :func:`convert_norm` takes: every layer of this package that says what it replaces."""

    replaces: tuple[Kind, ...]

    def counterpart(self, replaced: Sequence[nn.Module], **options: Any) -> nn.Module: ...


def convert_norm(module: Model, to: Replacement, **options: Any) -> Model:
    """Replaces torch.nn's layers in ``module``, in place, by the layer ``to``.

    What is replaced depends on the layer: most take the place of a normalization, wherever it is; EvoNormS0,
    FilterResponseNorm and ProxyNorm that of a normalization and the activation after it, PreLayerNorm that of a linear
    map and the normalization after it, WeightStandardization that of the weight of every linear map and convolution.
    Two layers must be neighbours in an nn.Sequential: what a forward of its own does with them cannot be seen. The new
    layer keeps parameters and running statistics that both have, and dtype, device and mode.

        convert_norm(model, FilterResponseNorm, learnable_eps=True)

    Args:
        module: the model.
        to: a layer of this package.
        options: arguments of its constructor, but for those that the replaced layers determine.

    Returns:
        ``module``.

    Raises:
        ValueError: nothing in ``module`` can be replaced, or ``to`` cannot take a layer's place; the model is then
            unchanged.
    """
    found = list(_places(module, to.replaces))
    if not found:
        kinds = " followed by ".join(to.replaces)
        where = "" if len(to.replaces) == 1 else ", next to each other in an nn.Sequential"
        raise ValueError(f"{type(module).__name__} has no {kinds} of torch.nn{where}; put the layers in by hand")
    # All are built before any is placed, so that an error leaves the model as it was. A shared layer stays shared.
    built: dict[int, nn.Module] = {}
    for parent, names in found:
        replaced = [parent._modules[name] for name in names]
        first = replaced[0]
        assert first is not None
        if id(first) not in built:
            built[id(first)] = _like([layer for layer in replaced if layer is not None], to, options)
    for parent, names in found:
        setattr(parent, names[0], built[id(parent._modules[names[0]])])
        for name in names[1:]:
            setattr(parent, name, nn.Identity())
    return module


def _places(module: nn.Module, kinds: tuple[Kind, ...]) -> Iterator[tuple[nn.Module, list[str]]]:
    for parent in module.modules():
        names = list(parent._modules)
        if len(kinds) > 1 and not isinstance(parent, nn.Sequential):
            continue
        for first in range(len(names) - len(kinds) + 1):
            chosen = names[first : first + len(kinds)]
            layers = [parent._modules[name] for name in chosen]
            if all(isinstance(layer, _KINDS[kind]) for layer, kind in zip(layers, kinds, strict=True)):
                yield parent, chosen


def _like(replaced: Sequence[nn.Module], to: Replacement, options: dict[str, Any]) -> nn.Module:
    new = to.counterpart(replaced, **options)
    old = next((layer for layer in replaced if isinstance(layer, _KINDS["norm"])), None)
    if old is None or any(layer is new for layer in replaced):
        return new
    for tensor in (*old.parameters(), *old.buffers()):
        if tensor.is_floating_point():
            new = new.to(tensor.device, tensor.dtype)
            break
    for name in _STATE:
        mine, value = getattr(new, name, None), getattr(old, name, None)
        if isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.shape == value.shape:
            setattr(new, name, value)
    return new.train(old.training)

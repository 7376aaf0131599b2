"""The table of layers: from a training-time layer to its eval-mode form.

The authors ask their users to copy ``layers.py`` into their own code, so import paths say nothing. A row covers a layer
if a class in the layer's method resolution order has the row's name and the layer has the row's attributes. Two other
modules check the layer's code: :mod:`~nnorm_export.freezing.understood` and :mod:`~nnorm_export.freezing.verify_layer`.
This package's normality layers have the authors' names and attributes, hence the same rows. A layer that derives from
:class:`~nnorm_export.layers.related._standard.Freezable` needs no row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nnorm_export.errors import FreezeError
from nnorm_export.freezing.sample_size import SampleSize
from nnorm_export.names import layer_name


@dataclass(frozen=True)
class Row:
    """One kind of layer.

    Attributes:
        class_names: names of the classes that the row covers, with their subclasses.
        attributes: attributes that a layer must also have, so that the row does not cover an unrelated class of the
            same name.
        freeze: builds the eval-mode module from a layer and its path in the model.
        base: a class with a method ``frozen``, whose subclasses the row covers by type; None for a row by names.
        plain: whether torch.nn has a norm of the same name. Then the row does not cover a class that derives from a
            norm of torch.nn: such a class is plain PyTorch code, which is exported unchanged.
        sample_size: the number of values from which a layer computes one mean and variance; None if statistics are
            frozen.
    """

    class_names: tuple[str, ...]
    attributes: tuple[str, ...]
    freeze: Callable[[nn.Module, str], nn.Module]
    base: type[nn.Module] | None = None
    plain: bool = False
    sample_size: SampleSize | None = None

    def covers(self, layer: nn.Module) -> bool:
        """Whether the row covers ``layer``."""
        if self.base is not None:
            return isinstance(layer, self.base)
        if self.plain and isinstance(layer, _TORCH_NORMS):
            return False
        names = {cls.__name__ for cls in _user_classes(layer)}
        return not names.isdisjoint(self.class_names) and all(hasattr(layer, name) for name in self.attributes)

    def frozen_class(self, layer: nn.Module) -> Any:
        """The class of ``layer`` whose methods :attr:`freeze` knows. A subclass may have changed these methods."""
        if self.base is not None:
            return next(cls for cls in _user_classes(layer) if "frozen" in vars(cls))
        return next(cls for cls in reversed(_user_classes(layer)) if cls.__name__ in self.class_names)


# PyTorch runs and exports these norms, and classes that derive from them, without freezing.
_TORCH_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)

_ROWS: list[Row] = []


def register(row: Row) -> None:
    """Add a row.

    Raises:
        ValueError: another row has one of the class names.
    """
    claimed = {name for other in _ROWS for name in (*other.class_names, *_names_below(other.base))}
    if twice := claimed.intersection(row.class_names):
        raise ValueError(
            f"{', '.join(sorted(twice))}: the table of layers has a row for this class name; rename the class"
        )
    _ROWS.append(row)


def _names_below(base: type | None) -> set[str]:
    """The names of the classes that derive from ``base``."""
    classes: list[type] = [] if base is None else base.__subclasses__()
    return {cls.__name__ for cls in classes}.union(*(_names_below(cls) for cls in classes))


def row_for(layer: nn.Module) -> Row | None:
    """The row that covers ``layer``, or None. No row covers PyTorch's own layers, ``torch.nn.BatchNorm2d`` etc."""
    if is_torchs_own(layer):
        return None
    return next((row for row in _ROWS if row.covers(layer)), None)


def class_of(layer: nn.Module) -> type[nn.Module]:
    """The class of ``layer``, without the subclass that a parametrization makes of it."""
    return next(cls for cls in type(layer).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")


def is_torchs_own(layer: nn.Module) -> bool:
    """Whether the layer's class is PyTorch's."""
    return is_of_torch(class_of(layer))


def keeps_lmbda(layer: nn.Module) -> bool:
    """Whether ``layer`` has a λ and its class is not PyTorch's."""
    if is_torchs_own(layer):
        return False
    return any("lmbda" in name for name in (*layer._buffers, *layer._parameters, *vars(layer)))


def is_named_norm(layer: nn.Module) -> bool:
    """Whether ``layer`` has no submodules, has "norm" in its class name, and is not derived from a PyTorch norm."""
    is_leaf = next(layer.children(), None) is None and not isinstance(layer, _TORCH_NORMS)
    return not is_torchs_own(layer) and is_leaf and "norm" in type(layer).__name__.lower()


def _user_classes(layer: nn.Module) -> list[type]:
    return [cls for cls in type(layer).__mro__ if not is_of_torch(cls)]


def is_of_torch(cls: type) -> bool:
    """Whether PyTorch defines ``cls``."""
    return cls.__module__ == "torch" or cls.__module__.startswith("torch.")


def refuse(path: str, layer: nn.Module, reason: str, remedy: str) -> FreezeError:
    """Return an error that names the layer by path and class, the reason and the remedy."""
    return FreezeError(f"layer {layer_name(path)} ({type(layer).__name__}): {reason}; {remedy}")

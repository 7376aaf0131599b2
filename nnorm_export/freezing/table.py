"""The table of layers: from a training-time layer to its eval-mode form.

The authors tell their users to copy ``layers.py`` into their own code, so import paths say nothing: a layer is
recognized when a class in its method resolution order has the name, and the layer the attributes, of a row. Whether its
code is what the row takes it for is another question (:mod:`~nnorm_export.freezing.understood` and
:mod:`~nnorm_export.freezing.verify_layer`). This
package's normality layers have the authors' names and attributes, hence the same rows. A layer that derives from
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
        class_names: names of the classes that the row covers; subclasses count.
        attributes: attributes that a layer must also have, so that an unrelated class of the same name is not taken
            for it.
        freeze: builds the eval-mode module from a layer and its path in the model.
        base: a class whose subclasses the row covers, where names are not needed. It has a method ``frozen``.
        plain: whether torch.nn has this layer too. A class that derives from a norm of torch.nn is then not of this
            kind: it is plain PyTorch code, which is exported as it is.
        sample_size: the number of values that a layer takes statistics of together; None if statistics are frozen.
    """

    class_names: tuple[str, ...]
    attributes: tuple[str, ...]
    freeze: Callable[[nn.Module, str], nn.Module]
    base: type[nn.Module] | None = None
    plain: bool = False
    sample_size: SampleSize | None = None

    def covers(self, layer: nn.Module) -> bool:
        """Whether ``layer`` is of this kind."""
        if self.base is not None:
            return isinstance(layer, self.base)
        if self.plain and isinstance(layer, _TORCH_NORMS):
            return False
        names = {cls.__name__ for cls in _user_classes(layer)}
        return not names.isdisjoint(self.class_names) and all(hasattr(layer, name) for name in self.attributes)

    def frozen_class(self, layer: nn.Module) -> Any:
        """The class of ``layer`` whose methods :attr:`freeze` knows; a subclass, of any name, may have changed them."""
        if self.base is not None:
            return next(cls for cls in _user_classes(layer) if "frozen" in vars(cls))
        return next(cls for cls in reversed(_user_classes(layer)) if cls.__name__ in self.class_names)


# Norms that PyTorch runs and its exporters write; a class that derives from one needs no freezing.
_TORCH_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)

_ROWS: list[Row] = []


def register(row: Row) -> None:
    """Add a row.

    Raises:
        ValueError: another row has one of its class names, at import rather than at export.
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
    """The row that covers ``layer``, or None. PyTorch's own layers, ``torch.nn.BatchNorm2d`` and so on, have none."""
    if is_torchs_own(layer):
        return None
    return next((row for row in _ROWS if row.covers(layer)), None)


def class_of(layer: nn.Module) -> type[nn.Module]:
    """The class of ``layer``, without the class that a parametrization inserts before it."""
    return next(cls for cls in type(layer).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")


def is_torchs_own(layer: nn.Module) -> bool:
    """Whether the layer's class is PyTorch's."""
    return is_of_torch(class_of(layer))


def keeps_lmbda(layer: nn.Module) -> bool:
    """Whether ``layer`` keeps a λ, and does not come from PyTorch."""
    if is_torchs_own(layer):
        return False
    return any("lmbda" in name for name in (*layer._buffers, *layer._parameters, *vars(layer)))


def is_named_norm(layer: nn.Module) -> bool:
    """Whether ``layer`` is a leaf with "norm" in its class name; not PyTorch's own, nor derived from its norms."""
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

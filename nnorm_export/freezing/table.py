"""The table of layers: from a training-time layer, recognised by class name and attributes, to its eval-mode form.

The authors tell their users to copy ``layers.py`` into their own code, so no import path can be relied on: a layer is
recognised when a class of its method resolution order bears the name and the layer has the attributes of a row. Our
own layers have the same names and attributes, hence the same rows. A new normalization adds a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from nnorm_export.errors import FreezeError


@dataclass(frozen=True)
class Row:
    """One kind of layer.

    Attributes:
        class_names: names of the classes that the row covers; subclasses count.
        attributes: what a layer of these names must have, so that a class of the same name but another meaning is
            not mistaken for it.
        freeze: builds the eval-mode module from a layer and its path in the model.
    """

    class_names: tuple[str, ...]
    attributes: tuple[str, ...]
    freeze: Callable[[nn.Module, str], nn.Module]


_ROWS: list[Row] = []


def register(row: Row) -> None:
    """Adds a row. A class name that another row claims already is an error at import, not a surprise at export."""
    claimed = {name for other in _ROWS for name in other.class_names}
    if twice := claimed.intersection(row.class_names):
        raise ValueError(f"{', '.join(sorted(twice))}: a row of the table of layers has this class name already")
    _ROWS.append(row)


def row_for(layer: nn.Module) -> Row | None:
    """The row that covers ``layer``, or None. PyTorch's own layers, ``torch.nn.BatchNorm2d`` and so on, have none."""
    if is_torchs_own(layer):
        return None
    names = {cls.__name__ for cls in _user_classes(layer)}
    for row in _ROWS:
        if names.intersection(row.class_names) and all(hasattr(layer, name) for name in row.attributes):
            return row
    return None


def forward_is_overridden(layer: nn.Module, row: Row) -> bool:
    """Whether a subclass has a forward of its own, which the operator of the class that it derives from cannot know."""
    matched: Any = next(cls for cls in _user_classes(layer) if cls.__name__ in row.class_names)
    return type(layer).forward is not matched.forward


def is_torchs_own(layer: nn.Module) -> bool:
    """Whether the class is PyTorch's; a parametrization puts one of its own in front of the layer's."""
    cls = next(cls for cls in type(layer).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")
    return _is_of_torch(cls)


def looks_like_normalization(layer: nn.Module) -> bool:
    """Whether ``layer`` is a normalization by its name, or keeps a λ, and is neither PyTorch's own nor a container."""
    if is_torchs_own(layer):
        return False
    keeps_lmbda = any("lmbda" in name for name in (*layer._buffers, *layer._parameters, *vars(layer)))
    is_leaf = next(layer.children(), None) is None
    return keeps_lmbda or (is_leaf and "norm" in type(layer).__name__.lower())


def _user_classes(layer: nn.Module) -> list[type]:
    return [cls for cls in type(layer).__mro__ if not _is_of_torch(cls)]


def _is_of_torch(cls: type) -> bool:
    return cls.__module__ == "torch" or cls.__module__.startswith("torch.")


def refuse(path: str, layer: nn.Module, reason: str, remedy: str) -> FreezeError:
    """An error that names the layer by its path and class, the reason and the remedy."""
    return FreezeError(f"layer {path or '(the model itself)'!s} ({type(layer).__name__}): {reason}; {remedy}")

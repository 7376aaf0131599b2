"""The table of layers: from a training-time layer, recognised by class name and attributes, to its eval-mode form.

The authors tell their users to copy ``layers.py`` into their own code, so no import path can be relied on: a layer is
recognised when a class of its method resolution order bears the name and the layer has the attributes of a row. Our
own layers have the same names and attributes, hence the same rows. A new normalization adds a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    if is_torch_class(type(layer)):
        return None
    names = [cls.__name__ for cls in type(layer).__mro__ if not is_torch_class(cls)]
    for row in _ROWS:
        if any(name in row.class_names for name in names) and all(hasattr(layer, name) for name in row.attributes):
            return row
    return None


def is_torch_class(cls: type) -> bool:
    return cls.__module__ == "torch" or cls.__module__.startswith("torch.")


def looks_like_normalization(layer: nn.Module) -> bool:
    """Whether ``layer`` is a normalization by its name, or keeps a λ, and is neither PyTorch's own nor a container."""
    cls = type(layer)
    if is_torch_class(cls):
        return False
    keeps_lmbda = any("lmbda" in name for name in (*layer._buffers, *layer._parameters, *vars(layer)))
    is_leaf = next(layer.children(), None) is None
    return keeps_lmbda or (is_leaf and "norm" in cls.__name__.lower())


def refuse(path: str, layer: nn.Module, reason: str, remedy: str) -> FreezeError:
    """An error that names the layer by its path and class, the reason and the remedy."""
    return FreezeError(f"layer {path or '(the model itself)'!s} ({type(layer).__name__}): {reason}; {remedy}")

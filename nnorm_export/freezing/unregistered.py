"""Normalizations that are not registered submodules of the model: in plain lists, dicts, dataclasses and functions.

PyTorch does not switch such a layer to eval mode, move it, save it or list it, and freeze() finds layers where PyTorch
lists them. The layer would run, and be exported, with its training code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from nnorm_export.freezing.table import refuse, row_for
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.models.modules import named_layers

_CONTAINERS = (list, tuple, set, frozenset, deque)
# _modules, _parameters, _forward_hooks and so on; what Module.compile() sets, which copies of a module do not have.
_OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

Found = tuple[str, nn.Module, str]  # where, the module, what holds it


def refuse_unregistered(model: nn.Module, passthrough: Collection[str] = ()) -> None:
    """Raises a FreezeError that names the attribute, if one leads to a normalization that is not registered."""
    registered = {id(layer) for layer in model.modules()}
    seen: set[int] = set()
    for path, owner in named_layers(model):
        for name, value in vars(owner).items():
            if name in _OF_TORCH:
                continue
            for where, module, holder in _modules_in(value, f"{path}.{name}".lstrip("."), seen, "attribute"):
                _refuse(where, module, holder, registered, passthrough)


def _refuse(where: str, module: nn.Module, holder: str, registered: set[int], passthrough: Collection[str]) -> None:
    for inner, layer in module.named_modules():
        known = row_for(layer) is not None and not isinstance(layer, FrozenModule)
        if not known or type(layer).__name__ in passthrough:
            continue
        if holder in _CODE:
            reason = f"it is held by a {holder}, which a copy of the model shares with it"
            raise refuse(where, layer, reason, "keep the layer as a submodule, and call it in forward")
        if id(layer) not in registered:
            where = f"{where}.{inner}".rstrip(".")
            remedy = "keep it in an nn.ModuleList or nn.ModuleDict, or delete it if inference does not need it"
            raise refuse(where, layer, f"it is held in a plain {holder} only", remedy)


_CODE = ("function", "bound method")


def _modules_in(value: Any, where: str, seen: set[int], holder: str) -> Iterator[Found]:
    """Yield the modules that ``value`` leads to through containers and functions, each with its place."""
    if isinstance(value, nn.Module):
        yield where, value, holder
        return
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None), type)) or id(value) in seen:
        return
    seen.add(id(value))
    for place, inner, kind in _parts_of(value, where):
        # A function holds what the containers in its closure hold.
        yield from _modules_in(inner, place, seen, holder if holder in _CODE else kind)


def _parts_of(value: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the place, the value and the holder of each part of ``value``."""
    kind = type(value).__name__
    if isinstance(value, types.FunctionType):
        yield from ((where, part, "function") for part in _held_by(value))
    elif isinstance(value, types.MethodType):
        # A copy of a bound method is bound to the copy of its module, unless a frozen form takes the module's place.
        if isinstance(value.__self__, nn.Module) and row_for(value.__self__) is not None:
            yield where, value.__self__, "bound method"
    elif isinstance(value, functools.partial):
        yield from ((where, part, kind) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, dict):
        yield from ((f"{where}[{key!r}]", part, kind) for key, part in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"{where}[{index}]", part, kind) for index, part in enumerate(value))
    elif isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value):
        kind = kind if isinstance(value, types.SimpleNamespace) else f"dataclass {kind}"
        yield from ((f"{where}.{name}", part, kind) for name, part in _fields_of(value))


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else vars(value)
    return ((name, getattr(value, name, None)) for name in names)


def _held_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield the variables that ``function`` encloses and its default arguments."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()

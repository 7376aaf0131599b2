"""Modules to which a model refers outside of its submodules: in plain lists, dicts, dataclasses and functions.

PyTorch does not list these references, so that they still lead to the old module after a submodule is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from nnorm_export.models.modules import named_layers

FUNCTION, BOUND_METHOD = "function", "bound method"
CODE = (FUNCTION, BOUND_METHOD)  # holders that a copy of the model shares with it

_CONTAINERS = (list, tuple, set, frozenset, deque)
# The attributes of every nn.Module (_modules, _parameters, _forward_hooks, …), and the one that Module.compile() sets.
_ATTRIBUTES_OF_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}

Found = tuple[str, nn.Module, str]  # where, the module, the kind of its holder


def held_past_submodules(model: nn.Module) -> Iterator[Found]:
    """Yield each module to which a plain attribute in ``model`` leads, with its place and the kind of its holder."""
    return (found for _, found in _held_with_owners(model))


def _held_with_owners(model: nn.Module) -> Iterator[tuple[nn.Module, Found]]:
    """Yield (the module that has the attribute, the found module with its place and holder)."""
    seen: set[int] = set()
    for path, owner in named_layers(model):
        for name, value in vars(owner).items():
            if name not in _ATTRIBUTES_OF_MODULE:
                found = _modules_in(value, f"{path}.{name}".lstrip("."), seen, "attribute")
                yield from ((owner, each) for each in found)


def places_of_layers(model: nn.Module) -> dict[int, str]:
    """id of a module -> the place in ``model`` that would still refer to the module after its replacement.

    A place that leads to a submodule of ``model`` does not count for the modules in this submodule, because they are
    replaced in it. An attribute that leads to its own module does not count either, for example the original forward
    that a hook keeps.
    """
    registered = {id(layer) for layer in model.modules()}
    places: dict[int, str] = {}
    for owner, (where, module, holder) in _held_with_owners(model):
        within = {id(layer) for layer in module.modules()}
        if id(owner) in within:
            continue
        kind = f"a {holder}" if holder in CODE else f"a plain {holder}"
        inside = [("", module)] if id(module) in registered else module.named_modules()
        for inner, layer in inside:
            places.setdefault(id(layer), f"{f'{where}.{inner}'.rstrip('.')}, in {kind}")
    return places


def _modules_in(value: Any, where: str, seen: set[int], holder: str) -> Iterator[Found]:
    """Yield the modules to which ``value`` leads through containers and functions, each with its place."""
    if isinstance(value, nn.Module):
        yield where, value, holder
        return
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None), type)) or id(value) in seen:
        return
    seen.add(id(value))
    for place, inner, kind in _parts_of(value, where):
        # The holder of a container in a function's closure is the function.
        yield from _modules_in(inner, place, seen, holder if holder in CODE and kind not in CODE else kind)


def _parts_of(value: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the place, the value and the holder of each part of ``value``."""
    kind = type(value).__name__
    if isinstance(value, types.FunctionType):
        yield from ((where, part, FUNCTION) for part in _held_by(value))
    elif isinstance(value, types.MethodType):
        yield where, value.__self__, BOUND_METHOD
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

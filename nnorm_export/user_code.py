"""Objects of the user's modules, by ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nnorm_export.errors import NnormExportError


def look_up(
    spec: str,
    what: str,
    example: str,
    *,
    kind: str = "function",
    is_candidate: Callable[[Any, str], bool] | None = None,
) -> Any:
    """The object that ``package.module:name`` names.

    Modules are looked up in the current directory first, as by ``python -m``.

    Args:
        what: what the object should be, for messages: ``a model``.
        example: a spec of such an object, for messages.
        kind: what the name stands for, for messages.
        is_candidate: whether a message proposes an object of the module, which has this name; by default all callable
            ones that are defined there.

    Raises:
        NnormExportError: the module or the name is unknown, or the module cannot be imported.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (colon and module_name and attribute):
        raise NnormExportError(f"{spec!r} does not name {what}; write package.module:{kind}, for example {example}")
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        dotted = ".".join(Path(module_name).with_suffix("").parts).strip(".")
        raise NnormExportError(f"{spec!r} names a file; name the module instead, for example {dotted}:{attribute}")
    found: Any = import_module(module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            module = sys.modules[module_name]
            own = [name for name, value in vars(module).items() if (is_candidate or _is_own)(value, module_name)]
            hint = f"it has {', '.join(own[:10])}" if own else "name a function or class that it has"
            raise NnormExportError(f"{spec}: {module_name} has no {part}; {hint}") from None
    return found


def _is_own(value: Any, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def add_current_directory() -> None:
    """Adds the current directory to Python's path, as ``python -m`` does. The console script does not add it."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def import_module(name: str) -> ModuleType:
    """Imports a module of the user.

    Raises:
        NnormExportError: the module is missing, or it fails.
    """
    add_current_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise NnormExportError(
                f"no module named {error.name!r}, in the current directory or installed; "
                "run this where the module lies, or add that folder to PYTHONPATH"
            ) from error
        raise NnormExportError(f"module {name} cannot be imported: {error}; install what it imports") from error
    except Exception as error:  # the user's module runs here and may raise any exception; the message shows it
        raise NnormExportError(
            f"module {name} cannot be imported: {described(error)}; correct it until `python -c 'import {name}'` passes"
        ) from error


def described(error: Exception) -> str:
    """Returns the type, the message and the line of the user's code that raised ``error``."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = ""
    if traceback is not None:
        place = f" ({Path(traceback.tb_frame.f_code.co_filename).name}, line {traceback.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"

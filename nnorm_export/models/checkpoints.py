"""A model from ``package.module:factory``, its weights from a checkpoint, or a whole program from a ``.pt2`` file.

Checkpoints are read without running code from them, and fit the model exactly or not at all.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nnorm_export.errors import CheckpointError, NnormExportError
from nnorm_export.models.state_dicts import find_state_dict, fit, read_file

_PROGRAM = "torch.export.save(torch.export.export(nnorm_export.freeze(model), args), 'model.pt2')"


def parse_arguments(pairs: Sequence[str], what: str = "--model-arg", *, dotted: bool = False) -> dict[str, Any]:
    """``["depth=10", "act=relu"]`` -> ``{"depth": 10, "act": "relu"}``: Python literals, and text for all else."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not all(part.isidentifier() for part in (key.split(".") if dotted else [key])):
            raise NnormExportError(f"{what} {pair!r} is not key=value; write it as in: {what} depth=10")
        if key in arguments:
            raise NnormExportError(f"{what} {key} is given twice")
        try:
            arguments[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            arguments[key] = text
    return arguments


def build_model(spec: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """The model that ``package.module:factory`` names: a function or class to call, or a finished nn.Module.

    Modules are looked for in the current directory first, as ``python -m`` does.

    Raises:
        NnormExportError: no such module or name, a factory that fails or wants other arguments, or no nn.Module.
    """
    arguments = dict(arguments or {})
    module_name, colon, attribute = spec.partition(":")
    if not (colon and module_name and attribute):
        raise NnormExportError(f"{spec!r} does not name a model; write package.module:factory, for example nets:build")
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        dotted = ".".join(Path(module_name).with_suffix("").parts).strip(".")
        raise NnormExportError(f"{spec!r} names a file; name the module instead, for example {dotted}:{attribute}")
    found = _lookup(_import(module_name), attribute, spec)
    if isinstance(found, nn.Module):
        if arguments:
            raise NnormExportError(f"{spec} is a finished model, which takes no arguments: {', '.join(arguments)}")
        return found
    if not callable(found):
        raise NnormExportError(
            f"{spec} is a {type(found).__name__}, neither an nn.Module nor a function that makes one"
        )
    return _call(found, arguments, spec)


def load_checkpoint(
    model: nn.Module, path: str | Path, *, key: str | None = None, trust_pickle: bool = False
) -> list[str]:
    """Loads the weights in ``path`` into ``model`` and returns notices on what was done to make them fit.

    Args:
        model: the module to load into. After an exception it is what it was before.
        path: what ``torch.save`` wrote, or a ``.safetensors`` file: a state dict, plain or under one of the usual
            keys, or (with ``trust_pickle``) a whole module.
        key: the entry that holds the weights (``ema``, ``swa.model``), where the usual one is not meant.
        trust_pickle: allow a pickle that runs code while it loads.

    Raises:
        CheckpointError: the file cannot be read, holds no weights, or they do not fit; the message lists the missing
            and unexpected keys and the shapes that differ.
    """
    path = Path(path)
    _import_from_current_directory()  # a trusted pickle may name the user's own classes
    contents = read_file(path, trust_pickle=trust_pickle)
    state, found_at, others = find_state_dict(contents, path, key)
    notices = []
    if others:
        notices.append(
            f"{path.name}: weights taken from {found_at!r}; it also holds {', '.join(map(repr, others))} "
            "(choose with --checkpoint-key)"
        )
    return notices + fit(model, state, path)


def load_program(path: str | Path) -> torch.export.ExportedProgram:
    """The program in a ``.pt2`` file that ``torch.export.save`` wrote; our operators are known to it.

    Raises:
        CheckpointError: no such file, not a program, or one of an operator that is not installed.
    """
    importlib.import_module("nnorm_export.operators")  # registers the ops that the program calls
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    try:
        return torch.export.load(path)
    except Exception as error:  # zip, JSON and schema errors of many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: not an exported program ({reason}); write one with {_PROGRAM}") from error


def _import_from_current_directory() -> None:
    """The console script, unlike ``python -m``, does not look in the current directory by itself."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _import(name: str) -> Any:
    _import_from_current_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise NnormExportError(
                f"no module named {error.name!r}, in the current directory or installed; "
                "run this where the module lies, or add that folder to PYTHONPATH"
            ) from error
        raise NnormExportError(f"module {name} cannot be imported: {error}; install what it needs") from error
    except Exception as error:  # the user's code may raise anything
        raise NnormExportError(f"module {name} cannot be imported: {_describe(error)}") from error


def _lookup(module: Any, attribute: str, spec: str) -> Any:
    found = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            own = [name for name, value in vars(module).items() if _is_candidate(value, module.__name__)]
            hint = f"; it has {', '.join(own[:10])}" if own else ""
            raise NnormExportError(f"{spec}: {module.__name__} has no {part}{hint}") from None
    return found


def _is_candidate(value: Any, module: str) -> bool:
    return isinstance(value, nn.Module) or (callable(value) and getattr(value, "__module__", None) == module)


def _call(factory: Any, arguments: dict[str, Any], spec: str) -> nn.Module:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        signature = None
    if signature is not None:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise NnormExportError(
                f"{spec}{signature} cannot be called: {error}; give its arguments with --model-arg key=value"
            ) from error
    try:
        model = factory(**arguments)
    except Exception as error:  # the user's code may raise anything
        raise NnormExportError(f"{spec} failed: {_describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise NnormExportError(f"{spec} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _describe(error: Exception) -> str:
    """The type, the message and the line of the user's code that raised."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = ""
    if traceback is not None:
        place = f" ({Path(traceback.tb_frame.f_code.co_filename).name}, line {traceback.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"

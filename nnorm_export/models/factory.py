"""A model from ``package.module:factory``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from nnorm_export.errors import NnormExportError
from nnorm_export.models.ambient import without_exit
from nnorm_export.user_code import described, look_up


def parse_arguments(pairs: Sequence[str], what: str = "--model-arg", *, dotted: bool = False) -> dict[str, Any]:
    """``["depth=10", "act=relu"]`` -> ``{"depth": 10, "act": "relu"}``: Python literals, or text."""

    def is_key(key: str) -> bool:
        return all(part.isidentifier() for part in (key.split(".") if dotted else [key]))

    arguments: dict[str, Any] = {}
    for key, text in parse_texts(pairs, what, "depth=10", is_key).items():
        try:
            arguments[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            arguments[key] = text
    return arguments


def parse_texts(pairs: Sequence[str], what: str, example: str, is_key: Callable[[str], bool] = bool) -> dict[str, str]:
    """``["author=Ada"]`` -> ``{"author": "Ada"}``."""
    texts: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not is_key(key):
            raise NnormExportError(f"{what} {pair!r} is not key=value; write it as in: {what} {example}")
        if key in texts:
            raise NnormExportError(f"{what} {key} is given twice; give it once")
        texts[key] = text
    return texts


@without_exit()
def build_model(spec: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Returns the model that ``package.module:factory`` names: a function or class to call, or a finished nn.Module.

    Modules are looked up in the current directory first, as by ``python -m``.

    Raises:
        NnormExportError: the module or name is unknown, the factory fails or needs other arguments, or the result is
            not an nn.Module.
    """
    arguments = dict(arguments or {})
    found = look_up(spec, "a model", "nets:build", kind="factory", is_candidate=_is_candidate)
    if isinstance(found, nn.Module):
        if arguments:
            raise NnormExportError(
                f"{spec} is a finished model, which takes no arguments; leave out --model-arg {', '.join(arguments)}"
            )
        return found
    if not callable(found):
        raise NnormExportError(
            f"{spec} is a {type(found).__name__}; name an nn.Module, or a function or class that returns one"
        )
    return _call(found, arguments, spec)


def _is_candidate(value: Any, module: str) -> bool:
    return isinstance(value, nn.Module) or (callable(value) and getattr(value, "__module__", None) == module)


def _call(factory: Any, arguments: dict[str, Any], spec: str) -> nn.Module:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have no signature
        signature = None
    if signature is not None:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
            unknown = [] if takes_any else [name for name in arguments if name not in signature.parameters]
            remedy = f"leave out --model-arg {', '.join(unknown)}" if unknown else "give it with --model-arg key=value"
            raise NnormExportError(f"{spec}{signature} cannot be called: {error}; {remedy}") from error
    try:
        model = factory(**arguments)
    except Exception as error:  # the user's module runs here and may raise any exception; the message shows it
        raise NnormExportError(
            f"{spec} failed: {described(error)}; correct the factory, or its arguments with --model-arg key=value"
        ) from error
    if not isinstance(model, nn.Module):
        raise NnormExportError(
            f"{spec} returned a {type(model).__name__}; name a function that returns a torch.nn.Module"
        )
    return model

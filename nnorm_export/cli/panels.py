"""Helpers that declare options: their panel in ``--help``, their choices and their completion."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import typer


def _panel(name: str | None) -> Callable[..., Any]:
    """Returns a function that declares an option in the panel ``name`` of ``--help``.

    The function takes the option's flags and metavar (``--checkpoint -c FILE``), help, and settings of typer.Option.
    """

    def option(words: str, text: str, **settings: Any) -> Any:
        flags = [word for word in words.split() if word.startswith("-")]
        metavar = next((word for word in words.split() if not word.startswith("-")), None)
        return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=name, **settings)

    return option


def completing(names: str) -> dict[str, Any]:
    """Settings of typer.Option: completion from ``package.module:NAMES``, which is imported only for a completion."""
    return {"autocompletion": lambda incomplete: [name for name in _named(names) if name.startswith(incomplete)]}


def one_of(names: str, hints: Mapping[str, str] | None = None, spelled: Callable[[str], str] = str) -> dict[str, Any]:
    """Settings of typer.Option: the value is one of ``package.module:NAMES``, which ``--help`` does not import.

    Args:
        hints: other values that a user may try -> the hint in the error.
        spelled: returns the name for another spelling of it.
    """

    def parse(value: str) -> str:
        value = spelled(value)
        if value not in _named(names):
            hint = f" {hints[value]}" if hints and value in hints else ""
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(_named(names))}.{hint}")
        return value

    return {"parser": parse, **completing(names)}


def _named(names: str) -> list[str]:
    module, _, attribute = names.partition(":")
    return list(getattr(importlib.import_module(module), attribute))


general, model, inputs, file = map(_panel, (None, "Model", "Inputs", "File"))
onnx, pytorch, comparison = map(_panel, ("ONNX", "TorchScript and pt2", "Comparison"))
certificate, output, shapes = map(_panel, ("Certificate", "Output", "Shapes"))
quantization, metric = map(_panel, ("Quantization", "Metric"))
engine, server, tuning, hub = map(_panel, ("Engine", "Server", "Tuning", "Hub"))
cluster = _panel("Kubernetes and KServe")

"""Runs code and commands where importing torch fails; their outcomes go to stdout, as JSON.

    python run_without_torch.py serving|broken|old < '[["python", "nnorm_export.freeze"], ["command", "doctor"]]'

``serving``: only what ``pip install 'nnorm_export[onnxruntime]'`` brings can be imported. ``broken``: a torch whose
shared library is not found. ``old``: one of a version that is too old.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import shlex
import sys
import types
from collections.abc import Callable
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BROKEN = "libtorch_cpu.so: cannot open shared object file"
OLD = "2.5.1"


class _Broken:
    """A finder in whose torch a shared library is missing."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torch":
            raise ImportError(BROKEN, name="torch")


def take_away(is_gone: Callable[[str], bool]) -> None:
    """Takes distributions away, by their names, as on a machine where they are not installed."""
    owned = {"torch": ["torch"], **importlib.metadata.packages_distributions()}  # in Python 3.10 it may lack some
    for module, owners in owned.items():
        if all(map(is_gone, map(canonicalize_name, owners))):
            sys.modules[module] = None  # type: ignore[assignment]
    version = importlib.metadata.version

    def version_of_the_rest(name: str) -> str:
        if is_gone(canonicalize_name(name)):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = version_of_the_rest


def take_away_torch() -> None:
    take_away(lambda name: name == "torch")


def _serving() -> set[str]:
    """The distributions that pip installs for a machine that serves, by their metadata."""
    names: set[str] = set()
    left = ["nnorm_export", "onnxruntime"]
    while left:
        name = canonicalize_name(left.pop())
        if name not in names:
            names.add(name)
            required = map(Requirement, importlib.metadata.requires(name) or ())
            left += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert "torch" not in names, f"torch is required, by pyproject.toml or by an installation before it: {names}"
    return names


def _python(code: str) -> dict[str, Any]:
    try:
        exec(code, {"nnorm_export": __import__("nnorm_export")})
    except Exception as error:
        names = [each.__name__ for each in type(error).__mro__]
        return {"is": names, "message": str(error), "code": getattr(error, "exit_code", None)}
    return {"is": [], "message": "", "code": 0}


def _command(line: str) -> dict[str, Any]:
    from nnorm_export.cli import run  # noqa: PLC0415 - without torch

    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = run(shlex.split(line))
    return {"code": code, "message": errors.getvalue(), "output": output.getvalue()}


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "serving":
        brought = _serving()
        take_away(lambda name: name not in brought)
    elif how == "broken":
        sys.meta_path.insert(0, _Broken())  # type: ignore[arg-type]
    else:
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch"].__version__ = OLD  # type: ignore[attr-defined]
    torch = sys.modules.get("torch")
    run: dict[str, Callable[[str], dict[str, Any]]] = {"python": _python, "command": _command}
    outcomes = [run[kind](text) for kind, text in json.load(sys.stdin)]
    assert sys.modules.get("torch") is torch
    print(json.dumps(outcomes))

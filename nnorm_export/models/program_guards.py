"""The conditions on lengths that an exported program keeps, and examples for which they do not hold.

A program refuses lengths beyond them, and no other format keeps them. The operators of the program ask for some of
them, a view of pairs for an even length. Others are what is left of a branch of forward, and the program does not hold
the other branch. To tell them apart, the program is traced again without them: the operators ask again.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from nnorm_export.models.arguments import shapes_like, tensor_names, unbind
from nnorm_export.models.guards import Axes, BeyondGuard, Condition, Search, axes_of, search
from nnorm_export.models.program_axes import range_of, shapes_of
from nnorm_export.process import redirected


def without_guards(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """The module of ``program``, which runs beyond the conditions that the program keeps."""
    # Older releases of torch keep none.
    options = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
    return program.module(**options)


def beyond_program_guards(
    program: torch.export.ExportedProgram, module: torch.nn.Module, example: dict[str, Any]
) -> tuple[Search, BeyondGuard | None]:
    """(beyond guards of operators, beyond one of a branch): inputs that the operators of ``program`` take.

    Args:
        module: of :func:`without_guards`.
        example: the inputs with which the program was traced, by the names of the module's parameters.
    """
    axes = axes_of(shapes_of(program), example)
    ranges = {symbol: range_of(program, symbol) for symbol in axes.places}
    known = {code: _condition(code, axes) for code in _codes(program, axes)}
    conditions = {code: condition for code, condition in known.items() if condition is not None}
    result = search(conditions.values(), axes, ranges, module)
    if not result.found and not result.untried and len(conditions) == len(known):
        return result, None
    of_operators = set(_codes(_traced_again(program, module, axes), axes))
    branches = search([conditions[code] for code in conditions if code not in of_operators], axes, ranges, module)
    untried = [*branches.untried, *(code for code in known if code not in conditions and code not in of_operators)]
    return replace(result, untried=untried), branches.found[0] if branches.found else None


_COUNTED = re.compile(r"L\['flat_args'\]\[(\d+)\]")  # how torch.export names an input with strict=True


def _is_strict(program: torch.export.ExportedProgram) -> bool:
    return any(map(_COUNTED.search, getattr(program, "_guards_code", ())))


def _codes(program: torch.export.ExportedProgram | None, axes: Axes) -> list[str]:
    """The conditions as torch.export writes them with strict=False: ``L['x'].size()[2] <= L['x'].size()[3]``."""
    paths = [f"L{pytree.keystr(path)}" for path, _ in pytree.tree_flatten_with_path(axes.example)[0]]

    def named(match: re.Match[str]) -> str:
        return paths[int(match[1])] if int(match[1]) < len(paths) else match[0]

    return [_COUNTED.sub(named, code) for code in getattr(program, "_guards_code", ())]


def _condition(code: str, axes: Axes) -> Condition | None:
    """The condition in ``code``; None if it is not one of lengths."""
    paths = [
        f"L{pytree.keystr(path)}.size()"
        for path, leaf in pytree.tree_flatten_with_path(axes.example)[0]
        if isinstance(leaf, Tensor)
    ]
    evaluated, text = code, code
    symbols: set[sympy.Symbol] = set()
    for path, name, shape in zip(paths, tensor_names(axes.example), axes.shapes, strict=False):
        for axis, length in enumerate(shape):
            if (size := f"{path}[{axis}]") in code:
                symbols |= getattr(length, "free_symbols", set())
                evaluated = evaluated.replace(size, f"({PythonPrinter().doprint(length)})")
                text = text.replace(size, f"{name}.shape[{axis}]")
    if "L[" in evaluated or not symbols or not symbols <= {*axes.places}:
        return None
    ordered = sorted(symbols, key=str)
    # torch.export executes this text too, when it makes the module of the program.
    holds = eval(f"lambda {', '.join(map(str, ordered))}: {evaluated}", {**SYMPY_INTERP, "math": math})
    return Condition(text, ordered, frozenset(map(int, re.findall(r"(?<![\w.\[])\d+", text))), holds)


def _traced_again(
    program: torch.export.ExportedProgram, module: torch.nn.Module, axes: Axes
) -> torch.export.ExportedProgram | None:
    """The program of ``module`` with the axes of ``program``; None if torch.export refuses it."""
    tensors = iter(axes.shapes)
    check: Any = torch._check

    def hint(length: Any) -> Any:
        low, high = range_of(program, length)
        return torch.export.Dim.AUTO(min=low, **({} if high == math.inf else {"max": int(high)}))

    def hints(leaf: Any) -> Any:
        shape = next(tensors) if isinstance(leaf, Tensor) else ()
        return {axis: hint(length) for axis, length in enumerate(shape) if _is_dynamic(length)} or None

    def relate(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tells torch.export which axes depend on others."""
        sizes = [leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of = {symbol: sizes[number][axis] for symbol, (number, axis) in axes.places.items()}
        for number, shape in enumerate(axes.shapes):
            for axis, length in enumerate(shape):
                if _is_dynamic(length) and length.free_symbols <= {*of} and axes.places.get(length) != (number, axis):
                    symbols = list(length.free_symbols)
                    check(sizes[number][axis] == sympy.lambdify(symbols, length)(*map(of.__getitem__, symbols)))

    args, kwargs = unbind(module, axes.example)
    hook = module.register_forward_pre_hook(relate, with_kwargs=True)
    try:
        with redirected(lambda *_: None, "stdout", "stderr"):
            shapes = shapes_like(axes.example, hints)
            # With the strictness of the program, because terms stand in the order of torch's symbols.
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=_is_strict(program))
    # torch.export raises exceptions of many unrelated types. Without a trace each condition counts as one of a branch.
    except Exception:
        return None
    finally:
        hook.remove()


def _is_dynamic(length: Any) -> bool:
    return bool(getattr(length, "free_symbols", None))

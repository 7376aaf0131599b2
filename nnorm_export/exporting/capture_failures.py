"""Why torch.export makes no program of a model: the line of the user's code, and what to write there."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

from sympy import Symbol
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nnorm_export.errors import first_line
from nnorm_export.exporting.request import Frozen
from nnorm_export.freezing.attributes import about_gradients

# What torch.export says of dynamic_shapes that do not fit the inputs: then lengths are not the cause.
_WRONG_NAMES = "top-level keys must be the arg names|mismatch between the structure|Unexpected dimension mapped"
_OF_LENGTHS = r"onstraint|specializ|dynamic_shapes|Dim\b|generated guard|must always be equal|Expected op to be"
_ASSERTED = r"Expected op to be '==', got \S+ for (.+)"  # torch's own assertion, of a condition on a product of lengths
_FIXED = r"specialized it to be a constant \((\d+)\)"
# Of a line that fixes a length: what it has, and what to do.
_CURES = (
    (
        r"\b(for|while)\b|\b(range|map|zip|enumerate)\(",
        "A program holds a loop over a length as often as it ran for the example. Compute all rows at once, with "
        "operators of tensors or torch.vmap; or export TorchScript with method='script' (--target torchscript --method "
        "script), which keeps loops.",
    ),
    (
        r"\bif\b|\belse\b|\bassert\b|\bmatch\b",
        "A file has one path of a branch on lengths. Give the axis a range in which every length takes the same path "
        "(--dynamic 'x:1=seq[2..300]'), give axes that must be equal one name, or fix the axis.",
    ),
    (r"\b(len|int)\(", "len(x) and int(x.shape[0]) fix the length at that of the example: write x.shape[0]."),
    (r"""\b[rR]?f[rR]?["']|\.format\(|\bstr\(""", "A text of a length fixes it: leave the length out of the text."),
    ("", "Write x.shape[0], or -1 in a view, in place of a number."),
)
_UNKNOWN = "len(x), int(x.shape[0]), a loop over x or a number in a view does that: write x.shape[0]."


def unknown_shapes(error: Exception) -> bool:
    """Whether ``error`` is one of dynamic_shapes that do not fit the inputs."""
    return re.search(_WRONG_NAMES, str(error)) is not None


def fixes_lengths(error: Exception) -> bool:
    """Whether ``error`` is one of a dynamic axis that forward gives one length."""
    return re.search(_FIXED, str(error)) is not None


def has_conditions(error: Exception) -> bool:
    """Whether ``error`` is one of conditions on lengths that torch.export could not prove."""
    return re.search(f"generated guard|{_ASSERTED}", str(error)) is not None


def message(frozen: Frozen, errors: Sequence[Exception], is_dynamic: bool) -> str:
    """What the user reads.

    Args:
        errors: of each way of tracing.
        is_dynamic: whether an axis is dynamic.
    """
    error, others = errors[0], errors[1:]
    what = f"torch.export cannot trace {type(frozen.module).__name__}"
    remedy = _about_lengths(frozen, error) if is_dynamic and re.search(_OF_LENGTHS, str(error)) else ""
    if gradients := about_gradients(frozen.module):
        if "fake tensor in the exported program" in str(error):  # torch's text names no cause
            return f"{what}: {gradients}"
        remedy = f"\nPerhaps because {gradients}."
    elif cache := re.search(r"<class 'transformers\.[\w.]*\.(\w*Cache\w*)'>", str(error)):
        remedy = (
            f"\ntorch.export does not see the tensors in a {cache[1]}. Export without a cache "
            "(kwargs={'use_cache': False}, or model.config.use_cache = False), or give the keys and values in a "
            "transformers.DynamicCache."
        )
    elif unknown := re.search(r"(?:Found|Unsupported input type) <class '(?:[^']*\.)?(\w+)'>", str(error)):
        remedy = (
            f"\nIf {unknown[1]} is a dataclass, call torch.export.register_dataclass({unknown[1]}) first; "
            "else let the model take and return tensors, tuples and dicts."
        )
    if fixed := re.search(_FIXED, str(error)):
        axis = "the first axis of its inputs, the batch," if frozen.dynamic_batch else "a dynamic axis"
        reason = f"its code fixes {axis} at {fixed[1]}, the length in the example"
        where = _line_that_fixes(error) or _last_line(error) or next(filter(None, map(_last_line, others)), "")
        line = where.partition("\n")[2]
        cure = next(cure for pattern, cure in _CURES if re.search(pattern, line)) if line else _UNKNOWN
        also = [other for other in others if not fixes_lengths(other) or _last_line(other) not in ("", where)]
        if where and also:  # the way of tracing that takes this line
            cure += f" torch.export(strict=True) takes that line, and stops at another: {_shortly(also[0])}"
        return f"{what}: {reason}{_indented(where)}\n{cure}{remedy}"
    where = _last_line(error) or next(filter(None, map(_last_line, others)), "")
    return f"{what}: {_reason(error)}{_indented(where)}{remedy}"


def _about_lengths(frozen: Frozen, error: Exception) -> str:
    if frozen.dynamic_batch:
        which = "The model does not take every length of the first axis. " if has_conditions(error) else ""
        return (
            f"\n{which}The first axis of the inputs is taken to be a batch of any size. Export with "
            "dynamic_shapes={} (--fixed-shape) to fix every axis, or say which are dynamic (--dynamic)."
        )
    if unknown_shapes(error):
        return ""
    remedy = (
        "\nThe model does not take every length of the dynamic axes. Give the lengths that it takes, as in "
        "Dim('seq', min=6) (--dynamic 'x:1=seq[6..]'), give axes that must be equal one name, or leave out "
        "axes that the model's code fixes."
    )
    if has_conditions(error):
        remedy += " An axis with a name alone, 'seq' in place of Dim('seq'), takes conditions that torch cannot prove."
    return remedy


_ADVICE = re.compile(
    r"\n\s*(The following call raised|To fix the error|Suggested fixes|For more information|The error|User stack)"
)
_FRAME = re.compile(r'File "[^"]+", line \d+, in [\w<>]+(?:\n {4,}[^\n]+)?')  # code of a console has no source


def _reason(error: Exception) -> str:
    """torch's first words, without its advice on flags that users do not have."""
    if condition := re.search(_ASSERTED, str(error)):
        return f"forward has a condition on lengths that torch.export cannot express: {condition[1]}"
    first = _ADVICE.split(str(error).strip())[0].partition("\nFrom user code")[0].strip()
    lines = [line.partition(" If you're using")[0] for line in first.splitlines() if "TORCH_LOGS" not in line][:6]
    return f"{type(error).__name__}: " + "\n".join(lines)


def _shortly(error: Exception) -> str:
    why = first_line(error)[:200]
    if fixed := re.search(_FIXED, str(error)):
        why = f"it fixes the axis at {fixed[1]}"
    elif condition := re.search(r"generated guard (.*?)\.?(\n|$)", str(error)):
        why = f"it asks for {condition[1]}, which torch cannot prove of every length"
    return f"{why}{_indented(_last_line(error))}"


def _last_line(error: Exception) -> str:
    """The last line of the user's code in the text of ``error``, as a traceback shows it."""
    frames = [frame for frame in _FRAME.findall(str(error)) if "/torch/" not in frame]
    own = [frame for frame in frames if "/lib/python" not in frame]  # not of a library
    return str((own or frames or [""])[-1])


def _line_that_fixes(error: BaseException | None) -> str:
    """The line that made a number of a length, from torch's record of the symbols, where it is a line of the user's."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for value in [*frame.f_locals.values()] if "/torch/" in frame.f_code.co_filename else ():
                if isinstance(value, ShapeEnv) and (line := _recorded_line(value)):
                    return line
        error = error.__cause__ or error.__context__
    return ""


def _recorded_line(symbols: ShapeEnv) -> str:
    for symbol, value in symbols.replacements.items():
        record = getattr(symbols, "replacements_slocs", {}).get(symbol)
        frame = getattr(record, "framework_loc", None)
        if not isinstance(frame, traceback.FrameSummary) or "/torch/" in frame.filename:
            continue
        if isinstance(symbol, Symbol) and value.is_number:
            source = f"\n    {frame.line}" if frame.line else ""
            return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}{source}'
    return ""


def _indented(where: str) -> str:
    return f"\n{where}" if where else ""

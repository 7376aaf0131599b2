"""From an eval-mode module to a ``torch.export.ExportedProgram``."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nnorm_export.errors import ExportError
from nnorm_export.exporting.decompose import drop_source_lines
from nnorm_export.models.arguments import unbind
from nnorm_export.models.attention import without_fused_attention

_LOUD = (
    "torch.onnx",
    "torch.export",
    "torch._export",
    "torch._dynamo",
    "torch.fx.experimental",
    "onnxscript",
    "onnx_ir",
)


@contextlib.contextmanager
def exporting_state(*, fused_attention: bool = False) -> Iterator[None]:
    """What tracing needs of the process, put back afterwards.

    torch's exporter logs every optional package that is not installed, and warns of its own internals. It cannot
    express PyTorch's fused attention, which TorchScript can: ``fused_attention`` leaves that as the user has it.
    """
    attention: contextlib.AbstractContextManager[None] = (
        contextlib.nullcontext() if fused_attention else without_fused_attention()
    )
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.no_grad(), attention:
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def trace(
    frozen: nn.Module, arguments: dict[str, Any], dynamic_shapes: Any, *, dynamic_batch: bool
) -> torch.export.ExportedProgram:
    """The program of ``frozen`` for ``arguments`` (name -> value); ``dynamic_batch`` if the shapes are not the user's.

    Raises:
        ExportError: the model cannot be traced; the message carries torch's reason and the line of the model.
    """
    args, kwargs = unbind(frozen, arguments)
    if dynamic_shapes:
        _refuse_dynamic_var_keyword(frozen, arguments)
    printed = io.StringIO()  # by the model, which is passed on, or by torch, which prints a graph before it raises
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            program = torch.export.export(frozen, args, kwargs, dynamic_shapes=dynamic_shapes or None)
        sys.stderr.write(printed.getvalue())
        drop_source_lines(program)
        return program
    except Exception as error:  # torch.export raises dozens of unrelated types
        remedy = ""
        if dynamic_batch and re.search(r"onstraint|specializ|dynamic_shapes|Dim\b", str(error)):
            remedy = (
                "\nThe model's code fixes the first axis of its inputs, which is taken to be a batch of any size. "
                "Export with dynamic_shapes={} (--fixed-shape) to fix every axis, or say which are dynamic."
            )
        raise ExportError(f"torch.export cannot trace {type(frozen).__name__}: {_reason(error)}{remedy}") from error


def _refuse_dynamic_var_keyword(model: nn.Module, arguments: dict[str, Any]) -> None:
    """torch.export fails on them with an assertion of its own."""
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and arguments.get(parameter.name):
            names = ", ".join(arguments[parameter.name])
            raise ExportError(
                f"torch.export cannot make axes dynamic where forward takes **{parameter.name}: name {names} in its "
                "signature, or export with dynamic_shapes={} (--fixed-shape)"
            )


_ADVICE = re.compile(
    r"\n\s*(The following call raised|To fix the error|Suggested fixes|For more information|The error)"
)
_FRAME = re.compile(r'File "[^"]+", line \d+, in \w+\n\s+[^\n]+')


def _reason(error: Exception) -> str:
    """torch's first words and the last line of the user's code, without its advice on flags that users do not have."""
    text = str(error).strip()
    first = _ADVICE.split(text)[0].partition("\nFrom user code")[0].strip()
    lines = [line.partition(" If you're using")[0] for line in first.splitlines() if "TORCH_LOGS" not in line][:6]
    frames = [frame for frame in _FRAME.findall(text) if "/torch/" not in frame]
    where = f"\n{frames[-1]}" if frames else ""
    return f"{type(error).__name__}: " + "\n".join(lines) + where

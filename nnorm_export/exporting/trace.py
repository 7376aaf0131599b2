"""From an eval-mode module to a ``torch.export.ExportedProgram``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nnorm_export.attention import without_fused_attention
from nnorm_export.errors import ExportError
from nnorm_export.exporting.arguments import unbind


@contextmanager
def exporting_state() -> Iterator[None]:
    """What tracing needs of the process, put back afterwards.

    torch's exporter logs every optional package that is not installed, and warns of its own internals.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad(), without_fused_attention():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def trace(frozen: nn.Module, arguments: dict[str, Any], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    """The program of ``frozen`` for ``arguments`` (name -> value).

    Raises:
        ExportError: the model cannot be traced; the message carries torch's reason and the line of the model.
    """
    args, kwargs = unbind(frozen, arguments)
    try:
        return torch.export.export(frozen, args, kwargs, dynamic_shapes=dynamic_shapes or None)
    except Exception as error:  # torch.export raises dozens of unrelated types
        raise ExportError(f"torch.export cannot trace {type(frozen).__name__}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """torch's own words up to its advice, which is long and about flags that our users do not have."""
    text = str(error).strip()
    for marker in ("\nThe following call raised", "\nFrom user code", "\nTo fix the error", "\nSuggested fixes"):
        head, found, tail = text.partition(marker)
        if found and marker == "\nFrom user code":
            text = head + found + tail.partition("\n\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

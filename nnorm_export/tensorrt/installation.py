"""The installed TensorRT and Polygraphy: importing them, and their errors in plain words."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.process import LOCK, redirected
from nnorm_export.tensorrt.rtx import REMEDY, import_rtx


def import_polygraphy(*, rtx: bool = False) -> tuple[Any, Any]:
    """``polygraphy.backend.trt``, and ``tensorrt`` or, for TensorRT-RTX, ``tensorrt_rtx``.

    Raises:
        RuntimeMissingError: one of them is not installed, TensorRT's libraries are not found, or Polygraphy already
            serves the other TensorRT in this process.
    """
    if rtx:
        tensorrt = import_rtx()
        try:
            return _polygraphy_for(rtx), tensorrt
        except ImportError as error:
            raise RuntimeMissingError(f"Polygraphy cannot be used here ({error}): {REMEDY}") from None
    try:
        # They are extras. Polygraphy imports TensorRT when it first needs it, so TensorRT is imported here.
        tensorrt = importlib.import_module("tensorrt")
        return _polygraphy_for(rtx), tensorrt
    except ImportError as error:
        raise RuntimeMissingError(
            f"TensorRT cannot be used here ({error}): pip install 'nnorm_export[tensorrt]', on a machine with an "
            "NVIDIA GPU and its driver. Engines are built and run on the kind of GPU that they are for"
        ) from None


def _polygraphy_for(rtx: bool) -> Any:
    """Polygraphy's module of TensorRT, which is for TensorRT or for TensorRT-RTX, as it was when it was imported."""
    config: Any = importlib.import_module("polygraphy.config")
    module = "polygraphy.backend.trt"
    serves_rtx: bool = config.USE_TENSORRT_RTX
    if module in sys.modules and serves_rtx is not rtx:
        names = ("TensorRT", "TensorRT-RTX") if rtx else ("TensorRT-RTX", "TensorRT")
        raise RuntimeMissingError(
            f"Polygraphy, which runs engines, serves {names[0]} in this process; use {names[1]} in another process"
        )
    config.USE_TENSORRT_RTX = rtx
    return importlib.import_module(module)


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turns what TensorRT and Polygraphy raise and print into one error; nothing else is printed.

    Raises:
        ModelFileError: TensorRT failed, ``doing`` what the words say.
    """
    log = io.StringIO()
    try:
        # stderr is not redirected: the command line shows its progress there.
        with LOCK, _logging_into(log), redirected(lambda text, _: log.write(text), "stdout"):
            yield
    except NnormExportError:
        raise
    except Exception as error:  # TensorRT's exceptions share no public base
        said = log.getvalue().strip()
        details = said if str(error) in said else f"{said}\n{error}".strip()
        raise ModelFileError(
            f"{path}: TensorRT cannot {doing}. It needs an NVIDIA GPU and its driver. TensorRT says:\n{details}"
        ) from error


@contextlib.contextmanager
def _logging_into(log: io.StringIO) -> Iterator[None]:
    """Writes the errors that Polygraphy logs, TensorRT's included, into ``log`` alone, and drops its other messages."""
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    by_logging, handler = logger.use_python_logging_system, logging.StreamHandler(log)
    logger.use_python_logging_system = True
    records = logger.python_logger
    propagate, records.propagate = records.propagate, False
    records.addHandler(handler)
    try:
        with logger.verbosity(logger.ERROR):
            yield
    finally:
        records.removeHandler(handler)
        records.propagate = propagate
        logger.use_python_logging_system = by_logging

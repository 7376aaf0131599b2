"""The errors of this package. Each message names the layer or file, the cause and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # 128 + SIGINT, as in shells; click's own exit code, 1, means a mismatch here


class NnormExportError(Exception):
    """The base of all errors. The command line prints one line on stderr and exits with :attr:`exit_code`."""

    exit_code = 2  # usage or bad input


class FreezeError(NnormExportError):
    """A layer cannot be turned into an eval-mode operator."""


class ExportError(NnormExportError):
    """A model cannot be traced, translated or written."""


class CheckpointError(NnormExportError):
    """A checkpoint cannot be read, or does not fit the model."""


class ModelFileError(NnormExportError):
    """A file cannot be read as a model."""


class InputError(NnormExportError, ValueError):
    """Inputs do not fit the model or the file."""


class ParityError(NnormExportError):
    """A written model computes other values than PyTorch; ``advice`` says what to do next, or is empty."""

    exit_code = 1

    def __init__(self, finding: str, advice: str = "") -> None:
        super().__init__(f"{finding}\n{advice}" if advice else finding)
        self.finding = finding
        self.advice = advice


class RuntimeMissingError(NnormExportError):
    """A requested runtime, provider or plugin is not installed."""

    exit_code = 3


class PyTorchMissingError(RuntimeMissingError, ModuleNotFoundError):
    """The request needs PyTorch, which is not installed or too old.

    It is an ImportError too, because ``from nnorm_export.layers import …`` raises it, and programs for which the layers
    are optional catch ImportError.
    """


def class_and_first_line(error: BaseException) -> str:
    """The class and the first line of ``error``."""
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def reported_as(
    kind: type[NnormExportError], what: str, remedy: str, reason: Callable[[Exception], str] = class_and_first_line
) -> Iterator[None]:
    """Raises ``kind`` in place of any exception of other code: what failed, why, and what the user can do.

    That exception stays the cause, which --verbose shows. Errors of this package pass.
    """
    try:
        yield
    except NnormExportError:
        raise
    except Exception as error:  # other libraries raise exceptions of every class; the user reads reason and remedy
        why = reason(error)
        end = "\n" if "\n" in why else ". "
        raise kind(f"{what}: {why}{end}{remedy}") from error


def root_cause(error: BaseException) -> str:
    """The class and the first line of the first error in the chain of causes of ``error``."""
    while error.__cause__ is not None:
        error = error.__cause__
    return class_and_first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of the message of another library's error; the error's class if it has no message.

    Only the beginning of a very long line is returned, because a line may quote a whole file. The colors that torch
    adds to the messages of its exporter are removed.
    """
    line = (_COLOR.sub("", str(error)).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


_MOST_CHARACTERS = 1000  # of a line
_COLOR = re.compile(r"\x1b\[[0-9;]*m")

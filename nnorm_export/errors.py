"""Every error that this package raises on purpose. Each message names the layer or file, the cause and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class NnormExportError(Exception):
    """Base of all of them; the command line turns it into one line on stderr and :attr:`exit_code`."""

    exit_code = 2  # usage or bad input


class FreezeError(NnormExportError):
    """A layer cannot be turned into an eval-mode operator."""


class ExportError(NnormExportError):
    """A model cannot be traced, translated or written."""


class CheckpointError(NnormExportError):
    """A checkpoint cannot be read, or does not fit the model."""


class ModelFileError(NnormExportError):
    """A file is not a model that can be read."""


class InputError(NnormExportError, ValueError):
    """Inputs do not fit the model or the file."""


class ParityError(NnormExportError):
    """A written model does not compute what PyTorch computes; ``advice`` says what to do next, if anything helps."""

    exit_code = 1

    def __init__(self, finding: str, advice: str = "") -> None:
        super().__init__(f"{finding}\n{advice}" if advice else finding)
        self.finding = finding
        self.advice = advice


class RuntimeMissingError(NnormExportError):
    """A runtime, provider or plugin that was asked for is not installed."""

    exit_code = 3


class PyTorchMissingError(RuntimeMissingError, ModuleNotFoundError):
    """PyTorch is not installed or too old, and what was asked for needs it.

    It is an ImportError too, because ``from nnorm_export.layers import …`` raises it: programs that do without the
    layers expect one.
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
    except Exception as error:
        why = reason(error)
        end = "\n" if "\n" in why else ". "
        raise kind(f"{what}: {why}{end}{remedy}") from error


def root_cause(error: BaseException) -> str:
    """The class and the first line of the error that ``error`` came from in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return class_and_first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, whose messages may have dozens; its class if it has no message.

    A line may quote a whole file: only its beginning is returned. torch colors the messages of its exporter: the
    colors are left out.
    """
    line = (_COLOR.sub("", str(error)).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


_LONGEST_LINE = 1000  # characters
_COLOR = re.compile(r"\x1b\[[0-9;]*m")

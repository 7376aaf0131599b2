"""The command line ``nnorm-export``. It parses options and prints results; the package's functions do the work."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from nnorm_export._version import __version__
from nnorm_export.cli.bisect import bisect
from nnorm_export.cli.card import card
from nnorm_export.cli.convert import convert
from nnorm_export.cli.doctor import doctor
from nnorm_export.cli.engine import engine
from nnorm_export.cli.export import export
from nnorm_export.cli.inspect import inspect
from nnorm_export.cli.optimize import optimize
from nnorm_export.cli.options import grouped
from nnorm_export.cli.output import BROKEN_PIPE, Command, Group, unwritable
from nnorm_export.cli.quantize import quantize
from nnorm_export.cli.serve_repo import serve_repo
from nnorm_export.cli.tune import tune
from nnorm_export.cli.verify import verify
from nnorm_export.errors import INTERRUPTED, NnormExportError

app = typer.Typer(
    name="nnorm-export",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (export, verify, bisect, doctor, inspect, convert, optimize, quantize, tune, engine, serve_repo, card):
    app.command(cls=Command)(grouped(command))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nnorm-export {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 all well, 1 mismatch, 2 usage or bad input, 3 a runtime is missing, 70 a fault to report."
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Deploy networks with normality normalization: one ONNX file that runs everywhere, compared with PyTorch."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, ``["inspect", "net.onnx", "--json"]`` or the process's own, and returns the exit code.

    The function raises nothing and does not end the process, so that programs and tests may call it repeatedly.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without λ still shows the rest
    try:
        app(args=None if arguments is None else list(arguments), prog_name="nnorm-export")
    except SystemExit as exited:
        return _flushed(exited.code if isinstance(exited.code, int) else 0 if exited.code is None else 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # from --help, --version or --install-completion, which no Command handles
        if code := _flushed(0):  # standard output cannot be written, and _flushed has printed the error
            return code
        print(f"error: {unwritable(error) if error.filename is None else error}", file=sys.stderr)
        return NnormExportError.exit_code
    return _flushed(0)


def _flushed(code: int) -> int:
    """Flushes standard output and returns the exit code. Python would report a closed pipe as an error at the end."""
    if sys.stdout is None:  # the shell has closed standard output
        return code
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if (
            code >= NnormExportError.exit_code
        ):  # an error was printed; it may be this one, of text that is still buffered
            return code
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            print(f"error: {unwritable(error)}", file=sys.stderr)
            return code or NnormExportError.exit_code
        return code or BROKEN_PIPE
    return code


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())

"""The command line ``nnorm-export``: it parses and prints; everything else is the package's own functions."""

from __future__ import annotations

from typing import Annotated

import typer

from nnorm_export._version import __version__
from nnorm_export.cli.bisect import bisect
from nnorm_export.cli.doctor import doctor
from nnorm_export.cli.engine import engine
from nnorm_export.cli.export import export
from nnorm_export.cli.inspect import inspect
from nnorm_export.cli.optimize import optimize
from nnorm_export.cli.options import grouped
from nnorm_export.cli.output import Command
from nnorm_export.cli.serve_repo import serve_repo
from nnorm_export.cli.verify import verify

app = typer.Typer(
    name="nnorm-export",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (export, verify, bisect, doctor, inspect, optimize, engine, serve_repo):
    app.command(cls=Command)(grouped(command))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nnorm-export {__version__}")
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 all well, 1 mismatch, 2 usage or bad input, 3 a runtime is missing.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Deploy networks with normality normalization: one ONNX file that runs everywhere, proved equal to PyTorch."""


def main() -> None:
    """The console script."""
    app(prog_name="nnorm-export")

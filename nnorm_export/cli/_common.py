"""What the commands share: the options declared once, errors and exit codes, and what goes to which stream.

Results go to stdout; notices, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from nnorm_export.errors import NnormExportError

INTERRUPTED = 130  # as shells count it; click's own 1 would mean a mismatch here

_MODEL = typer.Option(
    "--model",
    "-m",
    metavar="MODULE:FACTORY",
    help="The model: package.module:factory (a function or class without required arguments, or an nn.Module), "
    "looked for in the current directory first; or a .pt2 file.",
    rich_help_panel="Model",
)
ModelOption = Annotated[str, _MODEL]
OptionalModelOption = Annotated[str | None, _MODEL]
ModelArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-arg",
        metavar="KEY=VALUE",
        help="An argument for the factory; a Python literal or text. Repeatable.",
        rich_help_panel="Model",
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="FILE",
        help="Trained weights: .pth, .pt, .ckpt, .safetensors.",
        rich_help_panel="Model",
    ),
]
CheckpointKeyOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-key",
        metavar="KEY",
        help="Where in the checkpoint the weights are, if not in the usual place: ema, swa.model.",
        rich_help_panel="Model",
    ),
]
TrustPickleOption = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Load a checkpoint that runs code. Only for files from someone you trust.",
        rich_help_panel="Model",
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="SPEC",
        help="An example input, in forward's order or by name: 8,3,32,32 or 'x:float32[8,3,32,32]' (random), "
        "or data.npz, x:data.npy, x:data.npz:key (real data verifies better). Repeatable.",
        rich_help_panel="Inputs",
    ),
]


def completing(names: str) -> Callable[[str], list[str]]:
    """A shell's completion from ``package.module:NAMES``, which is imported when it asks."""
    module, _, attribute = names.partition(":")

    def complete(incomplete: str) -> list[str]:
        known: Iterable[str] = getattr(importlib.import_module(module), attribute)
        return [name for name in known if name.startswith(incomplete)]

    return complete


complete_runtimes = completing("nnorm_export.runtimes:RUNTIMES")


RuntimeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=complete_runtimes,
        help="For ONNX onnxruntime (default), onnxruntime-cuda, tensorrt, or reference: onnx's own. Other files "
        "have one runtime each: tensorrt, torchscript, pt2, aoti.",
        rich_help_panel="Comparison",
    ),
]
PassthroughOption = Annotated[
    list[str] | None,
    typer.Option(
        "--passthrough",
        metavar="CLASS",
        help="A class that looks like an unknown normalization but is plain PyTorch: take it as it is. Repeatable.",
        rich_help_panel="Model",
    ),
]
ExternalDataOption = Annotated[
    bool | None,
    typer.Option(
        "--external-data/--no-external-data",
        help="Keep the weights in FILE.data, or never; by default where they exceed 2 GiB.",
        rich_help_panel="Weights",
    ),
]
NoVerifyOption = Annotated[
    bool, typer.Option("--no-verify", help="Write the file without comparing it.", rich_help_panel="Output")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel="Output")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel="Output")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print more; tracebacks with errors.", rich_help_panel="Output")
]


class Command(TyperCommand):
    """A command whose NnormExportErrors become one message on stderr and the error's exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NnormExportError as error:
            if ctx.params.get("verbose"):
                traceback.print_exception(error)
            if ctx.params.get("json_output"):
                print_json({"error": str(error), "exit_code": error.exit_code})
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def working(what: str, *, quiet: bool) -> Iterator[None]:
    """A spinner where stderr is a terminal. The user's code may print, and stdout is for results alone."""
    console = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):  # of torch's own internals, not of the user's model
            warnings.simplefilter("ignore", category)
        if quiet or not console.is_terminal:
            yield
        else:
            with console.status(what):
                yield


def print_notices(notices: Iterable[str], *, quiet: bool) -> None:
    if not quiet:
        for notice in notices:
            typer.echo(f"note: {notice}", err=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), indent=2, default=str))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """``name  value`` lines; a long value goes on beneath itself."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, _plain(value))
    _print(table)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: bool = False) -> None:
    """A table whose first column is text, as are the others unless they are ``numbers``."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        justify: Any = "right" if numbers and index > 0 else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=index > 0)
    for row in rows:
        table.add_row(*map(_plain, row))
    _print(table)


def _print(renderable: Any) -> None:
    Console(highlight=False, soft_wrap=False).print(renderable)


def _plain(text: str) -> Text:
    return Text(text)  # brackets in values are not markup


def size_text(count: int) -> str:
    if count < 1000:
        return f"{count} bytes"
    power = min(int(math.log10(count) // 3), 3)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())

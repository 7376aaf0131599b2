"""The output of commands: results go to stdout; notices, progress and errors go to stderr."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from nnorm_export.cli.options import OutputOptions
from nnorm_export.cli.progress import description, shown_steps
from nnorm_export.cli.published import download_files
from nnorm_export.errors import INTERRUPTED, NnormExportError, ParityError
from nnorm_export.names import escaped, without_user
from nnorm_export.pytorch_missing import needed_by

if TYPE_CHECKING:
    from nnorm_export.metrics.gate import MetricReport
    from nnorm_export.parity.certificates.compare_bits import BitsReport
    from nnorm_export.parity.verdict.outcome import ParityReport

_PACKAGE = Path(__file__).resolve().parents[1]
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h, for an unexpected exception
BROKEN_PIPE = 141  # 128 + SIGPIPE, as in shells
_HOW_TO_REPORT = """
This is a fault of nnorm-export or of a library that it calls, and says nothing about the file. Please report it
with the output of the same command with --verbose, and that of nnorm-export doctor --json (see SECURITY.md for
how to report in private)."""
_UsageError: Any = typer.BadParameter.__bases__[0]  # of click, which newer versions of typer contain


def _with_plain_flags(params: list[Any]) -> list[Any]:
    """The parameters of a command, changed so that ``--help`` shows flags without ``<bool>``."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Group(TyperGroup):
    """All commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_plain_flags(super().get_params(ctx))


class Command(TyperCommand):
    """A command that prints every error as one message on stderr, and exits with the exit code of the error."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_plain_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        as_json = "--json" in args
        ctx.meta[COMMAND_LINE] = command_text(["nnorm-export", ctx.info_name, *args])
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if as_json:
                print_json({"error": error.format_message(), "exit_code": error.exit_code})
            raise

    def invoke(self, ctx: Any) -> Any:
        as_json, verbose = ctx.params.get("json_output"), ctx.params.get("verbose")
        command = f"nnorm-export {ctx.info_name}{' --model' if ctx.params.get('model') else ''}"
        try:
            with needed_by(command):
                download_files(ctx.params)
                return super().invoke(ctx)
        except _UsageError as error:
            if as_json:
                print_json({"error": error.format_message(), "exit_code": error.exit_code})
            raise
        except NnormExportError as error:
            _fail(error, str(error), error.exit_code, as_json, verbose)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise typer.Exit(BROKEN_PIPE) from None
        except SystemExit as error:  # from the user's code: exit code 0 would mean that the files are equal
            message = f"the model's code, or a library, ended the program: sys.exit({error.code!r})"
            _fail(error, message, NnormExportError.exit_code, as_json, verbose)
        except (OSError, MemoryError) as error:  # from the user's model or the disk
            message = f"{type(error).__name__}: {error}" if str(error) else "not enough memory"
            _fail(error, message, NnormExportError.exit_code, as_json, verbose)
        except typer.Exit:
            raise
        except Exception as error:  # a defect: Python would exit with 1, the code for results that differ
            _fail(error, f"unexpected {type(error).__name__}: {error}{_HOW_TO_REPORT}", UNEXPECTED, as_json, verbose)


def unwritable(error: OSError) -> str:
    """The message for an ``error`` of standard output."""
    return f"cannot write standard output: {error.strerror or error}. Check that its place has free space"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error: rich would exit with code 1, which means a mismatch."""
        raise BrokenPipeError


def _fail(error: BaseException, message: str, code: int, as_json: bool | None, verbose: bool | None) -> NoReturn:
    if verbose:
        echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    if as_json:
        with contextlib.suppress(OSError):  # the error may be that standard output cannot be written
            print_json({"error": message, "exit_code": code})
    echo(message, err=True, label="error")
    raise typer.Exit(code) from None


def shown(text: str) -> str:
    """``text`` with escapes for characters that a terminal interprets: control characters, line ends, bidi marks.

    Only the beginning of a very long text is shown, because a message may quote a whole file.
    """
    beginning = escaped(text[:_MOST_CHARACTERS])
    more = len(text) - _MOST_CHARACTERS
    return beginning if more <= 0 else f"{beginning}… ({more} more characters)"


_MOST_CHARACTERS = 20_000  # of a text


def command_text(words: Sequence[str]) -> str:
    """A command quoted for a shell, without the users and passwords of URLs, because others may read the report."""
    return shown(shlex.join(map(without_user, words)))


COMMAND_LINE = "nnorm_export.command_line"  # the key of the command's text in typer's context


def echo(text: str = "", *, err: bool = False, label: str = "") -> None:
    """Prints lines of text, each as :func:`shown` returns it.

    With a ``label``, the first line follows the label and the other lines are indented, so that no line looks like a
    new message.
    """
    lines = [shown(line) for line in text.split("\n")]
    if label:
        rest = [line if line.startswith(" ") else f"  {line}" for line in lines[1:]]
        lines = [f"{_colored(label, err)}: {lines[0]}", *rest]
    typer.echo("\n".join(lines), err=err)


def _colored(label: str, err: bool) -> str:
    """``label`` in its color, if the stream shows colors and NO_COLOR is not set."""
    console = _Console(stderr=err)
    return typer.style(label, _COLORS.get(label)) if console.color_system and not console.no_color else label


_COLORS = {"error": "red", "warning": "yellow", "DIFFERENT": "red", "NOT COMPARED": "red", "equal": "green"}


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, *rest: Any
) -> None:
    """Shows a warning of this package as one line, and other warnings as Python does, with their place in the code."""
    if Path(filename).is_relative_to(_PACKAGE):
        echo(str(message), err=True, label="warning")
    else:
        show(message, category, filename, *rest)


class Essential(str):
    """A notice that ``--quiet`` shows too: the command succeeded with other weights or checks than the user may think.

    A script that runs a command with ``--quiet`` and reads the exit code alone would otherwise ship random weights.
    """


@dataclass
class Output(OutputOptions):
    """Prints the progress and the result of a command, as the options say."""

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows the work ``what``, its steps and their clocks on a terminal; --verbose prints the times at the end.

        The output of the user's code goes to stderr.
        """
        console = _Console(stderr=True)
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):  # torch's own code causes these, not the user's model
                warnings.simplefilter("ignore", category)
            warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
            steps = None
            try:
                with shown_steps(shown(what), None if self.quiet or not console.is_terminal else console) as steps:
                    yield
            finally:
                if steps is not None and self.verbose and not self.quiet:
                    steps.end()
                    echo(str(steps), err=True, label="time")

    @contextlib.contextmanager
    def progressing(self, what: str) -> Iterator[Callable[[str, float], None] | None]:
        """Shows a progress bar if stderr is a terminal, and yields its update function (text, share done)."""
        console = _Console(stderr=True)
        if self.quiet or not console.is_terminal:
            yield None
            return
        columns = (SpinnerColumn(), description(), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=1.0)
            yield lambda phase, done: bar.update(task, description=f"{what}: {shown(phase)}", completed=done)

    def notices(self, notices: Iterable[str]) -> None:
        """Prints notices. ``--quiet`` leaves all but each :class:`Essential` notice out."""
        for notice in notices:
            if not self.quiet or isinstance(notice, Essential):
                echo(notice, err=True, label="note")

    def show(self, as_json: dict[str, Any], print_text: Callable[[], None]) -> None:
        """Prints the result of a command: as JSON, as text, or not at all.

        Raises:
            NnormExportError: standard output cannot be written.
        """
        try:
            if self.json_output:
                print_json(as_json)
            elif not self.quiet:
                print_text()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise NnormExportError(unwritable(error)) from error

    def fail(self, message: str) -> None:
        """Raises the ParityError of a command that has shown its result."""
        if self.json_output:
            echo(message, err=True, label="error")  # stdout already has the JSON object
            raise typer.Exit(ParityError.exit_code)
        raise ParityError(message)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), indent=2, default=str))


def _finite(value: Any) -> Any:
    """``value`` with infinity and NaN, which JSON does not have, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Prints a line with name and value for each fact that is not empty. Long values are wrapped in their column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    _print(table, (fact for fact in facts if fact[1]))


def one_line(message: str) -> str:
    """A message, which may have several lines, as one line."""
    return " ".join(message.split())


def print_table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: bool = False, apart: bool = False
) -> None:
    """Prints a table, with ``apart`` after an empty line; ``numbers`` aligns columns after the first on the right."""
    if apart:
        typer.echo()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        justify: Any = "right" if numbers and index > 0 else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=index > 0)
    _print(table, rows)


def _print(table: Table, rows: Iterable[Iterable[str]]) -> None:
    for row in rows:
        # Text, because rich would read brackets in a str as markup.
        table.add_row(*(Text(shown(cell), _COLORS.get(cell, "")) for cell in row))
    console = _Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNLIMITED_WIDTH  # no wrapping, so that grep finds whole names, paths and hashes
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    if not console.is_terminal:  # rich pads each line to the longest line
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    console.file.write(text)
    console.file.flush()  # before messages on stderr


_UNLIMITED_WIDTH = 100_000  # characters


def print_parity(report: ParityReport | None, *, other: str = "PyTorch", verbose: bool = False) -> None:
    """Prints a comparison with ``other``; None stands for ``--no-verify``.

    The greatest relative error is shown by ``verbose`` alone: outputs near 0 make it great, and it decides nothing.
    """
    if report is None:
        typer.echo(f"not compared with {other} (--no-verify)")
        return
    from nnorm_export.float16_range import about_float16
    from nnorm_export.parity.verdict.outcome import share_text

    by_bodies = [replace(output, name=f"{output.name}, by bodies") for output in report.by_bodies or ()]
    rows = [
        (
            output.name,
            share_text(output.allowed_share),
            f"{output.max_abs_diff:.1e}",
            *([f"{output.max_rel_diff:.1e}"] if verbose else ()),
            "-" if output.top1_agreement is None else f"{output.top1_agreement:.2%}",
            str(output.rows),
            output.verdict + (", which does not decide" if report.by_metric_alone and not output.passed else ""),
        )
        for output in (*report.outputs, *by_bodies)
    ]
    relative = ("max rel",) if verbose else ()
    print_table(("output", "error / allowed", "max abs", *relative, "top-1", "rows", ""), rows, numbers=True)
    print_facts((output.name, output.note) for output in report.outputs)
    if report.metric is not None:
        print_metric(report.metric)
    print_facts([("float16", about_float16(report.beyond_float16, fails=not report))])
    ran = f"{report.runtime} (normalizations: {implementations_text(report.implementations) or 'inlined'})"
    notes = [
        *(("suspect", suspect) for suspect in report.suspects),
        ("batch", report.least_batch),
        ("ignored", report.ignored),
        ("note", report.given_only),
        ("signature", report.signature),
    ]
    print_facts([("runtime", ran), ("criterion", report.criterion), *notes])


def print_metric(report: MetricReport) -> None:
    """Prints a metric of the user: its values, what is asked for, and the notes."""
    asked = f"; {report.asked} asked for" if report.asked else ""
    verdict = f": {report.verdict}" if report.asks or not report else ""
    print_facts([(f"metric {report.name}", f"{report.measured}{asked}{verdict}"), ("", report.note)])


def print_bits(report: BitsReport) -> None:
    """Prints a comparison of bits, without the verdict on different ones, which the error says."""
    rows = [
        (
            node.node,
            node.op_type,
            node.implementation or "-",
            _agreement(node.inputs_agree),
            _agreement(node.output_agrees),
        )
        for node in report.nodes
    ]
    rows += [(name, "output", "-", "-", _agreement(agrees)) for name, agrees in report.outputs.items()]
    print_table(("node", "op", "ran by", "bits it reads", "bits it computes"), rows)
    print_facts([("runs", " and ".join(report.runs)), ("bits", report.verdict if report else "")])


def _agreement(agrees: bool) -> str:
    return "equal" if agrees else "DIFFERENT"


def implementations_text(implementations: dict[str, str]) -> str:
    """``{"a": "kernel", "b": "body", "c": "kernel"}`` -> ``2 by kernel, 1 by body``."""
    return counted(Counter(f"by {implementation}" for implementation in implementations.values()))


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def size_text(count: int) -> str:
    if count < 1000:
        return f"{count} bytes"
    power = min(int(math.log10(count) // 3), 3)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"

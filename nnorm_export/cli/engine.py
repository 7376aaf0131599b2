"""``nnorm-export engine``."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli._common import (
    JsonOption,
    QuietOption,
    VerboseOption,
    counted,
    print_facts,
    print_json,
    print_notices,
    print_table,
    size_text,
    working,
)

if TYPE_CHECKING:
    from nnorm_export.tensorrt.engine import EngineReport

Shapes = dict[str, list[int]]

_SHAPE = re.compile(r"(?P<name>.+):(?P<lengths>\d+(?:\s*[,x]\s*\d+)*)")


def _shape_option(flag: str, word: str) -> Any:
    return typer.Option(
        flag,
        metavar="NAME:SHAPE",
        help=f"The {word} shape of an input: x:8,3,32,32. Repeatable.",
        rich_help_panel="Shapes",
    )


def engine(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="A file of nnorm-export's.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write; by default MODEL.plan beside the other.",
            rich_help_panel="File",
        ),
    ] = None,
    least: Annotated[list[str] | None, _shape_option("--min", "least")] = None,
    best: Annotated[list[str] | None, _shape_option("--opt", "most frequent")] = None,
    greatest: Annotated[list[str] | None, _shape_option("--max", "greatest")] = None,
    plugins: Annotated[
        bool | None,
        typer.Option(
            "--plugins/--no-plugins",
            help="Run every normalization with our plugin, or none; by default those that it is likely faster for.",
            rich_help_panel="Engine",
        ),
    ] = None,
    tf32: Annotated[
        bool,
        typer.Option("--tf32", help="Round factors of float32 products, for speed.", rich_help_panel="Engine"),
    ] = False,
    timing_cache: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep TensorRT's measurements for the next build.", rich_help_panel="Engine"),
    ] = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Build a TensorRT engine, for the GPU of this machine.

    The precision is that of the file: export with --dtype fp16 for an engine
    in float16. Inputs with dynamic axes need their least, best and greatest
    shape; where only the batch is dynamic, 1, 8 and 64 are taken. This takes
    minutes; a timing cache makes the next build quicker.

    Examples:

      nnorm-export engine net.onnx -o net.plan

      nnorm-export engine net.onnx -o net.plan --min x:1,3,32,32 \\
        --opt x:16,3,32,32 --max x:128,3,32,32 --timing-cache trt.cache

      nnorm-export verify net.plan -m nets:build -c best.pth \\
        --runtime tensorrt
    """
    profiles = _profiles(_shapes("--min", least), _shapes("--opt", best), _shapes("--max", greatest))
    from nnorm_export.tensorrt.parser_input import import_polygraphy

    import_polygraphy()  # says what is missing before anything takes time
    from nnorm_export.tensorrt.engine import build_engine

    target = str(Path(path).with_suffix(".plan")) if output is None else output
    with working(f"Building {target}: TensorRT measures, which takes minutes", quiet=quiet):
        report = build_engine(path, target, profiles=profiles, plugins=plugins, timing_cache=timing_cache, tf32=tf32)
    if json_output:
        print_json(asdict(report))
    elif not quiet:
        print_notices(report.notices, quiet=quiet)
        _print(report, verbose)


def _shapes(flag: str, specs: list[str] | None) -> Shapes:
    shapes: Shapes = {}
    for spec in specs or ():
        match = _SHAPE.fullmatch(spec)
        if match is None:
            raise typer.BadParameter(
                f"{spec!r} is not an input's name and its lengths; write {flag} x:8,3,32,32", param_hint=flag
            )
        if match["name"] in shapes:
            raise typer.BadParameter(f"input {match['name']} is given twice", param_hint=flag)
        shapes[match["name"]] = [int(length) for length in re.split(r"[,x]", match["lengths"])]
    return shapes


def _profiles(least: Shapes, best: Shapes, greatest: Shapes) -> dict[str, tuple[list[int], ...]] | None:
    """What build_engine takes; None where no shapes are given."""
    for name in (*least, *best, *greatest):
        given = {"--min": least, "--opt": best, "--max": greatest}
        if missing := [flag for flag, shapes in given.items() if name not in shapes]:
            raise typer.BadParameter(f"input {name} needs --min, --opt and --max; it lacks {' and '.join(missing)}")
    return {name: (least[name], best[name], greatest[name]) for name in least} or None


def _print(report: EngineReport, verbose: bool) -> None:
    ran = {f"by {way}": count for way, count in report.counts.items()}
    facts = [
        ("file", str(report.path)),
        ("size", size_text(report.size)),
        ("for", f"TensorRT {report.tensorrt}, and the kind of GPU that is in this machine"),
        *(("shapes", f"{name}: {shapes}") for name, shapes in report.profiles.items()),
        ("normalizations", counted(ran) or "none that are nodes of the file"),
    ]
    print_facts(facts)
    if verbose and report.implementations:
        typer.echo()
        print_table(("node", "run by"), report.implementations.items())

"""``nnorm-export engine``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.file_options import EngineOptions
from nnorm_export.cli.output import Output, counted, print_facts, print_table, size_text

if TYPE_CHECKING:
    from nnorm_export.tensorrt.engine import EngineReport

Shapes = dict[str, list[int]]

_SHAPE = re.compile(r"(?P<name>.+):(?P<lengths>\d+(?:\s*[,x]\s*\d+)*)")


def engine(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="An ONNX file that nnorm-export wrote.")],
    options: EngineOptions,
    output: Output,
) -> None:
    """Build an engine of TensorRT, or of TensorRT-RTX, from an ONNX file.

    TensorRT builds for the GPU of this machine, in minutes; a timing cache
    makes the next build quicker. TensorRT-RTX (--rtx) builds for RTX cards on
    any machine, in seconds.

    The engine has the file's precision: export with --dtype fp16 for an
    engine in float16. Inputs with dynamic axes need --min, --opt and --max; if
    only the batch is dynamic, their default is a batch of 1, 8 and 64.

    Examples:

      nnorm-export engine net.onnx -o net.plan

      nnorm-export engine net.onnx -o net.plan --min x:1,3,32,32 \\
        --opt x:16,3,32,32 --max x:128,3,32,32 --timing-cache trt.cache

      nnorm-export engine net.onnx --rtx --compute-capability 8.6,8.9,12.0

      nnorm-export verify net.plan -m nets:build -c best.pth \\
        --runtime tensorrt
    """
    profiles = _profiles(options)
    capabilities = _compute_capabilities(options)
    from nnorm_export.tensorrt.installation import import_polygraphy
    from nnorm_export.tensorrt.rtx import import_rtx

    if options.rtx:  # both raise before anything takes time
        import_rtx()
    else:
        import_polygraphy()
    from nnorm_export.tensorrt.engine import build_engine

    destination = options.output or str(Path(path).with_suffix(".rtx.plan" if options.rtx else ".plan"))
    with output.progressing(f"Building {destination}") as progress:
        report = build_engine(
            path,
            destination,
            profiles=profiles,
            plugins=options.plugins,
            timing_cache=options.timing_cache,
            tf32=options.tf32,
            rtx=options.rtx,
            compute_capabilities=capabilities,
            progress=progress,
        )
    output.notices(report.notices)
    output.show(report.to_json(), lambda: _print(report, output.verbose))


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


def _profiles(options: EngineOptions) -> dict[str, tuple[list[int], ...]] | None:
    """What build_engine takes; None where no shapes are given."""
    flags = {"--min": options.least, "--opt": options.best, "--max": options.greatest}
    given = {flag: _shapes(flag, specs) for flag, specs in flags.items()}
    names = dict.fromkeys(name for shapes in given.values() for name in shapes)
    for name in names:
        if missing := [flag for flag, shapes in given.items() if name not in shapes]:
            raise typer.BadParameter(f"input {name} needs --min, --opt and --max; it lacks {' and '.join(missing)}")
    return {name: tuple(shapes[name] for shapes in given.values()) for name in names} or None


def _compute_capabilities(options: EngineOptions) -> list[str] | None:
    """What build_engine takes; None where none are given."""
    if options.compute_capability is None:
        return None
    if not options.rtx:
        raise typer.BadParameter("it needs --rtx; TensorRT builds for the GPU of this machine")
    return [name.strip() for name in options.compute_capability.split(",")]


def _print(report: EngineReport, verbose: bool) -> None:
    ran = {f"by {way}": count for way, count in report.counts.items()}
    facts = [
        ("file", str(report.path)),
        ("size", size_text(report.size)),
        ("for", report.built_for),
        *(("shapes", f"{name}: {shapes}") for name, shapes in report.profiles.items()),
        ("normalizations", counted(ran) or "none that are nodes of the file"),
        ("kernels", "" if report.kernels is None else str(report.kernels)),
    ]
    print_facts(facts)
    if verbose and report.implementations:
        print_table(("node", "run by"), report.implementations.items(), apart=True)

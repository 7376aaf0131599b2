"""``nnorm-export strip``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nnorm_export.cli._common import (
    ExternalDataOption,
    JsonOption,
    QuietOption,
    VerboseOption,
    print_facts,
    print_json,
    size_text,
    working,
)


def strip(
    path: Annotated[str, typer.Argument(metavar="MODEL.onnx", help="A file in the form portable.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write; by default MODEL.custom.onnx beside the other.",
            rich_help_panel="File",
        ),
    ] = None,
    external_data: ExternalDataOption = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Take the bodies out of a file: it then runs by kernels or plugins only.

    For trtexec of TensorRT up to 10.6, which prefers a body to a plugin, and
    for proving that a kernel runs. `nnorm-export engine` needs no such file.
    Keep the portable file: it is the one that runs everywhere.

    Examples:

      nnorm-export strip net.onnx -o net.custom.onnx
    """
    from nnorm_export.exporting.stripping import FORM
    from nnorm_export.exporting.stripping import strip as write
    from nnorm_export.files.inspection import describe

    target = str(Path(path).with_suffix(".custom.onnx")) if output is None else output
    with working(f"Stripping into {target}", quiet=quiet):
        written = write(path, target, external_data=external_data)
        description = describe(written, run=False)
    nodes = [layer.node for layer in description.layers]
    if json_output:
        print_json({"path": str(written), "files": description.files, "form": FORM, "nodes": nodes})
    elif not quiet:
        size = sum(size or 0 for size in description.files.values())
        print_facts(
            [("file", str(written)), ("size", size_text(size)), ("form", FORM), ("without body", str(len(nodes)))]
        )
        if verbose:
            print_facts([("nodes", ", ".join(nodes))])

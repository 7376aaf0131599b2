"""``nnorm-export serve-repo``."""

from __future__ import annotations

from typing import Annotated

import typer

from nnorm_export.cli import panels
from nnorm_export.cli.file_options import ServerOptions
from nnorm_export.cli.output import Output, shown


def serve_repo(
    path: Annotated[str, typer.Argument(metavar="FILE", help="An ONNX file, or an engine of TensorRT.")],
    options: ServerOptions,
    overwrite_config: Annotated[
        bool, panels.server("--overwrite-config", "Replace a config.pbtxt that somebody has changed.")
    ] = False,
    *,
    output: Output,
) -> None:
    """Write a file into a model repository of Triton Inference Server.

    The configuration lists the model's inputs and outputs, batches requests
    where all tensors have the same dynamic axis first, and names the library
    of kernels. What you change in it is kept. Verify compares the server's
    answers with PyTorch:

      nnorm-export verify --url grpc://localhost:8001/resnet -m nets:build

    Examples:

      nnorm-export serve-repo resnet.onnx -o models

      nnorm-export serve-repo resnet.onnx -o models \\
        --library /opt/nnorm/libnnorm_ort.so --instances 2 --threads 1

      nnorm-export serve-repo resnet.plan -o models --device gpu
    """
    from nnorm_export.serving.repository import write_repository

    written = write_repository(path, **vars(options), overwrite_config=overwrite_config)
    output.notices(written.notes)

    def print_text() -> None:
        typer.echo(f"wrote {shown(str(written.folder / str(written.version)))}")
        if output.verbose:
            typer.echo(written.config, nl=False)

    output.show(written.to_json(), print_text)

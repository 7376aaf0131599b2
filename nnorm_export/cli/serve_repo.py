"""``nnorm-export serve-repo``."""

from __future__ import annotations

from typing import Annotated

import typer

from nnorm_export.cli._common import JsonOption, QuietOption, VerboseOption, completing, print_json, print_notices

_SERVER = "Server"


def serve_repo(
    path: Annotated[str, typer.Argument(metavar="FILE", help="An ONNX file, or an engine of TensorRT.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="The model repository; made if need be.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name on the server; default the file's.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The version to write; default the next.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completing("nnorm_export.serving.repository:BACKENDS"),
            help="onnxruntime (default), tensorrt (default for engines), or python: nnorm_export in the server.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the server finds the library of kernels: an absolute path there. Default where it is here; "
            "none serves the bodies.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|gpu", help="What runs it.", rich_help_panel=_SERVER)] = "cpu",
    instances: Annotated[
        int, typer.Option(metavar="N", min=1, help="Instances of the model on each device.", rich_help_panel=_SERVER)
    ] = 1,
    threads: Annotated[
        int, typer.Option(metavar="N", min=0, help="Threads of an instance; 0 for all.", rich_help_panel=_SERVER)
    ] = 0,
    max_batch: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="The greatest batch; 0 for no batching.", rich_help_panel=_SERVER),
    ] = 32,
    max_delay: Annotated[
        int,
        typer.Option(
            metavar="MICROSECONDS", min=0, help="How long a request waits for others.", rich_help_panel=_SERVER
        ),
    ] = 1000,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a file into a model repository of Triton Inference Server.

    The configuration says what the model takes and gives, batches requests
    where its first axes are dynamic, and names the library of kernels. What
    the server then answers is compared by verify:

      nnorm-export verify --url grpc://localhost:8001/resnet -m nets:build

    Examples:

      nnorm-export serve-repo resnet.onnx -o models

      nnorm-export serve-repo resnet.onnx -o models \\
        --library /opt/nnorm/libnnorm_ort.so --instances 2 --threads 1

      nnorm-export serve-repo resnet.plan -o models --device gpu
    """
    from nnorm_export.serving.repository import write_repository

    written = write_repository(
        path,
        output,
        name=name,
        backend=backend,
        version=version,
        max_batch_size=max_batch,
        max_queue_delay_microseconds=max_delay,
        instances=instances,
        device=device,
        threads=threads,
        library_path=library,
    )
    print_notices(written.notes, quiet=quiet)
    if json_output:
        print_json(written.to_json())
    elif not quiet:
        typer.echo(f"wrote {written.folder / str(written.version)}")
        if verbose:
            typer.echo(written.config, nl=False)

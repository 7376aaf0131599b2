"""``nnorm-export serve-repo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nnorm_export.cli import panels
from nnorm_export.cli.file_options import ServerOptions
from nnorm_export.cli.manifest_options import ManifestOptions
from nnorm_export.cli.options import Inputs
from nnorm_export.cli.output import Output, shown
from nnorm_export.errors import NnormExportError


def serve_repo(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="An ONNX file, an engine of TensorRT, or tune's settings.")
    ],
    options: ServerOptions,
    cluster: ManifestOptions,
    input_specs: Inputs = None,
    overwrite_config: Annotated[
        bool, panels.server("--overwrite-config", "Replace a config.pbtxt or a manifest that somebody has changed.")
    ] = False,
    *,
    output: Output,
) -> None:
    """Write a file into a model repository of Triton Inference Server.

    What is written was loaded and run here first, on random inputs or on
    those of --input. The configuration lists the model's inputs and outputs,
    batches requests where all tensors have the same dynamic axis first and
    rows together give what each gives alone, and names the library of
    kernels. What you change in it is kept. Verify compares the server's
    answers with PyTorch:

      nnorm-export verify --url grpc://localhost:8001/resnet -m nets:build

    --kubernetes and --kserve also write manifests, beside the repository.
    The library of kernels becomes a part of the repository, so that pods with
    NVIDIA's image find it. A pod asks for instances × threads CPUs: those
    that tune measured, or --instances and --threads, by default 1 × 2. For
    the memory it asks for 512 MiB + instances × 4 × the size of the model.
    Copy the repository to --storage-uri, then: kubectl apply -f FILE

    Examples:

      nnorm-export serve-repo resnet.onnx -o models

      nnorm-export serve-repo resnet.onnx -o models \\
        --library /opt/nnorm/libnnorm_ort.so --instances 2 --threads 1

      nnorm-export serve-repo bert.onnx -o models -i ids:data.npz:ids

      nnorm-export serve-repo resnet.plan -o models --device gpu

      nnorm-export serve-repo resnet.tuned.json -o models --kubernetes \\
        --storage-uri pvc://models/vision --namespace vision

      nnorm-export serve-repo resnet.onnx -o models --kserve \\
        --storage-uri s3://models/vision --replicas 2 --max-replicas 8
    """
    from nnorm_export.cli.arrays import read_inputs_of_file
    from nnorm_export.files.tuned import is_tuned, read_tuned
    from nnorm_export.serving.manifests.request import Manifests
    from nnorm_export.serving.model import open_model
    from nnorm_export.serving.repository import write_repository
    from nnorm_export.serving.tuned import servable_file

    manifests = None
    if cluster.kserve or cluster.kubernetes:
        manifests = Manifests(**vars(cluster))
    else:
        _refuse_alone(cluster)
    inputs: dict[str, Any] = {}
    if input_specs:
        served = servable_file(read_tuned(path))[0] if is_tuned(path) else Path(path)
        dtypes = {info.name: info.dtype for info in open_model(served).inputs}
        inputs, notices = read_inputs_of_file(input_specs, dtypes)
        output.notices(notices)
    with output.working(f"Writing {options.output}: copy, load, run"):
        written = write_repository(
            path,
            **vars(options),
            overwrite_config=overwrite_config,
            inputs=inputs if input_specs else None,
            manifests=manifests,
        )
    output.notices(written.notes)

    def print_text() -> None:
        typer.echo(f"wrote {shown(str(written.folder / str(written.version)))}")
        for manifest in written.manifests:
            typer.echo(f"wrote {shown(str(manifest))}")
        if output.verbose:
            typer.echo(written.config, nl=False)

    output.show(written.to_json(), print_text)


def _refuse_alone(cluster: ManifestOptions) -> None:
    """Raises the error of an option of the manifests without a manifest."""
    changed = {f"--{name.replace('_', '-')}": value for name, value in vars(cluster).items()}
    changed["--manifests"] = changed.pop("--folder")
    changed["--replicas"] = cluster.replicas != ManifestOptions.replicas
    if given := [option for option, value in changed.items() if value not in (None, False)]:
        raise NnormExportError(f"{given[0]} is for manifests; add --kubernetes, --kserve or both, or leave it out")

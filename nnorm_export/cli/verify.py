"""``nnorm-export verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli._common import (
    CheckpointKeyOption,
    CheckpointOption,
    InputOption,
    JsonOption,
    ModelArgOption,
    ModelOption,
    PassthroughOption,
    QuietOption,
    TrustPickleOption,
    VerboseOption,
    print_json,
    print_notices,
    print_table,
    working,
)
from nnorm_export.errors import NnormExportError, ParityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnorm_export.cli._source import Source
    from nnorm_export.inspection import TensorDescription
    from nnorm_export.runtimes import TensorInfo

DYNAMIC_ROWS = 4  # what an axis without a length gets in random inputs


def verify(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to verify, of any format that export or engine writes.")
    ],
    model: ModelOption,
    model_arg: ModelArgOption = None,
    checkpoint: CheckpointOption = None,
    checkpoint_key: CheckpointKeyOption = None,
    trust_pickle: TrustPickleOption = False,
    passthrough: PassthroughOption = None,
    input_specs: InputOption = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For ONNX onnxruntime (default), onnxruntime-cuda, tensorrt, or reference: onnx's own. Other files "
            "have one runtime each: tensorrt, torchscript, pt2, aoti.",
            rich_help_panel="Comparison",
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Relative tolerance, in place of the error budget.", rich_help_panel="Comparison"
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Absolute tolerance, in place of the error budget.", rich_help_panel="Comparison"
        ),
    ] = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare a file with the PyTorch model that it was made from.

    The model run in float64 is the truth. The file passes if its error is at
    most ten times that of PyTorch in the file's own precision, or, if they are
    given, within --rtol and --atol. The exit code is 1 if it does not.
    Without --input, random inputs of the file's shapes are taken; real data
    says more. A package of AOTInductor is machine code, which runs: verify
    only what you trust.

    Examples:

      nnorm-export verify net.onnx -m nets:build -c best.pth -i data.npz

      nnorm-export verify net.onnx -m nets:build -c best.pth \\
        -i 64,3,32,32 --rtol 1e-3 --atol 1e-5

      nnorm-export verify net.onnx -m program.pt2 --runtime reference --json
    """
    from nnorm_export import parity
    from nnorm_export.cli._parity import print_parity
    from nnorm_export.cli._source import load_source

    with working("Loading the model", quiet=quiet):
        source = load_source(model, model_arg, checkpoint, checkpoint_key, trust_pickle)
        inputs, notices = _inputs(source, input_specs, path, runtime)
    print_notices([*source.notices, *notices], quiet=quiet)
    with working(f"Comparing {path} with PyTorch", quiet=quiet):
        report = parity.verify(
            path, source.module, inputs, runtime=runtime, rtol=rtol, atol=atol, passthrough=passthrough or ()
        )
    if json_output:
        print_json({"path": path, **report.to_json(), "notices": [*source.notices, *notices]})
    elif not quiet:
        print_parity(report)
        if verbose and report.implementations:
            typer.echo()
            print_table(("node", "ran by"), report.implementations.items())
    if not report:
        different = ", ".join(output.name for output in report.outputs if not output.passed)
        message = f"{path} does not compute what {model} computes: {different} differs"
        if json_output:
            typer.echo(f"error: {message}", err=True)  # stdout has its one object already
            raise typer.Exit(ParityError.exit_code)
        raise ParityError(message)


def _inputs(source: Source, specs: list[str] | None, path: str, runtime: str | None) -> tuple[Any, list[str]]:
    """What the model takes, by position or by name, and notices."""
    from nnorm_export.cli._inputs import EXAMPLES, Inputs, read_inputs
    from nnorm_export.exporting.arguments import bind

    infos = _infos(path, runtime)
    if specs:
        inputs = read_inputs(specs, source.module, aliases=[info.name for info in infos])
    elif source.program is not None and source.program.example_inputs is not None:
        args, kwargs = source.program.example_inputs
        inputs = Inputs(list(args), dict(kwargs))
    else:
        if unknown := [info for info in infos if info.shape and all(dim is None for dim in info.shape)]:
            raise NnormExportError(f"{path} takes {unknown[0]}, of whatever length; give {EXAMPLES}")
        shapes = [[dim if isinstance(dim, int) else DYNAMIC_ROWS for dim in info.shape] for info in infos]
        specs = [f"{info.dtype}{shape}" for info, shape in zip(infos, shapes, strict=True)]
        inputs = read_inputs(specs, source.module)
        inputs.notices.append(f"no --input: random data of the file's shapes ({', '.join(specs)})")
    if not inputs.kwargs:
        return tuple(inputs.args), inputs.notices
    return bind(source.module, inputs.args, inputs.kwargs), inputs.notices


def _infos(path: str, runtime: str | None) -> Sequence[TensorDescription | TensorInfo]:
    """The inputs of the file; an engine's are known to TensorRT alone."""
    from nnorm_export.inspection import describe
    from nnorm_export.runtimes import load
    from nnorm_export.runtimes.tensorrt import is_engine

    return load(path, runtime).inputs if is_engine(path) else describe(path, run=False).inputs

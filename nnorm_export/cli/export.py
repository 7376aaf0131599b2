"""``nnorm-export export``."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli._common import (
    CheckpointKeyOption,
    CheckpointOption,
    ExternalDataOption,
    InputOption,
    JsonOption,
    ModelArgOption,
    ModelOption,
    NoVerifyOption,
    PassthroughOption,
    QuietOption,
    TrustPickleOption,
    VerboseOption,
    counted,
    print_facts,
    print_json,
    print_notices,
    print_table,
    size_text,
    working,
)
from nnorm_export.errors import NnormExportError

if TYPE_CHECKING:
    from nnorm_export.cli._source import Source
    from nnorm_export.exporter import ExportReport
    from nnorm_export.inspection import ModelDescription


class Form(str, Enum):
    portable = "portable"
    primitives = "primitives"
    custom = "custom"


class Dtype(str, Enum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    fp64 = "fp64"


def export(
    model: ModelOption,
    model_arg: ModelArgOption = None,
    checkpoint: CheckpointOption = None,
    checkpoint_key: CheckpointKeyOption = None,
    trust_pickle: TrustPickleOption = False,
    input_specs: InputOption = None,
    fixed_shape: Annotated[
        bool,
        typer.Option(
            "--fixed-shape", help="Fix every axis. By default the batch is dynamic.", rich_help_panel="Inputs"
        ),
    ] = False,
    input_names: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Names of the inputs in the file.", rich_help_panel="Inputs"),
    ] = None,
    output_names: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Names of the outputs in the file.", rich_help_panel="Inputs"),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file to write.", rich_help_panel="File")
    ] = "model.onnx",
    form: Annotated[
        Form,
        typer.Option(
            metavar="FORM",
            help="portable: nodes with bodies, runs everywhere. primitives: standard operators only. "
            "custom: nodes without bodies, needs a kernel or plugin.",
            rich_help_panel="File",
        ),
    ] = Form.portable,
    opset: Annotated[
        int,
        typer.Option(
            metavar="N", help="ONNX opset, 18 or newer; 20 runs on ONNX Runtime 1.18.", rich_help_panel="File"
        ),
    ] = 20,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="TYPE", help="fp32, fp16, bf16 or fp64; the model's own by default.", rich_help_panel="File"
        ),
    ] = None,
    external_data: ExternalDataOption = None,
    passthrough: PassthroughOption = None,
    no_verify: NoVerifyOption = False,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a trained model as one ONNX file, and prove it equal to PyTorch.

    The file takes its place only if it computes what PyTorch computes;
    otherwise nothing is written and the exit code is 1.

    Examples:

      nnorm-export export -m nets:build -c best.pth -i 8,3,32,32

      nnorm-export export -m nets:build -c best.pth -i data.npz -o net.onnx

      nnorm-export export -m nets:WideResNet --model-arg depth=28 -c best.pth \\
        -i 'x:float32[8,3,32,32]' --dtype fp16

      nnorm-export export -m program.pt2 --form primitives
    """
    from nnorm_export import export as write  # noqa: PLC0415 - torch takes seconds, --help must not
    from nnorm_export.cli._source import load_source  # noqa: PLC0415
    from nnorm_export.inspection import describe  # noqa: PLC0415

    with working("Loading the model", quiet=quiet):
        source = load_source(model, model_arg, checkpoint, checkpoint_key, trust_pickle)
        args, kwargs, notices = _example(source, input_specs, fixed_shape)
    print_notices([*source.notices, *notices], quiet=quiet)
    with working(f"Exporting to {output}: freeze, trace, translate, check, verify", quiet=quiet):
        report = write(
            source.program or source.module,
            args,
            output,
            form=form.value,
            kwargs=kwargs,
            input_names=_names(input_names),
            output_names=_names(output_names),
            opset_version=opset,
            dynamic_shapes={} if fixed_shape else None,
            dtype=dtype.value if dtype else None,
            external_data=external_data,
            verify=not no_verify,
            passthrough=passthrough or (),
        )
        description = describe(output, run=False)
    if json_output:
        print_json(_json(report, description, [*source.notices, *notices]))
    elif not quiet:
        _print(report, description, verbose)


def _example(source: Source, specs: list[str] | None, fixed_shape: bool) -> tuple[Any, dict[str, Any], list[str]]:
    from nnorm_export.cli._inputs import EXAMPLES, forward_parameters, read_inputs  # noqa: PLC0415

    if source.program is not None:
        if specs or fixed_shape:
            option = "--input" if specs else "--fixed-shape"
            raise NnormExportError(f"{option} does not go with a .pt2 file, which carries its inputs and their shapes")
        return (), {}, []
    if not specs:
        parameters = forward_parameters(source.module)
        takes = f" (forward takes {', '.join(parameters)})" if parameters else ""
        raise NnormExportError(f"the shape of the model's input is not known{takes}; give {EXAMPLES}")
    inputs = read_inputs(specs, source.module)
    return tuple(inputs.args), inputs.kwargs, inputs.notices


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _json(report: ExportReport, description: ModelDescription, notices: list[str]) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "files": description.files,
        "form": report.form,
        "opset": report.opset,
        "nodes": report.nodes,
        "inputs": [str(info) for info in description.inputs],
        "outputs": [str(info) for info in description.outputs],
        "layers": report.layers,
        "weights_sha256": report.weights_sha256,
        "parity": None if report.parity is None else report.parity.to_json(),
        "notices": notices,
    }


def _print(report: ExportReport, description: ModelDescription, verbose: bool) -> None:
    from nnorm_export.cli._parity import print_parity  # noqa: PLC0415

    kinds = counted(dict(Counter(layer["op_type"] for layer in report.layers)))
    facts = [
        ("file", str(report.path)),
        ("size", size_text(sum(size or 0 for size in description.files.values()))),
        ("form", f"{report.form}, opset {report.opset}"),
        ("nodes", str(report.nodes)),
        ("normalizations", kinds or "none that nnorm_export knows"),
        *(("input", str(info)) for info in description.inputs),
        *(("output", str(info)) for info in description.outputs),
    ]
    print_facts(facts)
    if verbose and report.layers:
        typer.echo()
        print_table(("layer", "op", "form"), [(e["path"], e["op_type"], e.get("form", "")) for e in report.layers])
    typer.echo()
    if report.parity is not None:
        print_parity(report.parity)
    else:
        typer.echo("not compared with PyTorch (--no-verify)")

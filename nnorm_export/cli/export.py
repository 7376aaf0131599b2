"""``nnorm-export export``."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from pathlib import Path
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
    from nnorm_export.exporting.report import ExportReport
    from nnorm_export.files.inspection import ModelDescription


class Form(str, Enum):
    portable = "portable"
    primitives = "primitives"
    custom = "custom"


class Format(str, Enum):
    onnx = "onnx"
    torchscript = "torchscript"
    pt2 = "pt2"
    aoti = "aoti"


class Method(str, Enum):
    trace = "trace"
    script = "script"


class Operators(str, Enum):
    decomposed = "decomposed"
    kept = "kept"


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
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write; by default model.onnx, model.pt, model.pt2 or model.aoti.pt2.",
            rich_help_panel="File",
        ),
    ] = None,
    file_format: Annotated[
        Format,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="onnx: ONNX Runtime, TensorRT and others. pt2: torch.export.load. aoti: the same compiled by "
            "AOTInductor, for Python and C++. torchscript: torch.jit.load and LibTorch; PyTorch has deprecated it.",
            rich_help_panel="File",
        ),
    ] = Format.onnx,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="TYPE", help="fp32, fp16, bf16 or fp64; the model's own by default.", rich_help_panel="File"
        ),
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(
            metavar="FORM",
            help="portable (default): nodes with bodies, runs everywhere. primitives: standard operators only. "
            "custom: nodes without bodies, needs a kernel or plugin.",
            rich_help_panel="ONNX",
        ),
    ] = None,
    opset: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="ONNX opset, 18 or newer; 20, the default, runs on ONNX Runtime 1.18 (bf16: 22).",
            rich_help_panel="ONNX",
        ),
    ] = None,
    external_data: ExternalDataOption = None,
    method: Annotated[
        Method | None,
        typer.Option(
            metavar="METHOD",
            help="trace (default): what the model does with the example. script: the model's own code, branches "
            "and all.",
            rich_help_panel="TorchScript and pt2",
        ),
    ] = None,
    no_optimize: Annotated[
        bool,
        typer.Option(
            "--no-optimize",
            help="Keep modules and parameters in TorchScript, in place of folding them.",
            rich_help_panel="TorchScript and pt2",
        ),
    ] = False,
    operators: Annotated[
        Operators | None,
        typer.Option(
            metavar="HOW",
            help="decomposed (default): a .pt2 that needs PyTorch alone. kept: each normalization one operator of "
            "torch.ops.nnorm.",
            rich_help_panel="TorchScript and pt2",
        ),
    ] = None,
    inductor_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of Inductor for aoti; a Python literal or text. Repeatable.",
            rich_help_panel="TorchScript and pt2",
        ),
    ] = None,
    passthrough: PassthroughOption = None,
    no_verify: NoVerifyOption = False,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a trained model as one file, ONNX by default, and prove it equal to PyTorch.

    The file takes its place only if it computes what PyTorch computes;
    otherwise nothing is written and the exit code is 1.

    Examples:

      nnorm-export export -m nets:build -c best.pth -i 8,3,32,32

      nnorm-export export -m nets:build -c best.pth -i data.npz -o net.onnx

      nnorm-export export -m nets:WideResNet --model-arg depth=28 -c best.pth \\
        -i 'x:float32[8,3,32,32]' --dtype fp16

      nnorm-export export -m program.pt2 --form primitives

      nnorm-export export -m nets:build -c best.pth -i data.npz --format aoti
    """
    target = output or _DEFAULT_NAMES[file_format]
    _refuse_misnamed(target, file_format)
    options = _options(
        file_format,
        onnx={"--form": form and form.value, "--opset": opset, "--external-data": external_data},
        torchscript={"--method": method and method.value, "--no-optimize": no_optimize or None},
        pt2={"--operators": operators and operators.value},
        aoti={"--inductor-config": inductor_config},
    )
    import nnorm_export
    from nnorm_export.cli._source import load_source
    from nnorm_export.files.inspection import describe

    with working("Loading the model", quiet=quiet):
        source = load_source(model, model_arg, checkpoint, checkpoint_key, trust_pickle)
        args, kwargs, notices = _example(source, input_specs, fixed_shape)
    print_notices([*source.notices, *notices], quiet=quiet)
    write: Any = getattr(nnorm_export, _FUNCTIONS[file_format])
    if file_format is Format.torchscript:
        print_notices([_DEPRECATED], quiet=quiet)
    steps = {Format.onnx: "trace, translate, check", Format.aoti: "trace, compile"}.get(file_format, "trace")
    with working(f"Exporting to {target}: freeze, {steps}, verify", quiet=quiet):
        report = write(
            source.program or source.module,
            args,
            target,
            kwargs=kwargs,
            dynamic_shapes={} if fixed_shape else None,
            input_names=_names(input_names),
            output_names=_names(output_names),
            dtype=dtype.value if dtype else None,
            verify=not no_verify,
            passthrough=passthrough or (),
            **options,
        )
        description = describe(target, run=False)
    if json_output:
        print_json(_json(report, description, [*source.notices, *notices]))
    elif not quiet:
        _print(report, description, verbose)


_FUNCTIONS = {
    Format.onnx: "export",
    Format.torchscript: "export_torchscript",
    Format.pt2: "export_program",
    Format.aoti: "export_aoti",
}
_DEFAULT_NAMES = {
    Format.onnx: "model.onnx",
    Format.torchscript: "model.pt",
    Format.pt2: "model.pt2",
    Format.aoti: "model.aoti.pt2",
}
_DEPRECATED = (
    "TorchScript is deprecated in PyTorch, and unsupported on Python 3.14 and newer; --format pt2 or aoti lasts"
)


def _refuse_misnamed(target: str, file_format: Format) -> None:
    """An ONNX file by the name of another format is a forgotten --format."""
    endings = {".pt2": "--format pt2 or --format aoti", ".pt": "--format torchscript"}
    meant = endings.get(Path(target).suffix)
    if file_format is Format.onnx and meant:
        raise NnormExportError(f"{target} is no name for an ONNX file; say {meant}, or end it in .onnx")


def _options(file_format: Format, **by_format: dict[str, Any]) -> dict[str, Any]:
    """The options of this format by the names of its function's parameters; those of others are refused."""
    from nnorm_export.models.checkpoints import parse_arguments

    options: dict[str, Any] = {}
    for owner, values in by_format.items():
        for name, value in values.items():
            if value is None:
                continue
            if owner != file_format.value:
                raise NnormExportError(f"{name} goes with --format {owner}, and this is {file_format.value}")
            if name == "--inductor-config":
                options["inductor_configs"] = parse_arguments(value, what="--inductor-config", dotted=True)
            elif name == "--no-optimize":
                options["optimize"] = not value
            else:
                options["opset_version" if name == "--opset" else name.lstrip("-").replace("-", "_")] = value
    return options


def _example(source: Source, specs: list[str] | None, fixed_shape: bool) -> tuple[Any, dict[str, Any], list[str]]:
    from nnorm_export.cli._inputs import EXAMPLES, forward_parameters, read_inputs

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
        "format": report.format,
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
    from nnorm_export.cli._parity import print_parity

    kinds = counted(dict(Counter(layer["op_type"] for layer in report.layers)))
    facts = [
        ("file", str(report.path)),
        ("size", size_text(sum(size or 0 for size in description.files.values()))),
        ("format", report.format),
        ("form", f"{report.form}, opset {report.opset}" if report.opset else report.form),
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

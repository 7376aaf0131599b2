"""``nnorm-export export``."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nnorm_export.cli.options import ExportOptions, ModelOptions
from nnorm_export.cli.output import Output, counted, print_facts, print_parity, print_table, size_text
from nnorm_export.errors import NnormExportError, ParityError

if TYPE_CHECKING:
    from nnorm_export.cli.source import Source
    from nnorm_export.exporting.report import ExportReport
    from nnorm_export.files.inspection import ModelDescription


FORMATS = {  # the function that writes a format, and the default name of the file
    "onnx": ("export", "model.onnx"),
    "torchscript": ("export_torchscript", "model.pt"),
    "pt2": ("export_program", "model.pt2"),
    "aoti": ("export_aoti", "model.aoti.pt2"),
}
_DEPRECATED = (
    "TorchScript is deprecated in PyTorch, and unsupported on Python 3.14 and newer; --format pt2 or aoti lasts"
)


def export(model: ModelOptions, options: ExportOptions, output: Output) -> None:
    """Write a trained model as one file, ONNX by default, and prove it equal to PyTorch.

    The file is written only if it computes what PyTorch computes; otherwise
    an older file of this name stays as it is and the exit code is 1.

    Examples:

      nnorm-export export -m nets:build -c best.pth -i 8,3,32,32

      nnorm-export export -m nets:build -c best.pth -i data.npz -o net.onnx

      nnorm-export export -m nets:WideResNet --model-arg depth=28 -c best.pth \\
        -i 'x:float32[8,3,32,32]' --dtype fp16

      nnorm-export export -m nets:Encoder -c best.ckpt -i x:float32[2,16,64] \\
        -i mask:bool[2,16] --dynamic x:0=batch,1=seq --dynamic mask:0=batch,1=seq

      nnorm-export export -m nets:build -c best.pth -i 1,3,32,32 --target opencv

      nnorm-export export -m program.pt2 --form primitives

      nnorm-export export -m nets:build -c best.pth -i data.npz --format aoti
    """
    from nnorm_export.exporting.targets import target_named

    file_format = _format(options)
    function, default_name = FORMATS[file_format]
    path = options.file or (default_name if file_format != "onnx" else f"model{target_named(options.target).ending}")
    _refuse_misnamed(path, file_format)
    own_options = _own_options(options, file_format)
    import nnorm_export
    from nnorm_export.cli.source import bisect_command, load_source
    from nnorm_export.files.inspection import describe
    from nnorm_export.files.staging import check_target

    check_target(path)  # before the model is loaded, which may take minutes
    with output.working("Loading the model"):
        source = load_source(model)
        args, kwargs, notices = _example(source, model.input_specs, options)
        dynamic_shapes = _dynamic_shapes(source, args, kwargs, options)
    notices = [*source.notices, *notices]
    output.notices([*notices, _DEPRECATED] if file_format == "torchscript" else notices)
    try:
        with output.working(f"Exporting to {path}"):
            report: ExportReport = getattr(nnorm_export, function)(
                source.program or source.module,
                args,
                path,
                kwargs=kwargs,
                dynamic_shapes=dynamic_shapes,
                input_names=_names(options.input_names),
                output_names=_names(options.output_names),
                dtype=options.dtype,
                verify=not options.no_verify,
                passthrough=model.passthrough or (),
                strict=options.strict,
                **own_options,
            )
            description = describe(path)
    except ParityError as error:
        if not error.advice:  # bisect cannot help
            raise
        form = "--format onnx " if file_format != "onnx" else "--form portable "
        kept = str(Path(path).with_suffix(".unverified.onnx"))
        raise ParityError(
            error.finding,
            f"To find the layer that differs, export again with {form}--no-verify -o {shlex.quote(kept)}, then run\n"
            f"  {bisect_command(kept, model)}",
        ) from error
    as_json = report.to_json() | {
        "files": description.files,
        "inputs": [str(info) for info in description.inputs],
        "outputs": [str(info) for info in description.outputs],
        "notices": notices,
    }
    output.show(as_json, lambda: _print(report, description, output.verbose))


def _format(options: ExportOptions) -> str:
    """The format that the options ask for; a target decides it."""
    from nnorm_export.exporting.targets import target_named

    given = options.file_format
    if options.target is None or given is None:
        return given or "onnx"
    if given != target_named(options.target).file_format:
        raise NnormExportError(
            f"--target {options.target} decides the format; leave out --format {given}, or leave out --target"
        )
    return given


def _refuse_misnamed(path: str, file_format: str) -> None:
    """An ONNX file with the name of another format is a forgotten ``--format``."""
    endings = {".pt2": "--format pt2 or --format aoti", ".pt": "--format torchscript"}
    meant = endings.get(Path(path).suffix)
    if file_format == "onnx" and meant:
        raise NnormExportError(f"{path} is not a name for an ONNX file; say {meant}, or end it in .onnx")


def _own_options(options: ExportOptions, file_format: str) -> dict[str, Any]:
    """Returns the arguments that only this format's function takes, and refuses the options of other formats."""
    from nnorm_export.models.factory import parse_arguments

    configs = options.inductor_config and parse_arguments(options.inductor_config, "--inductor-config", dotted=True)
    arguments: dict[str, Any] = {}
    for flag, owner, parameter, value in (
        ("--target", "onnx", "target", options.target),
        ("--form", "onnx", "form", options.form),
        ("--opset", "onnx", "opset_version", options.opset),
        ("--external-data", "onnx", "external_data", options.external_data),
        ("--method", "torchscript", "method", options.method),
        ("--no-optimize", "torchscript", "optimize", False if options.no_optimize else None),
        ("--operators", "pt2", "operators", options.operators),
        ("--inductor-config", "aoti", "inductor_configs", configs),
    ):
        if value is not None and owner != file_format:
            raise NnormExportError(f"{flag} goes with --format {owner}, and this is {file_format}")
        if value is not None:
            arguments[parameter] = value
    return arguments


def _example(source: Source, specs: list[str] | None, options: ExportOptions) -> tuple[Any, dict[str, Any], list[str]]:
    from nnorm_export.cli.arrays import EXAMPLES
    from nnorm_export.cli.inputs import forward_parameters, read_inputs

    if source.program is not None:
        for option, value in (
            ("--input", specs),
            ("--fixed-shape", options.fixed_shape),
            ("--dynamic", options.dynamic),
        ):
            if value:
                raise NnormExportError(
                    f"{option} does not go with a .pt2 file, which carries its inputs and their shapes"
                )
        return (), {}, []
    if not specs:
        parameters = forward_parameters(source.module)
        takes = f" (forward takes {', '.join(parameters)})" if parameters else ""
        raise NnormExportError(f"the shape of the model's input is unknown{takes}; give {EXAMPLES}")
    inputs = read_inputs(specs, source.module)
    return tuple(inputs.args), inputs.kwargs, inputs.notices


def _dynamic_shapes(source: Source, args: Any, kwargs: dict[str, Any], options: ExportOptions) -> Any:
    """What the exporters take: None for the batch, {} for no dynamic axis, or the axes of ``--dynamic``."""
    if options.fixed_shape and options.dynamic:
        raise NnormExportError("--fixed-shape fixes every axis and --dynamic does not; leave out one of them")
    if options.fixed_shape:
        return {}
    if not options.dynamic:
        return None
    from nnorm_export.models.arguments import bind
    from nnorm_export.models.dynamic_axes import parse_dynamic

    return parse_dynamic(options.dynamic, bind(source.module, args, kwargs))


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _print(report: ExportReport, description: ModelDescription, verbose: bool) -> None:
    kinds = counted(Counter(layer["op_type"] for layer in report.layers))
    print_facts(
        [
            ("file", str(report.path)),
            ("size", size_text(sum(size or 0 for size in description.files.values()))),
            ("format", report.format),
            ("target", report.target or ""),
            ("form", f"{report.form}, opset {report.opset}" if report.opset else report.form),
            ("nodes", str(report.nodes)),
            ("normalizations", kinds or "none that nnorm_export knows"),
            *(("input", str(info)) for info in description.inputs),
            *(("output", str(info)) for info in description.outputs),
        ]
    )
    if verbose and report.layers:
        typer.echo()
        print_table(
            ("layer", "op", "variant"), [(e["path"], e["op_type"], e.get("variant", "")) for e in report.layers]
        )
    typer.echo()
    if report.not_verified:
        typer.echo(f"not compared: {report.not_verified}")
    else:
        print_parity(report.parity)

"""``nnorm-export export``."""

from __future__ import annotations

import inspect
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nnorm_export.cli.options import DECODER, PROGRAM, ExportOptions, ModelOptions, refuse
from nnorm_export.cli.output import Output, counted, print_facts, print_parity, print_table, shown, size_text
from nnorm_export.errors import NnormExportError, ParityError

if TYPE_CHECKING:
    from nnorm_export.cli.source import Source
    from nnorm_export.exporting.report import ExportReport
    from nnorm_export.exporting.targets import Target
    from nnorm_export.files.inspection import ModelDescription


_DEPRECATED = (
    "TorchScript is deprecated in PyTorch, and unsupported on Python 3.14 and newer; --target pt2 or aoti lasts"
)


def export(model: ModelOptions, options: ExportOptions, output: Output) -> None:
    """Write a trained model as one file, ONNX by default, and compare it with PyTorch.

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

      nnorm-export export -m nets:build -c best.pth -i data.npz --target aoti

      nnorm-export export -m nets:llama -c best.safetensors --decoder \\
        --genai kernels -o llama/decoder.onnx
    """
    from nnorm_export.exporting.targets import DEFAULT_TARGET, refuse_options, target_named
    from nnorm_export.files.formats import ONNX, TORCHSCRIPT

    target = target_named(options.target)
    path = Path(options.output or target.format.file_name).expanduser()
    own_options = _own_options(options)
    metadata = _metadata(options.metadata or [])
    _refuse_misnamed(path, target)
    refuse_options(target, path, own_options)
    if options.genai is not None and (target.format.name != ONNX or not model.decoder):
        raise NnormExportError("--genai goes with --decoder and an ONNX file, which onnxruntime-genai runs")
    if options.genai == "bodies" and options.form == "custom":
        raise NnormExportError(
            "--genai bodies does not go with --form custom, whose nodes have none; say --genai kernels"
        )
    if model.decoder and not target.has_dynamic_axes:
        raise NnormExportError(
            f"--decoder needs dynamic axes, which {target.title} does not take; choose another target"
        )
    import nnorm_export
    from nnorm_export.cli.source import bisect_command, load_source
    from nnorm_export.files.inspection import describe
    from nnorm_export.files.staging import check_output
    from nnorm_export.serving.genai import check_genai

    check_output(path)  # before the model is loaded, which may take minutes
    with output.working("Loading the model"):
        source = load_source(model)
        arguments, notices = _arguments(source, model, options)
        if options.genai is not None:
            check_genai(source.module, kernels=options.genai == "kernels")
    notices = [*source.notices, *notices]
    output.notices([*notices, _DEPRECATED] if target.name == TORCHSCRIPT else notices)
    try:
        with output.working(f"Exporting to {path}"):
            report = nnorm_export.export(
                source.program or source.module,
                f=path,
                target=target.name,
                dtype=options.dtype,
                verify=not options.no_verify,
                passthrough=model.passthrough or (),
                strict=options.strict,
                metadata=metadata,
                **arguments,
                **own_options,
            )
            description = describe(path)
            config = None
            if options.genai is not None:
                config = nnorm_export.write_genai_config(path, source.module, kernels=options.genai == "kernels")
    except ParityError as error:
        if not error.advice:  # bisect cannot help
            raise
        form = "--form portable" if "portable" in target.forms else f"--target {DEFAULT_TARGET}"
        kept = str(path.with_suffix(".unverified.onnx"))
        raise ParityError(
            error.finding,
            f"To find the layer that differs, export again with {form} --no-verify -o {shlex.quote(kept)}, then run\n"
            f"  {bisect_command(kept, model)}",
        ) from error
    as_json = report.to_json() | {
        "files": description.files,
        "inputs": [str(info) for info in description.inputs],
        "outputs": [str(info) for info in description.outputs],
        "notices": notices,
    }
    as_json |= {} if config is None else {"genai_config": str(config)}

    def print_text() -> None:
        _print(report, description, output.verbose)
        if config is not None:
            typer.echo(f"wrote {shown(str(config))}")

    output.show(as_json, print_text)


def _refuse_misnamed(path: Path, target: Target) -> None:
    """An ONNX file with the name of another format is a forgotten ``--target``."""
    from nnorm_export.files.formats import FORMATS, ONNX

    meant = [f"--target {row.name}" for row in FORMATS.values() if row.name != ONNX and row.ending == path.suffix]
    if target.format.name == ONNX and meant:
        raise NnormExportError(f"{path} is not a name for an ONNX file; say {' or '.join(meant)}, or end it in .onnx")


def _own_options(options: ExportOptions) -> dict[str, Any]:
    """The arguments of ``export`` that some formats alone take."""
    from nnorm_export.models.factory import parse_arguments

    configs = options.inductor_config and parse_arguments(options.inductor_config, "--inductor-config", dotted=True)
    return {
        "form": options.form,
        "opset_version": options.opset,
        "external_data": options.external_data,
        "keep_io_types": options.keep_io_types or None,
        "method": options.method,
        "optimize": False if options.no_optimize else None,
        "operators": options.operators,
        "inductor_configs": configs,
    }


def _arguments(source: Source, model: ModelOptions, options: ExportOptions) -> tuple[dict[str, Any], list[str]]:
    """The example, its dynamic axes and the names, as arguments of ``export``; and notices."""
    from nnorm_export.models.decoders import decoder_arguments

    names = {"input_names": _names(options.input_names), "output_names": _names(options.output_names)}
    given = {"--input": model.input_specs, "--fixed-shape": options.fixed_shape, "--dynamic": options.dynamic}
    if source.program is not None:
        refuse({**given, "--decoder": model.decoder}, PROGRAM)
        return {"args": (), **names}, []
    if model.decoder:
        refuse({**given, "--input-names": options.input_names, "--output-names": options.output_names}, DECODER)
        return {**decoder_arguments(source.module)}, []
    args, kwargs, notices = _example(source, model.input_specs)
    dynamic_shapes = _dynamic_shapes(source, args, kwargs, options)
    return {"args": args, "kwargs": kwargs, "dynamic_shapes": dynamic_shapes, **names}, notices


def _example(source: Source, specs: list[str] | None) -> tuple[Any, dict[str, Any], list[str]]:
    from nnorm_export.cli.arrays import EXAMPLES
    from nnorm_export.cli.inputs import forward_parameters, read_inputs
    from nnorm_export.models.modules import unwrapped

    if not specs:
        parameters = forward_parameters(source.module)
        takes = f" (forward takes {', '.join(parameters)})" if parameters else ""
        has_cache = "past_key_values" in inspect.signature(unwrapped(source.module).forward).parameters
        decoder = ", or --decoder for a decoder of transformers" if has_cache else ""
        raise NnormExportError(f"the shape of the model's input is unknown{takes}; give {EXAMPLES}{decoder}")
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


def _metadata(pairs: list[str]) -> dict[str, str]:
    from nnorm_export.files.user_metadata import check_user_metadata
    from nnorm_export.models.factory import parse_texts

    texts = parse_texts(pairs, "--metadata", "author=Ada")
    check_user_metadata(texts)
    return texts


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _print(report: ExportReport, description: ModelDescription, verbose: bool) -> None:
    kinds = counted(Counter(layer["op_type"] for layer in report.layers))
    print_facts(
        [
            ("file", str(report.path)),
            ("size", size_text(sum(size or 0 for size in description.files.values()))),
            ("format", report.format),
            ("target", report.target if report.target != report.format else ""),
            ("form", f"{report.form}, opset {report.opset}" if report.form else ""),
            ("method", report.method or ""),
            ("operators", report.operators or ""),
            ("device", report.device or ""),
            ("nodes", str(report.nodes)),
            ("trust", f"load and verify need --trust-pickle: {report.needs_trust}" if report.needs_trust else ""),
            *(("float16", text) for text in report.beyond_float16),
            ("normalizations", kinds or "none that nnorm_export knows"),
            *(("input", description.described(info)) for info in description.inputs),
            *(("output", description.described(info)) for info in description.outputs),
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
        print_parity(report.parity, verbose=verbose)

"""``nnorm-export inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnorm_export.cli import panels
from nnorm_export.cli.options import NoRun, TrustPickle
from nnorm_export.cli.output import Output, counted, one_line, print_facts, print_table, shown, size_text

if TYPE_CHECKING:
    from nnorm_export.files.inspection import LayerDescription, ModelDescription


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to describe; with --required-operators, or a folder.")
    ],
    no_run: NoRun = False,
    trust_pickle: TrustPickle = False,
    plot: Annotated[
        str | None, panels.output("--plot FILE", "Draw the λ of every normalization: .png, .svg or .pdf.")
    ] = None,
    required_operators: Annotated[
        str | None,
        panels.output(
            "--required-operators FILE",
            "Write the operators that ONNX Runtime needs, for its reduced builds (--include_ops_by_config).",
        ),
    ] = None,
    *,
    output: Output,
) -> None:
    """Show a file's format, inputs, normalizations, their λ and what runs them.

    The command reads ONNX, TorchScript, exported programs (.pt2), packages of
    AOTInductor, and the files of ExecuTorch, LiteRT and Core ML. Files that
    other programs wrote are described with fewer facts. If other programs have
    changed an exported file (removed its functions, converted it to float16),
    the command names the changes and the remedies.
    The runtime of the file opens it to find what runs the normalizations. That
    runs the code of TorchScript: use --no-run for files that you do not trust.
    Packages of AOTInductor are machine code and are not opened. Exported
    programs run no code without --trust-pickle.

    Examples:

      nnorm-export inspect net.onnx

      nnorm-export inspect net.onnx --json --no-run

      nnorm-export inspect net.onnx --plot lambdas.png

      nnorm-export inspect models/ --required-operators operators.config
    """
    from nnorm_export.files.inspection import describe
    from nnorm_export.parity.report.plots import check_plot, plot_lambdas
    from nnorm_export.runtimes.describe_run import describe_run

    if required_operators is not None and Path(path).is_dir():
        if plot is not None:
            raise typer.BadParameter("--plot draws the λ of one file; give a file, not a folder")
        required = _write_required_operators(path, required_operators, output, run=not no_run)
        output.show(required, lambda: typer.echo(_about(required)))
        return
    if plot is not None:
        check_plot(Path(plot))
    with output.working(f"Reading {path}"):
        description = describe(path) if no_run else describe_run(path, trust_pickle=trust_pickle)
        if plot is not None:
            plot_lambdas(description, Path(plot))
    written: dict[str, Any] = {} if plot is None else {"plot": plot}
    if required_operators is not None:
        written |= _write_required_operators(path, required_operators, output, run=not no_run)

    def print_text() -> None:
        _print(description)
        if plot is not None:
            typer.echo(f"wrote {shown(plot)}")
        if required_operators is not None:
            typer.echo(_about(written))

    output.show(description.to_json() | written, print_text)


def _write_required_operators(path: str, target: str, output: Output, *, run: bool) -> dict[str, Any]:
    """What was written, for --json."""
    from nnorm_export.files.staging import check_output
    from nnorm_export.runtimes.onnxruntime.required_operators import required_operators

    check_output(target)
    with output.working(f"Listing the operators of {path}"):
        required = required_operators(path, run=run)
        required.write(target)
    return {"required_operators": {"output": target, **required.to_json()}}


def _about(written: dict[str, Any]) -> str:
    required = written["required_operators"]
    count = len({name for opsets in required["operators"].values() for names in opsets.values() for name in names})
    version = required["onnxruntime"]
    optimized = f"optimized by ONNX Runtime {version}" if version else "not optimized"
    files = len(required["files"])
    return f"wrote {shown(required['output'])}: {count} operators of {files} file{'s'[: files != 1]}, {optimized}"


def _print(description: ModelDescription) -> None:
    facts = _facts(description)
    if not description.layers:
        print_facts(facts)
        typer.echo("\nno normality normalization that nnorm_export knows")
        return
    rows = [_row(layer) for layer in description.layers]
    # A fact that all layers share is printed once, because the paths of real models need the width of the table.
    shared = [name for name in ("variant", "ε", "run by") if len(rows) > 1 and len({row[name] for row in rows}) == 1]
    if shared:
        facts.append(("all layers", ", ".join(f"{name} {rows[0][name]}" for name in shared if rows[0][name] != "-")))
    print_facts(facts)
    typer.echo()
    columns = [name for name in rows[0] if name not in shared]
    print_table(columns, [[row[name] for name in columns] for row in rows])


def _facts(description: ModelDescription) -> list[tuple[str, str]]:
    from nnorm_export.files.ignored_inputs import about_ignored_inputs
    from nnorm_export.files.lengths import described

    sizes = [f"{name} {'MISSING' if size is None else size_text(size)}" for name, size in description.files.items()]
    is_own = "unknown" not in (description.form, description.form or description.producer)
    machine = description.optimized_for
    torch_version = f", torch {description.versions['torch']}" if "torch" in description.versions else ""
    return [
        ("file", ", ".join(sizes)),
        ("format", description.format + ("" if is_own else " (not written by nnorm_export)")),
        ("form", description.form or ""),
        ("method", description.method or ""),
        ("operators", description.operators or ""),
        ("target", (description.target or "") if description.target != description.format else ""),
        ("quantized", description.quantization or ""),
        ("for", f"{machine}; optimized by ONNX Runtime {machine.onnxruntime}" if machine else ""),
        ("for", f"{description.compiled_for} processors" if description.compiled_for else ""),
        ("opset", f"{description.opset}, IR version {description.ir_version}" if description.opset else ""),
        ("made by", description.producer + torch_version),
        ("nodes", counted(description.nodes)),
        *(("input", description.described(info)) for info in description.inputs),
        *(("output", description.described(info)) for info in description.outputs),
        ("ignored", about_ignored_inputs(description.ignored_inputs)),
        ("lengths", ", ".join(described(description.lengths))),
        ("batch", description.least_batch),
        # What the writer noted, which is not computed from the file.
        ("made from", f"weights of sha256 {description.weights_sha256}" if description.weights_sha256 else ""),
        *(("metadata", one_line(f"{key}: {text}")) for key, text in description.metadata.items()),
        *(("problem", problem) for problem in description.problems),
        *(("changed", change) for change in description.changes),
        ("runtime", description.runtime or ""),
        ("not run", one_line(description.runtime_problem or "")),
    ]


def _row(layer: LayerDescription) -> dict[str, str]:
    size = layer.normalized_shape or layer.channels
    groups = f" in {layer.num_groups}" if layer.num_groups else ""
    if layer.variant is None:
        lambdas = "-"
    elif layer.lambda_range is None:
        lambdas = "from input"
    else:
        lambdas = " to ".join(f"{value:.3g}" for value in layer.lambda_range)
    return {
        "layer": layer.name,
        "op": layer.op_type,
        "size": "-" if size is None else f"{size}{groups}",
        "λ": lambdas,
        "variant": layer.variant or "-",
        "ε": "-" if layer.epsilon is None else f"{layer.epsilon:g}",
        "run by": layer.implementation or "-",
    }

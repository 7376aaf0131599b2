"""``nnorm-export doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.options import Runtime, TrustPickle
from nnorm_export.cli.output import Output, echo, implementations_text, one_line, print_facts, print_table

if TYPE_CHECKING:
    from nnorm_export.runtimes.diagnose import Diagnosis, RuntimeDiagnosis


def doctor(
    path: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A model file, to see what would run each of its nodes.")
    ] = None,
    runtime: Runtime = None,
    trust_pickle: TrustPickle = False,
    *,
    output: Output,
) -> None:
    """List the runtimes, whether they work here, and how to install the rest.

    The bits of the kernels are a digest of their results on fixed numbers. All
    machines with the same release have the same digest.

    With a file, each runtime opens the file and shows whether a kernel, a body
    or a plugin runs each normalization. The exit code is 3 if the chosen
    runtime or a part of it is missing, and 2 if the runtime refuses the file.
    Opening TorchScript or a package of AOTInductor runs its code.

    Examples:

      nnorm-export doctor

      nnorm-export doctor model.onnx --verbose

      nnorm-export doctor model.onnx --runtime onnxruntime-cuda
    """
    from nnorm_export.runtimes.diagnose import diagnose

    with output.working("Looking for runtimes"):
        diagnosis = diagnose(path, runtime=runtime, trust_pickle=trust_pickle)
    output.show(diagnosis.to_json(), lambda: _print(diagnosis, path, verbose=output.verbose))
    if (missing := diagnosis.missing) is not None:
        echo(f"{missing.runtime}: {missing.problem}", err=True, label="error")
        raise typer.Exit(missing.exit_code)


def _print(diagnosis: Diagnosis, path: str | None, *, verbose: bool) -> None:
    facts = []
    for component in diagnosis.components:
        found = component.found or "missing"
        facts.append((component.name, f"{found}; {component.remedy}" if component.remedy else found))
    print_facts(facts)
    typer.echo()
    print_facts((found.runtime, _runtime_text(found, path)) for found in diagnosis.runtimes)
    for change in diagnosis.changes:
        typer.echo()
        echo(change, label="changed")
    for fault in dict.fromkeys(fault for found in diagnosis.runtimes for fault in found.known_faults):
        typer.echo()
        echo(str(fault), label="known fault")
    if verbose and path is not None:
        nodes = dict.fromkeys(node for found in diagnosis.runtimes for node in found.implementations)
        if nodes:
            working_runtimes = [found for found in diagnosis.runtimes if found.implementations]
            typer.echo()
            print_table(
                ("node", *(found.runtime for found in working_runtimes)),
                [(node, *(found.implementations.get(node, "-") for found in working_runtimes)) for node in nodes],
            )


def _runtime_text(found: RuntimeDiagnosis, path: str | None) -> str:
    if path is None and not found.problem:
        return "ready"
    text = f"cannot run: {one_line(found.problem)}" if found.problem else found.note or "runs it"
    if not found.implementations:
        return text
    what = "its engine" if found.problem or found.note else "normalizations"
    return f"{text}; {what}: {implementations_text(found.implementations)}"

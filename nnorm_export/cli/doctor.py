"""``nnorm-export doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli.options import Runtime, TrustPickle
from nnorm_export.cli.output import Output, echo, implementations_text, one_line, print_facts, print_table
from nnorm_export.errors import RuntimeMissingError

if TYPE_CHECKING:
    from nnorm_export.runtimes import Component
    from nnorm_export.runtimes.diagnose import Diagnosis, RuntimeDiagnosis


def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="A model file, to see what would run each of its nodes, or tune's settings."
        ),
    ] = None,
    runtime: Runtime = None,
    trust_pickle: TrustPickle = False,
    *,
    output: Output,
) -> None:
    """List the runtimes that work here, and how to install the rest.

    The bits of the kernels are a digest of their results on fixed numbers. All
    machines with the same release have the same digest.

    With a file, each runtime opens the file, and the first lines show how many
    normalizations a kernel, a body or a plugin runs. --verbose lists the nodes,
    and why a runtime cannot run. The exit code is 3 if the chosen
    runtime or a part of it is missing, and 2 if the runtime refuses the file.
    Opening TorchScript or a package of AOTInductor runs its code.

    Examples:

      nnorm-export doctor

      nnorm-export doctor model.onnx --verbose

      nnorm-export doctor model.onnx --runtime onnxruntime-cuda

      nnorm-export doctor model.tuned.json
    """
    from nnorm_export.runtimes.diagnose import diagnose

    with output.working("Looking for runtimes"):
        diagnosis = diagnose(path, runtime=runtime, trust_pickle=trust_pickle)
    output.show(diagnosis.to_json(), lambda: _print(diagnosis, path, verbose=output.verbose))
    if (missing := diagnosis.missing) is not None:
        echo(f"{missing.runtime}: {missing.problem}", err=True, label="error")
        raise typer.Exit(missing.exit_code)


def _print(diagnosis: Diagnosis, path: str | None, *, verbose: bool) -> None:
    """Prints what runs first, and last what this machine lacks, which most users do not need."""
    absent = [] if verbose else [found for found in diagnosis.runtimes if _is_absent(found, diagnosis.needed)]
    print_facts(diagnosis.settings.items())
    if diagnosis.settings:
        typer.echo()
    lacking = [component for component in diagnosis.components if component.is_optional and not component.found]
    print_facts((found.runtime, _runtime_text(found, path)) for found in diagnosis.runtimes if found not in absent)
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
    typer.echo()
    print_facts(_component_fact(component) for component in diagnosis.components if component not in lacking)
    names = ", ".join(found.runtime for found in absent)
    about_file = path is not None and not verbose
    last = [] if about_file else [(component.name, f"missing; {component.remedy}") for component in lacking]
    if names:
        how = "nnorm-export doctor" if about_file else "--verbose"
        last.append(("not here", f"{names} ({how} says what {'they need' if len(absent) > 1 else 'it needs'})"))
    if last:
        typer.echo()
        print_facts(last)


def _is_absent(found: RuntimeDiagnosis, needed: str) -> bool:
    """Whether the runtime is not installed, and the user did not choose it."""
    return found.exit_code == RuntimeMissingError.exit_code and not found.implementations and found.runtime != needed


def _component_fact(component: Component) -> tuple[str, str]:
    found = component.found or "missing"
    return component.name, f"{found}; {component.remedy}" if component.remedy else found


def _runtime_text(found: RuntimeDiagnosis, path: str | None) -> str:
    implementations = implementations_text(found.implementations)
    if found.in_blocks:
        implementations += f", {len(found.in_blocks)} in the layout of convolutions"
    if not found.problem and not found.note:
        return "ready" if path is None else implementations or "runs it"
    text = f"cannot run: {one_line(found.problem)}" if found.problem else found.note
    return f"{text}; its engine: {implementations}" if implementations else text

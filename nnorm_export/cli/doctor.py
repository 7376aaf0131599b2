"""``nnorm-export doctor``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from nnorm_export.cli._common import (
    JsonOption,
    QuietOption,
    VerboseOption,
    complete_runtimes,
    counted,
    print_facts,
    print_json,
    print_table,
    working,
)

if TYPE_CHECKING:
    from nnorm_export.runtimes.diagnosis import Diagnosis, RuntimeDiagnosis


def doctor(
    path: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A model file, to see what would run each of its nodes.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_runtimes,
            help="The runtime that must work: onnxruntime (default for ONNX), onnxruntime-cuda, tensorrt, reference.",
        ),
    ] = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Say what is installed, what would run, and what to do about the rest.

    With a file, each runtime opens it, and says which implementation each
    normalization gets: a kernel, its body, or a plugin. The exit code is 3 if
    the runtime that must work is missing or lacks something, 2 if it refuses
    the file.

    Examples:

      nnorm-export doctor

      nnorm-export doctor model.onnx --verbose

      nnorm-export doctor model.onnx --runtime onnxruntime-cuda
    """
    from nnorm_export.runtimes.diagnosis import diagnose

    with working("Looking around", quiet=quiet):
        diagnosis = diagnose(path, runtime=runtime)
    if json_output:
        print_json(diagnosis.to_json())
    elif not quiet:
        _print(diagnosis, path, verbose=verbose)
    if (missing := diagnosis.missing) is not None:
        typer.echo(f"error: {missing.runtime}: {missing.problem}", err=True)
        raise typer.Exit(missing.exit_code)


def _print(diagnosis: Diagnosis, path: str | None, *, verbose: bool) -> None:
    facts = []
    for component in diagnosis.components:
        found = component.found or "missing"
        facts.append((component.name, f"{found}; {component.remedy}" if component.remedy else found))
    print_facts(facts)
    typer.echo()
    print_facts((f"{found.runtime}", _runtime_text(found, path)) for found in diagnosis.runtimes)
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
    if found.problem:
        return f"cannot run: {found.problem}"
    if path is None:
        return "ready"
    ran = counted(dict(Counter(f"by {implementation}" for implementation in found.implementations.values())))
    if ran:
        return f"runs it; normalizations: {ran}"
    return "is there; nnorm-export engine says what it takes" if found.runtime == "tensorrt" else "runs it"

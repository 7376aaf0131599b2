"""describe_run(): the description of a model file, with the implementation that runs each normalization here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nnorm_export.errors import NnormExportError
from nnorm_export.files.formats import AOTI
from nnorm_export.files.inspection import ModelDescription, describe
from nnorm_export.runtimes import load


def describe_run(path: str | Path, *, trust_pickle: bool = False) -> ModelDescription:
    """:func:`.describe`, with the implementation of each normalization, for which the file is opened in its runtime.

    A package of AOTInductor is not opened, because that would run its machine code and add no facts.
    If the runtime cannot open the file, or is not installed, the description says so.

    Raises:
        ModelFileError: the file is missing or is not a model.
    """
    description = describe(path)
    if description.format == AOTI:
        return replace(
            description,
            runtime=AOTI,
            runtime_problem="it is machine code, which only load and verify run",
        )
    try:
        runner = load(path, trust_pickle=trust_pickle)
        return description.ran_by(runner.runtime, runner.implementations)
    except NnormExportError as error:
        return replace(description, runtime_problem=str(error))

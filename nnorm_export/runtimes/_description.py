"""describe_run(): what a model file is, and what runs each of its normalizations here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nnorm_export.errors import NnormExportError
from nnorm_export.files.inspection import ModelDescription, describe
from nnorm_export.runtimes import load


def describe_run(path: str | Path, *, trust_pickle: bool = False) -> ModelDescription:
    """:func:`.describe`, and the file opened in its runtime, to see what runs each normalization.

    If the runtime cannot open the file, or is not installed, the description says so.

    Raises:
        ModelFileError: the file is missing or is not a model.
    """
    description = describe(path)
    try:
        runner = load(path, trust_pickle=trust_pickle)
        return description.ran_by(runner.runtime, runner.implementations)
    except NnormExportError as error:
        return replace(description, runtime_problem=str(error))

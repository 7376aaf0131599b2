"""Packages of AOTInductor (``.pt2``): machine code for this kind of processor, or for a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from nnorm_export.errors import ExportError, RuntimeMissingError, first_line, reported_as
from nnorm_export.exporting import metadata
from nnorm_export.exporting.passes.decompose import decomposed, for_inductor
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Request, freeze_source
from nnorm_export.exporting.trace import exporting_state, trace
from nnorm_export.exporting.write_verified import write_with_note
from nnorm_export.files.archive import add_note
from nnorm_export.files.staging import opened_for_torch, writing
from nnorm_export.steps import step

# The package uses as many threads as the process that loads it; weights are folded and packed; a batch of one passes
# the package's own check of its inputs (AOTI_RUNTIME_CHECK_INPUTS); and a product with a sum is one instruction.
_INDUCTOR_CONFIGS = {
    "cpp.dynamic_threads": True,
    "freezing": True,
    "aot_inductor.check_lowerbound": False,
    "cpp.enable_floating_point_contract_flag": "fast",
}
# Inductor views bits as another type by a loop over an array. Compiled for this very processor, GCC makes it vectors of
# 32 bytes, and the processor waits for each vector of 64 bytes that was written as two: the norm takes four times as
# long. For AVX-512 in general GCC makes vectors of 64 bytes, and the array is gone. Where PyTorch or the compiler is
# too old for that, the second option makes all vectors 32 bytes long. What the user has set stays.
_CONFIGS_FOR_AVX512: dict[str, Any] = {"cpp.march": "x86-64-v4", "cpp.simdlen": 256}


def write(request: Request, *, inductor_configs: Mapping[str, Any] | None = None) -> ExportReport:
    """See :func:`nnorm_export.export_aoti`."""
    frozen = freeze_source(request)
    with exporting_state():
        traced = trace(frozen, takes_complex=True)
        program = decomposed(traced.program, for_inductor)
    note = metadata.note_of_program(traced, program)

    def save(staging: Path) -> None:
        step("compile")
        with writing(request.path), opened_for_torch(staging) as file:
            _compile(program, file, inductor_configs or {})
        step("write")
        with writing(request.path):
            add_note(staging, note)

    return write_with_note(frozen, note, save)


def _defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    """The options that this package sets, of those that Inductor knows; ``known`` has their values."""
    configs = {name: value for name, value in _INDUCTOR_CONFIGS.items() if name in known}
    wide = {name: value for name, value in _CONFIGS_FOR_AVX512.items() if name in known}
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and all(known[name] is None for name in wide):
        if not _knows(known["cpp.cxx"][1], wide.get("cpp.march", "")):
            wide.pop("cpp.march", None)
        configs |= dict(list(wide.items())[:1])
    return configs


def _knows(compiler: str, processors: str) -> bool:
    """Whether the compiler compiles for this kind of processors; GCC does for ``x86-64-v4`` from version 11 on."""
    try:
        command = [compiler, f"-march={processors}", "-E", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # the compiler does not start; Inductor then raises an error that names it
        return False


def _compile(program: torch.export.ExportedProgram, file: IO[bytes], configs: Mapping[str, Any]) -> None:
    # Imported here because it takes a second, and exports to the other formats do not need it.
    from torch._inductor import config, exc  # noqa: PLC0415 - Inductor takes seconds to import

    known = config.get_config_copy()
    if unknown := [name for name in configs if name not in known]:
        raise ExportError(
            f"inductor_configs: Inductor of torch {torch.__version__} has no option {unknown[0]}; "
            "torch._inductor.config lists the options"
        )
    remedy = "Export for the target pt2, which is not compiled, or change that part of the model"
    with reported_as(ExportError, "AOTInductor cannot compile the model", remedy), exporting_state():
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=file, inductor_configs={**_defaults(known), **configs}
            )
        except Exception as error:  # Inductor raises exceptions of many classes; known causes get their remedy below
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, exc.InvalidCxxCompiler):
                cause = getattr(cause, "inner_exception", None) or cause.__cause__
            if cause is not None:
                raise RuntimeMissingError(
                    "AOTInductor compiles with a C++ compiler, and there is none: install g++, or set the environment "
                    "variable CXX to another compiler"
                ) from error
            if " " in str(folder := Path(torch.__file__).parent):
                raise ExportError(
                    f"AOTInductor cannot compile: PyTorch is in {folder}, and Inductor gives the compiler paths "
                    "without quotes. Install PyTorch in a folder without a space, or export for the target pt2. "
                    f"({first_line(error)})"
                ) from error
            raise

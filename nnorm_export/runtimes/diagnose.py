"""diagnose(): the installed components, and the implementation of each normalization of a file in each runtime."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nnorm_export._version import __version__
from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.files.inspection import describe
from nnorm_export.files.published import local
from nnorm_export.files.tuned import is_tuned, read_tuned
from nnorm_export.library import SAME_BITS, find_training_library
from nnorm_export.reading import size_of
from nnorm_export.reports import Report
from nnorm_export.runtimes import RUNTIMES, Component, Runtime, runtimes_for
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.processor import cores_here, processor
from nnorm_export.runtimes.runtime import installed_version
from nnorm_export.runtimes.self_test import self_test

# Package that no runtime declares -> the command that installs it, and its purpose.
_OTHER_PACKAGES = {
    "matplotlib": "pip install 'nnorm_export[report]', for plots and reports",
}


@dataclass(frozen=True)
class RuntimeDiagnosis:
    """The state of a runtime, for one file or in general.

    Attributes:
        runtime: the name of the runtime, as :func:`nnorm_export.load` takes it.
        problem: the reason why the runtime cannot run, with the remedy; empty if it can.
        exit_code: the exit code of the problem's error; 0 without a problem.
        implementations: node -> ``kernel``, ``body`` or ``plugin``; empty without a file, or if no normalization of the
            file is a node. With a problem or a note, the implementations after it is resolved.
        in_blocks: the nodes that work in the layout of convolutions, see :attr:`.Runner.in_blocks`.
        known_faults: the faults of the runtime that would affect the file; see :attr:`.Runner.known_faults`.
        note: the step before the runtime can run the file; see :attr:`Runtime.before_onnx`.
    """

    runtime: str
    problem: str = ""
    exit_code: int = 0
    implementations: dict[str, str] = field(default_factory=dict)
    in_blocks: list[str] = field(default_factory=list)
    known_faults: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Diagnosis(Report):
    """The result of :func:`diagnose`.

    Attributes:
        components: installed and missing components: packages, the kernels, the plugins.
        runtimes: every runtime that opens files of this format; without a file, every runtime.
        needed: the runtime that must work.
        settings: what the settings say that were given in the place of a file (:mod:`nnorm_export.files.tuned`), name
            -> text.
        changes: changes that other programs made to the file, with remedies (:mod:`nnorm_export.files.changes`).
    """

    components: list[Component]
    runtimes: list[RuntimeDiagnosis]
    needed: str
    changes: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> RuntimeDiagnosis | None:
        """The diagnosis of the needed runtime if it cannot run, else None."""
        return next((found for found in self.runtimes if found.runtime == self.needed and found.problem), None)

    def to_json(self) -> dict[str, Any]:
        return {"exit_code": self.missing.exit_code if self.missing else 0, **super().to_json()}


def diagnose(path: str | Path | None = None, *, runtime: str | None = None, trust_pickle: bool = False) -> Diagnosis:
    """Checks the installation and, with a file, which implementation runs its normalizations in each runtime.

    Args:
        path: a file of any format that a runtime opens, here or on the Hub (``hf://…``), or settings of
            :func:`nnorm_export.tune`, which are explained; None checks the installation alone.
        runtime: the runtime that must work. None is the default of :func:`nnorm_export.load` for the file.
        trust_pickle: as for :func:`nnorm_export.load`.

    Raises:
        ModelFileError: the file is missing or is not a model.
        NnormExportError: the runtime is unknown, or does not open files of this format.
    """
    path = local(path)
    if path is not None and not is_url(path):
        size_of(path, ModelFileError)
    if path is not None and is_tuned(path):
        tuned = read_tuned(path)
        found = diagnose(tuned.file, runtime=runtime or tuned.runtime, trust_pickle=trust_pickle)
        of_settings = [each for each in found.runtimes if each.runtime == found.needed]
        return replace(found, runtimes=of_settings, settings=tuned.explained(processor(), cores_here()))
    candidates = list(RUNTIMES.values()) if path is None else runtimes_for(path)
    names = [candidate.name for candidate in candidates]
    needed = runtime or names[0]
    if needed not in names:
        what = "nnorm_export" if path is None else str(path)
        raise NnormExportError(f"{what} has no runtime {needed}; it has {', '.join(names)}")
    diagnoses = [_diagnose(each, path, trust_pickle) for each in candidates]
    components = [*_components(), *([_self_tested()] if path is None else ())]
    return Diagnosis(components, diagnoses, needed, [] if path is None else _changes(path))


def _self_tested() -> Component:
    """The digest of the results of the kernels on this machine, which is equal on two machines with equal bits."""
    try:
        return Component("bits of the kernels", self_test()[:16])
    except NnormExportError as error:
        return Component("bits of the kernels", "not tried", str(error))


def _training_kernels() -> Component:
    try:
        found = find_training_library()
    except RuntimeMissingError:  # NNORM_EXPORT_LIBRARY is wrong, which ONNX Runtime's component reports
        found = None
    remedy = "install nnorm_export with its kernels; without them, layers train by PyTorch's operators, slowly"
    return Component.optional("training kernels", found, remedy)


def _same_bits(value: str) -> Component:
    meanings = {
        "0": "GPUs compute float16 and bfloat16 with the hardware's logarithm and power",
        "1": "GPUs compute float16 and bfloat16 with the bits of processors",
    }
    if value in meanings:
        return Component(SAME_BITS, f"{value}: {meanings[value]}")
    return Component(SAME_BITS, value, "the kernels for GPUs refuse it: it must be 0 or 1")


def _changes(path: str | Path) -> list[str]:
    try:
        return [] if is_url(path) else describe(path).changes
    except ModelFileError:  # an engine, or a file that no runtime opens, which each runtime reports
        return []


def _diagnose(runtime: Runtime, path: str | Path | None, trust_pickle: bool) -> RuntimeDiagnosis:
    try:
        if path is None:
            runtime.require()
            return RuntimeDiagnosis(runtime.name)
        if runtime.before_onnx and not runtime.is_own(path):
            return _diagnose_unopened(runtime, path)
        runner = runtime(path, trust_pickle=trust_pickle)
        return RuntimeDiagnosis(
            runtime.name,
            implementations=runner.implementations,
            in_blocks=list(runner.in_blocks),
            known_faults=runner.known_faults,
        )
    except NnormExportError as error:
        return RuntimeDiagnosis(runtime.name, str(error), error.exit_code)


def _diagnose_unopened(runtime: Runtime, path: str | Path) -> RuntimeDiagnosis:
    """The diagnosis of a runtime that first builds an engine of an ONNX file. Building may not need the runtime."""
    planned: dict[str, str] = {}
    try:
        planned = runtime.planned(path) if runtime.planned is not None else {}
        runtime.require()
    except NnormExportError as error:
        return RuntimeDiagnosis(runtime.name, str(error), error.exit_code, implementations=planned)
    return RuntimeDiagnosis(runtime.name, implementations=planned, note=runtime.before_onnx)


def _components() -> Iterator[Component]:
    yield Component("nnorm_export", __version__)
    yield Component("Python", f"{platform.python_version()}, {sys.platform} {platform.machine()}")
    listed: set[str] = set()
    # Runtimes may share a package: a runtime that declares ``components`` comes before one that only names packages.
    for runtime in sorted(RUNTIMES.values(), key=lambda runtime: runtime.components is None):
        for component in runtime.list_components():
            if component.name not in listed:
                listed.add(component.name)
                yield component
    yield _training_kernels()
    if triton := installed_version("triton"):
        yield Component("training kernels for GPUs", f"compiled by Triton {triton} (3.4 or newer)")
    if os.environ.get(SAME_BITS):
        yield _same_bits(os.environ[SAME_BITS])
    for package, remedy in _OTHER_PACKAGES.items():
        if package not in listed:
            yield Component.optional(package, installed_version(package), remedy)

"""Writing a certificate of a file that computes what PyTorch computes (:mod:`.files` has its layout)."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from nnorm_export._version import __version__
from nnorm_export.dtypes import Array
from nnorm_export.errors import ExportError, InputError, ModelFileError
from nnorm_export.files.sha256 import file_digests
from nnorm_export.files.staging import parents_made, staged_folder
from nnorm_export.parity.as_computed import of_file
from nnorm_export.parity.certificates import files, metrics, signatures
from nnorm_export.parity.certificates.bits import bits_of
from nnorm_export.parity.certificates.contents import digests_in
from nnorm_export.parity.certificates.dsse import ENVELOPE
from nnorm_export.parity.certificates.sources import Source, Sources, in_predicate, sources_of
from nnorm_export.parity.certificates.statements import statement
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.runtimes import RUNTIMES, Runner, installed_version

_FOLDERS = (files.DATA, files.FLOAT64, files.ALLOWED_ERROR, files.COUNTED)
# The files and folders that a certificate may have.
PARTS = frozenset(
    {
        files.CERTIFICATE,
        signatures.SIGNATURE,
        ENVELOPE,
        metrics.FOLDER,
        *(name.format(index) for name in _FOLDERS for index in range(files.SETS)),
    }
)


def check_folder(folder: Path) -> None:
    """Raises the errors of :meth:`NewCertificate.write` that can be known before the comparison.

    Raises:
        InputError: ``folder`` holds something other than a certificate, or cannot be written.
    """
    if os.path.lexists(folder) and not _is_replaceable(folder):
        raise InputError(
            f"{folder}: it holds something other than a certificate and is not overwritten; name another folder"
        )
    nearest = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
        raise InputError(f"{folder}: cannot be written (you may not write to {nearest}); name another folder")


@dataclass(frozen=True)
class NewCertificate:
    """A certificate that is written if the file passes.

    Attributes:
        path: the file.
        folder: the certificate's.
        private_key: signs the certificate, together with the file; None for no signature.
        digests: of the file and its external data before the comparison.
        sources: what the model and the inputs were read from.
    """

    path: Path
    folder: Path
    private_key: Path | None
    digests: dict[str, str]
    sources: Sequence[Source] = ()

    @classmethod
    def of(
        cls,
        path: str | Path,
        folder: str | Path,
        private_key: str | Path | None,
        sources: Sources | None = None,
    ) -> NewCertificate:
        """Raises the errors of :meth:`write` that can be known before the comparison."""
        check_folder(Path(folder))
        key = None if private_key is None else Path(private_key)
        if key is not None:
            signatures.check_private_key(key)
        return cls(Path(path), Path(folder), key, file_digests(Path(path)), sources_of(sources))

    def write(
        self,
        runner: Runner,
        comparison: Comparison,
        cases: Sequence[Case],
        report: ParityReport,
        labels_and_output: tuple[Array, Array] | None = None,
    ) -> None:
        """Writes the certificate, whole or not at all; an older certificate in the folder is replaced.

        Args:
            labels_and_output: what the metric of ``report`` is computed from; None if it cannot be computed again.

        Raises:
            ModelFileError: the file is another now.
            InputError: the folder holds something other than a certificate, or cannot be written; or the key is wrong.
            RuntimeMissingError: there is a key, and model-signing is not installed.
        """
        check_folder(self.folder)
        cases = [of_file(runner, case) for case in cases]
        predicate = self._predicate(runner, comparison, cases, report)
        try:
            with parents_made(self.folder), staged_folder(self.folder) as staged:
                names = [info.name for info in runner.inputs]
                for index, case in enumerate(cases):
                    _write_tensors(staged / files.DATA.format(index), "input", names, case.inputs)
                    results = case.expected, case.float64, case.allowed_error, case.counted
                    for folder, arrays in zip(_FOLDERS, results, strict=True):
                        if arrays is not None:
                            _write_tensors(staged / folder.format(index), "output", comparison.outputs, arrays)
                if labels_and_output is not None:
                    for kind, array in zip(("label", "output"), labels_and_output, strict=True):
                        _write_tensors(staged / metrics.FOLDER, kind, [kind], [array])
                certificate = statement(self.digests, {**predicate, "files": digests_in(staged)})
                (staged / files.CERTIFICATE).write_text(json.dumps(certificate, indent=2) + "\n", encoding="utf-8")
                if self.private_key is not None:
                    signatures.sign(self.path, self.folder, staged, self.private_key)
                if file_digests(self.path) != self.digests:
                    raise ModelFileError(f"{self.path}: it was replaced while it was compared; verify it again")
        except (OSError, ExportError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            reason = getattr(cause, "strerror", None) or error
            raise InputError(f"{self.folder}: cannot be written ({reason}); name another folder") from error

    def _predicate(
        self, runner: Runner, comparison: Comparison, cases: Sequence[Case], report: ParityReport
    ) -> dict[str, Any]:
        """What the statement says of the file, but the digests of the tensors."""
        return {
            "timestamp": _timestamp(),
            "architecture": comparison.reference,
            "inputs": [info.to_json() for info in runner.inputs],
            "sources": in_predicate(self.sources),
            "runtime": report.runtime,
            "criteria": [asdict(criterion) for criterion in comparison.criteria],
            "decided_by": report.criterion,
            "outputs": [_finite(asdict(output)) for output in report.outputs],
            "implementations": report.implementations,
            "given_only": report.given_only,
            "least_batch": report.least_batch,
            "data_sets": len(cases),
            "computed_in": comparison.computed_in,
            "metric": None if report.metric is None else report.metric.to_json(),
            "by_metric_alone": report.by_metric_alone,
            "bits": bits_of(self.path, runner, runner.feed(cases[0].inputs, {})).to_json(),
            "versions": versions(),
        }


def _finite(output: dict[str, Any]) -> dict[str, Any]:
    """``output`` with null for numbers that are not finite, which JSON does not have."""
    is_other = {name: isinstance(value, float) and not math.isfinite(value) for name, value in output.items()}
    return {name: None if is_other[name] else value for name, value in output.items()}


def _timestamp() -> str:
    """Now, or SOURCE_DATE_EPOCH of reproducible builds: ``2026-01-31T12:00:00Z``.

    Raises:
        InputError: the variable is not a number of seconds.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        seconds = time.gmtime(int(given) if given else None)
    except (ValueError, OverflowError, OSError) as error:
        raise InputError(f"SOURCE_DATE_EPOCH is {given!r}, which is not a number of seconds since 1970") from error
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", seconds)


def versions() -> dict[str, str]:
    """The versions of this package, of Python, and of the installed packages that a comparison depends on."""
    found = {"nnorm_export": __version__, "python": platform.python_version(), "machine": platform.machine()}
    packages = dict.fromkeys(package for runtime in RUNTIMES.values() for package in (*runtime.packages, "numpy"))
    return found | {package: version for package in packages if (version := installed_version(package))}


def _is_replaceable(folder: Path) -> bool:
    """Whether ``folder`` is empty, or holds a certificate of any version and no other file."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    try:
        files.read_json(folder)
    except InputError:
        return False
    return names <= PARTS


def _write_tensors(folder: Path, kind: str, names: Sequence[str], arrays: Sequence[Array | None]) -> None:
    folder.mkdir(exist_ok=True)
    for index, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if array is None:
            continue
        tensor = onnx.numpy_helper.from_array(array, name)
        (folder / f"{kind}_{index}.pb").write_bytes(tensor.SerializeToString())

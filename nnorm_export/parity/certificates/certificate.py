"""Certificates of parity: inputs, PyTorch's outputs and the float64 truth beside a file, checked later without PyTorch.

A folder holds ``certificate.json`` and, as in ONNX's backend tests, ``test_data_set_0`` with ``input_N.pb`` and
PyTorch's results ``output_N.pb``. ``truth_0`` holds the results in float64 if there are any, and ``yardstick_0`` the
error that roundings cause in each element. Further inputs that were compared follow as ``test_data_set_1``. ``bits`` in
``certificate.json`` are digests of what the runtime computed in each normalization and output on ``test_data_set_0``.
``model.sig`` is its signature, if it has one: :mod:`nnorm_export.parity.certificates.signatures`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from nnorm_export._version import __version__
from nnorm_export.dtypes import Array
from nnorm_export.errors import ExportError, InputError, ModelFileError, NnormExportError, ParityError
from nnorm_export.files import onnx_file
from nnorm_export.files.durable import read_whole
from nnorm_export.files.inspection import describe
from nnorm_export.files.staging import parents_made, staged_folder
from nnorm_export.parity.certificates import signatures
from nnorm_export.parity.certificates.bits import FileBits, bits_of
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES
from nnorm_export.parity.verdict.compare_outputs import criterion_text, dependence, judge_outputs, require_dependence
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.parity.verdict.outcome import ParityReport, on_changed_inputs, worst
from nnorm_export.reading import JSON_BYTES, PROTOBUF_BYTES, parse_json, read_bytes, size_of
from nnorm_export.runtimes import RUNTIMES, Runner, installed_version, load
from nnorm_export.runtimes.tensorrt import is_engine

CERTIFICATE, DATA, TRUTH, YARDSTICK = "certificate.json", "test_data_set_{}", "truth_{}", "yardstick_{}"
_FORMAT = 3
_SETS = 4  # the inputs of the user, changed ones, and up to two with other masks
_FOLDERS = {name.format(index) for name in (DATA, TRUTH, YARDSTICK) for index in range(_SETS)}


class DataSet(NamedTuple):
    """Inputs that were compared, PyTorch's outputs for them, those in float64 if there are any, and the yardsticks."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    truth: Sequence[Array] | None
    yardsticks: Sequence[Array | None]


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, together with the external data of an ONNX file."""
    try:
        return read_whole(path, lambda: _digest(path, onnx_file.companions(path)))
    except OSError as error:
        raise ModelFileError(
            f"{path}: {error.filename} cannot be read ({error.strerror}); a file and its .data go together"
        ) from error


def _digest(path: Path, data: Sequence[Path]) -> str:
    """The SHA-256 of ``path`` if it has no external ``data``; else of it, and of the length and bytes of each file."""
    digest = hashlib.sha256()
    for each in (path, *data):
        if each is not path:
            digest.update(f"{each.stat().st_size}\0".encode())
        with each.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_folder(folder: Path) -> None:
    """Raises the errors of :func:`write` that can be known before the comparison.

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


def write(
    folder: Path,
    path: Path,
    runner: Runner,
    report: ParityReport,
    compared: Sequence[DataSet],
    criteria: Sequence[Criterion],
    *,
    sha256: str,
    computed_in: str,
    private_key: Path | None = None,
) -> None:
    """Writes the certificate of ``path``, whole or not at all; an older certificate in ``folder`` is replaced.

    Args:
        sha256: of the file before the comparison.
        computed_in: as for :func:`~nnorm_export.parity.verdict.compare_outputs.judge`.
        private_key: signs the certificate, together with the file.

    Raises:
        ModelFileError: the file is another now.
        InputError: ``folder`` holds something other than a certificate, or cannot be written; or the key is not one.
        RuntimeMissingError: there is a key, and model-signing is not installed.
    """
    check_folder(folder)
    certificate = {
        "format": _FORMAT,
        "file": path.name,
        "sha256": sha256,
        "runtime": report.runtime,
        "criteria": [asdict(criterion) for criterion in criteria],
        "decided_by": report.criterion,
        "outputs": [asdict(output) for output in report.outputs],
        "implementations": report.implementations,
        "data_sets": len(compared),
        "computed_in": computed_in,
        "bits": bits_of(path, runner, runner.feed(compared[0].inputs, {})).to_json(),
        "versions": versions(),
    }
    try:
        with parents_made(folder), staged_folder(folder) as staged:
            (staged / CERTIFICATE).write_text(json.dumps(certificate, indent=2) + "\n", encoding="utf-8")
            names = [info.name for info in runner.inputs], [info.name for info in runner.outputs]
            for index, each in enumerate(compared):
                _write_tensors(staged / DATA.format(index), "input", names[0], each.inputs)
                _write_tensors(staged / DATA.format(index), "output", names[1], each.outputs)
                if each.truth is not None:
                    _write_tensors(staged / TRUTH.format(index), "output", names[1], each.truth)
                _write_tensors(staged / YARDSTICK.format(index), "output", names[1], each.yardsticks)
            if private_key is not None:
                signatures.sign(path, folder, staged, private_key)
            if file_sha256(path) != sha256:
                raise ModelFileError(f"{path}: it was replaced while it was compared; verify it again")
    except (OSError, ExportError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = getattr(cause, "strerror", None) or error
        raise InputError(f"{folder}: cannot be written ({reason}); name another folder") from error


def replay(
    path: str | Path,
    folder: str | Path,
    *,
    runtime: str | None = None,
    trust_pickle: bool = False,
    public_key: str | Path | None = None,
) -> ParityReport:
    """Runs the file ``path`` on the inputs in ``folder`` and compares with the recorded results of PyTorch.

    Needs neither PyTorch nor the model's code. ``trust_pickle`` is that of :func:`nnorm_export.load`. With
    ``public_key``, a file, the certificate must be signed, and the signature is checked before anything is run.
    ``signature`` of the report says whether there is one and whether it was checked.

    Raises:
        ParityError: the file is a model, and not the one that was certified; or the signature does not hold.
        InputError: there is no certificate in ``folder``, or it is damaged, or not signed; or the key is not one.
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
    """
    key = None if public_key is None else Path(public_key)
    return read_whole(Path(folder), lambda: _replay(Path(path), Path(folder), runtime, trust_pickle, key))


def recorded_bits(path: Path, folder: Path, runner: Runner) -> tuple[dict[str, Array], FileBits]:
    """The inputs in ``folder`` by name, and the digests that were recorded of ``path`` on them.

    Raises:
        ParityError, InputError: as :func:`replay`, or the digests are damaged.
    """
    certificate = _certificate_of(path, folder)
    try:
        bits = FileBits.from_json(certificate["bits"])
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{folder}: the certificate is damaged (bits: {error}); record it again") from error
    return runner.feed(_read_tensors(folder / DATA.format(0), "input", range(len(runner.inputs))), {}), bits


def _certificate_of(path: Path, folder: Path) -> dict[str, Any]:
    """The certificate in ``folder``, which is one of ``path``."""
    certificate = _read_certificate(folder)
    size_of(path, ModelFileError, f"; give the file that {folder} certifies")
    if (found := file_sha256(path)) != certificate["sha256"]:
        if not is_engine(path):
            describe(path)  # a damaged file is not another model: the error says that it cannot be read
        raise ParityError(
            f"{path} is not the file that {folder} certifies: its SHA-256 is {found[:12]}…, the certificate's "
            f"{str(certificate['sha256'])[:12]}…; take that file, or record it again with verify --record"
        )
    return certificate


def _replay(path: Path, folder: Path, runtime: str | None, trust_pickle: bool, public_key: Path | None) -> ParityReport:
    if public_key is not None:
        signatures.check(path, folder, public_key)
    certificate = _certificate_of(path, folder)
    runner = load(path, runtime, trust_pickle=trust_pickle)
    criteria = _criteria(folder, certificate["criteria"], len(runner.outputs))
    compared = [_read_set(folder, index, runner) for index in range(certificate["data_sets"])]
    judged = [
        judge_outputs(
            str(path),
            f"certificate {folder}",
            runner.outputs,
            runner(*each.inputs),
            *each[1:],
            criteria=criteria,
            computed_in=certificate["computed_in"],
        )
        for each in compared
    ]
    judged[1:] = map(on_changed_inputs, judged[1:])
    others = compared[1].outputs if len(compared) > 1 else None
    outputs = require_dependence(
        [worst(parts) for parts in zip(*judged, strict=True)], dependence(compared[0].outputs, others)
    )
    is_double = any(info.dtype.name == "float64" for info in runner.outputs)
    text = criterion_text(outputs, criteria, is_double=is_double, has_truth=compared[0].truth is not None)
    report = ParityReport(runner.runtime, text, outputs, runner.implementations)
    if signatures.is_signed(folder):
        report = replace(report, signature="not checked" if public_key is None else "checked")
    return report


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
        _read_json(folder)
    except InputError:
        return False
    return names <= {CERTIFICATE, signatures.SIGNATURE, *_FOLDERS}


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        certificate: dict[str, Any] = parse_json(read_bytes(folder / CERTIFICATE, JSON_BYTES, InputError))
    except (InputError, ValueError) as error:
        raise InputError(f"{folder}: there is no certificate ({error}); verify --record writes one") from error
    if not isinstance(certificate, dict) or "format" not in certificate:
        raise InputError(f"{folder}: {CERTIFICATE} is not a certificate; verify --record writes one")
    return certificate


def _read_certificate(folder: Path) -> dict[str, Any]:
    certificate = _read_json(folder)
    if certificate["format"] != _FORMAT:
        raise InputError(f"{folder}: the certificate has another format; record it again with this nnorm_export")
    if missing := {"sha256", "criteria", "data_sets", "computed_in"} - certificate.keys():
        raise InputError(f"{folder}: the certificate lacks {', '.join(sorted(missing))}; record it again")
    if certificate["computed_in"] not in ("", *FLOAT_TYPES):
        raise InputError(f"{folder}: the certificate is damaged (computed_in); record it again")
    if type(certificate["data_sets"]) is not int or certificate["data_sets"] not in range(1, _SETS + 1):
        raise InputError(
            f"{folder}: the certificate says that it has {certificate['data_sets']!r} sets of inputs, "
            f"instead of 1 to {_SETS}; record it again"
        )
    return certificate


def _criteria(folder: Path, recorded: Any, count: int) -> list[Criterion]:
    try:
        criteria = [
            replace(
                Criterion.of(each["kind"], each["rtol"], each["atol"], each["statistic"]),
                is_named=bool(each["is_named"]),
            )
            for each in recorded
        ]
    except (TypeError, KeyError, NnormExportError) as error:
        raise InputError(f"{folder}: the certificate is damaged (criteria: {error}); record it again") from error
    if len(criteria) != count:
        raise InputError(f"{folder}: the certificate has {len(criteria)} criteria for {count} outputs; record it again")
    return criteria


def _read_set(folder: Path, index: int, runner: Runner) -> DataSet:
    data, exact = folder / DATA.format(index), folder / TRUTH.format(index)
    indices = range(len(runner.outputs))
    outputs = _read_tensors(data, "output", indices)
    truth = _read_tensors(exact, "output", indices) if exact.is_dir() else None
    for info, output, true in zip(runner.outputs, outputs, truth or outputs, strict=True):
        if true.shape != output.shape or not {output.dtype.kind, true.dtype.kind} <= {*"fiubV"}:  # V: bfloat16
            raise InputError(
                f"{folder}: the certificate is damaged (its results of {info.name} in {data.name} are "
                f"{output.dtype}{list(output.shape)}, in {exact.name} {true.dtype}{list(true.shape)}); record it again"
            )
    inputs = _read_tensors(data, "input", range(len(runner.inputs)))
    return DataSet(inputs, outputs, truth, _read_yardsticks(folder / YARDSTICK.format(index), outputs))


def _read_yardsticks(folder: Path, results: Sequence[Array]) -> list[Array | None]:
    """The yardsticks; None for an output that has none, as those that are not floating-point."""
    found: list[Array | None] = [None] * len(results)
    for index, result in enumerate(results):
        if (folder / f"output_{index}.pb").exists():
            (yardstick,) = _read_tensors(folder, "output", [index])
            if yardstick.shape != result.shape or not bool((yardstick > 0).all()):
                raise InputError(f"{folder}: the certificate is damaged (output_{index}); record it again")
            found[index] = yardstick
    return found


def _write_tensors(folder: Path, kind: str, names: Sequence[str], arrays: Sequence[Array | None]) -> None:
    folder.mkdir(exist_ok=True)
    for index, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if array is None:
            continue
        tensor = onnx.numpy_helper.from_array(array, name)
        (folder / f"{kind}_{index}.pb").write_bytes(tensor.SerializeToString())


def _read_tensors(folder: Path, kind: str, indices: Iterable[int]) -> list[Array]:
    arrays = []
    for index in indices:
        file = folder / f"{kind}_{index}.pb"
        try:
            tensor = onnx.TensorProto.FromString(read_bytes(file, PROTOBUF_BYTES, InputError))
            if uses_external_data(tensor):
                raise ValueError("its numbers lie in another file")
            arrays.append(onnx.numpy_helper.to_array(tensor))
        except (InputError, DecodeError, ValueError, TypeError, KeyError, MemoryError) as error:
            raise InputError(f"{file}: the certificate is damaged ({error}); record it again") from error
    return arrays

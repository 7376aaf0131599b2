"""replay(): does a file still compute what its certificate says? Needs neither PyTorch nor the model's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, ModelFileError, NnormExportError
from nnorm_export.files.durable import read_whole
from nnorm_export.files.onnx_file import companions
from nnorm_export.files.published import local, local_certificate
from nnorm_export.parity.as_computed import as_computed, outputs_inside
from nnorm_export.parity.certificates import signatures
from nnorm_export.parity.certificates.bom_reading import folder_of
from nnorm_export.parity.certificates.files import ALLOWED_ERROR, COUNTED, DATA, FLOAT64, certificate_of, read_tensors
from nnorm_export.parity.certificates.metrics import metric_of
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison, criterion_text
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.parity.verdict.dependence import require_dependence
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.runtimes import Runner, load


def replay(
    path: str | Path,
    folder: str | Path,
    *,
    runtime: str | None = None,
    trust_pickle: bool = False,
    public_key: str | Path | None = None,
) -> ParityReport:
    """Runs the file ``path`` on the inputs in ``folder`` and compares with the recorded results of PyTorch.

    Args:
        path: the file that the certificate is of, here or on the Hub, as for :func:`nnorm_export.load`.
        folder: the certificate, here or on the Hub, which ``verify(…, certificate=)`` wrote; or the in-toto statement
            in it, ``certificate.json``; or a BOM of it, which :func:`nnorm_export.write_bom` wrote.
        runtime, trust_pickle: as for :func:`nnorm_export.load`.
        public_key: a file. With it, the certificate must be signed, and the signature is checked before anything is
            run. ``signature`` of the report says whether there is one and whether it was checked.

    Raises:
        ParityError: the file is not the one that was certified, or the signature is not valid, or the BOM is one of
            another certificate.
        InputError: there is no certificate in ``folder``, or it is damaged, or not signed; or the key is not one.
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
    """
    key = None if public_key is None else Path(public_key)
    path, given = Path(local(path)), Path(local_certificate(folder))
    found = folder_of(path, given)
    # The signature, the hash and the run read the files one after another: all of them must have read the same.
    return read_whole(
        given,
        lambda: _replay(path, folder_of(path, given), runtime, trust_pickle, key),
        lambda: _files_of(path, found),
    )


def _files_of(path: Path, folder: Path) -> list[Path]:
    """The model, its external data, and the files of the certificate; those alone that are there."""
    try:
        data = companions(path)
    except ModelFileError:  # the reading reports it
        data = []
    return [path, *data, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))]


def _replay(path: Path, folder: Path, runtime: str | None, trust_pickle: bool, public_key: Path | None) -> ParityReport:
    if public_key is not None:
        signatures.check(path, folder, public_key)
    certificate = certificate_of(path, folder)
    runner = load(path, runtime, trust_pickle=trust_pickle)
    names = [info.name for info in runner.outputs]
    criteria = _criteria(folder, certificate["criteria"], len(names))
    comparison = Comparison(str(path), f"certificate {folder}", names, criteria, certificate["computed_in"])
    cases = [_read_case(folder, index, runner) for index in range(certificate["data_sets"])]
    depends = cases[0].dependence(cases[1].expected if len(cases) > 1 else None)
    outputs = require_dependence(comparison.worst_of(cases), depends)
    is_double = any(info.dtype.name == "float64" for info in runner.outputs)
    text = criterion_text(outputs, criteria, is_double=is_double, has_float64=cases[0].float64 is not None)
    only = str(certificate.get("given_only", ""))
    metric, by_metric_alone = metric_of(folder, certificate, cases[0].actual)
    report = ParityReport(
        runner.runtime,
        str(certificate.get("decided_by", text)) if by_metric_alone else text,
        outputs,
        runner.implementations,
        given_only=only,
        least_batch=runner.least_batch,
        metric=metric,
        by_metric_alone=by_metric_alone,
    )
    if signatures.is_signed(folder):
        report = replace(report, signature="not checked" if public_key is None else "checked")
    return report


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


def _read_case(folder: Path, index: int, runner: Runner) -> Case:
    data, exact = folder / DATA.format(index), folder / FLOAT64.format(index)
    indices = range(len(runner.outputs))
    expected = outputs_inside(runner, read_tensors(data, "output", indices))
    float64 = read_tensors(exact, "output", indices) if exact.is_dir() else None
    for info, output, wide in zip(runner.outputs, expected, float64 or expected, strict=True):
        if wide.shape != output.shape or not {output.dtype.kind, wide.dtype.kind} <= {*"fiubV"}:  # V: bfloat16
            raise InputError(
                f"{folder}: the certificate is damaged (its results of {info.name} in {data.name} are "
                f"{output.dtype}{list(output.shape)}, in {exact.name} {wide.dtype}{list(wide.shape)}); record it again"
            )
    inputs = read_tensors(data, "input", range(len(runner.inputs)))
    counted = _read_counted(folder / COUNTED.format(index), expected)
    case = Case(inputs, expected, as_computed(runner)(*inputs), float64=float64, counted=counted, is_changed=index > 0)
    allowed_error = _read_allowed_errors(folder / ALLOWED_ERROR.format(index), case.take(expected))
    return replace(case, allowed_error=allowed_error)


def _read_counted(folder: Path, results: Sequence[Array]) -> list[Array | None] | None:
    """Which indices of the first axes of each output count; None for an output of which all do."""
    if not folder.is_dir():
        return None
    counted = _read_of_some(folder, len(results))
    for index, (counts, result) in enumerate(zip(counted, results, strict=True)):
        if counts is not None and (counts.dtype != bool or counts.shape != result.shape[: counts.ndim]):
            raise _damaged(folder, index)
    return counted


def _read_allowed_errors(folder: Path, results: Sequence[Array]) -> list[Array | None]:
    """The allowed error of each output; None for an output that has none."""
    found = _read_of_some(folder, len(results))
    for index, (allowed, result) in enumerate(zip(found, results, strict=True)):
        if allowed is None:
            continue
        is_valid = allowed.dtype.kind == "f" and allowed.shape == result.shape
        if not is_valid or not bool(((allowed > 0) & np.isfinite(allowed)).all()):
            raise _damaged(folder, index)
    return found


def _read_of_some(folder: Path, count: int) -> list[Array | None]:
    """What ``folder`` has for each of ``count`` outputs; None where it has nothing."""
    files = [folder / f"output_{index}.pb" for index in range(count)]
    return [read_tensors(folder, "output", [index])[0] if file.exists() else None for index, file in enumerate(files)]


def _damaged(folder: Path, index: int) -> InputError:
    return InputError(f"{folder}: the certificate is damaged (output_{index}); record it again")

"""What a model card may state: what a certificate and the settings of tune() say of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned, read_tuned
from nnorm_export.metrics.gate import MetricReport
from nnorm_export.parity.certificates.files import certificate_of
from nnorm_export.parity.verdict.outcome import OutputParity


@dataclass(frozen=True)
class Certified:
    """A certificate of the file.

    Attributes:
        folder: of the certificate.
        runtime, criterion, given_only: as of :class:`nnorm_export.ParityReport`.
        metric: the metric of the user; None without one.
        by_metric_alone: whether the metric alone decided.
        versions: of the packages with which the file was compared.
    """

    folder: Path
    runtime: str
    criterion: str
    given_only: str
    outputs: list[OutputParity]
    metric: MetricReport | None
    by_metric_alone: bool
    versions: dict[str, str]


def certified(path: Path, folder: Path) -> Certified:
    """Reads the certificate in ``folder``, and checks that it is one of ``path``.

    Raises:
        ParityError: it is of another file.
        InputError: the certificate is missing, or it is damaged.
    """
    entries = certificate_of(path, folder)
    try:
        metric = entries.get("metric")
        found = Certified(
            folder,
            runtime=_of(entries, "runtime", str),
            criterion=_of(entries, "decided_by", str),
            given_only=_of(entries, "given_only", str, ""),
            outputs=[_made(OutputParity, each) for each in _of(entries, "outputs", list)],
            metric=None if metric is None else _made(MetricReport, metric),
            by_metric_alone=entries.get("by_metric_alone") is True,
            versions={str(name): str(version) for name, version in _of(entries, "versions", dict).items()},
        )
        numbers = [number for output in found.outputs for number in (output.max_abs_diff, output.rows)]
        if found.metric is not None:
            numbers += [found.metric.value, found.metric.reference, found.metric.difference, found.metric.samples]
            _ = found.metric.measured  # its numbers are numbers
        if not found.outputs or not all(isinstance(number, (int, float)) for number in numbers):
            raise ValueError("outputs")
        _ = [str(output) for output in found.outputs]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{folder}: the certificate is damaged ({error}); record it again") from error
    return found


def _made(kind: Any, entries: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in entries.items() if name in names})


def _of(entries: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = entries.get(name, default)
    if not isinstance(value, kind):
        raise TypeError(name)
    return value


def measured(path: Path, settings: Path) -> Tuned:
    """Reads the settings that tune() made of ``path``, or for it.

    Raises:
        ModelFileError: they are of another file, damaged, or without a time.
    """
    tuned = read_tuned(settings)
    if file_sha256(path) not in (tuned.sha256, tuned.source_sha256):
        raise ModelFileError(f"{settings}: they were measured for another file than {path}; tune that: {tuned.command}")
    winner = tuned.measured["winner"]
    if not all(isinstance(winner.get(name), float) for name in ("milliseconds", "ratio")):
        raise ModelFileError(f"{settings}: they have no time of the winner; tune {path} again")
    return tuned

"""The files of a certificate: its layout, and reading it.

A folder holds ``certificate.json``, an in-toto statement (:mod:`nnorm_export.parity.certificates.statements`), and, as
in ONNX's backend tests, ``test_data_set_0`` with ``input_N.pb`` and PyTorch's results ``output_N.pb``. ``float64_0``
holds the results in float64 if there are any, and ``allowed_error_0`` the allowed error of each element that counts.
``counted_0`` says which these are, if not all do. Further inputs that were compared follow as ``test_data_set_1``.
``bits`` in ``certificate.json`` are digests of what the runtime computed in each normalization and output on
``test_data_set_0``. ``metric`` has what a metric of the user is computed from
(:mod:`nnorm_export.parity.certificates.metrics`). ``model.sig`` is its signature, if it has one:
:mod:`nnorm_export.parity.certificates.signatures`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.parity.certificates.contents import require_contents
from nnorm_export.parity.certificates.statements import read_statement, require_file
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES
from nnorm_export.reading import JSON_BYTES, PROTOBUF_BYTES, parse_json, read_bytes, size_of

CERTIFICATE = "certificate.json"
DATA, FLOAT64, ALLOWED_ERROR, COUNTED = "test_data_set_{}", "float64_{}", "allowed_error_{}", "counted_{}"
_FORMATS = (4, 5, 6)  # of certificates that are not statements, which are still read
SETS = 5  # the inputs of the user, changed ones, up to two with other masks, and one with other integers


def certificate_of(path: Path, folder: Path) -> dict[str, Any]:
    """The certificate in ``folder``, which is one of ``path``."""
    certificate = _read_certificate(folder)
    size_of(path, ModelFileError, f"; give the file that {folder} certifies")
    require_file(path, certificate, folder)
    require_contents(folder, certificate)
    return certificate


def read_json(folder: Path) -> dict[str, Any]:
    """The predicate of the certificate in ``folder`` with its ``subjects``; of formats 4 to 6, the whole JSON.

    Raises:
        InputError: the certificate is missing, or it states something else.
    """
    try:
        certificate: dict[str, Any] = parse_json(read_bytes(folder / CERTIFICATE, JSON_BYTES, InputError))
    except (InputError, ValueError) as error:
        raise InputError(f"{folder}: there is no certificate ({error}); verify --record writes one") from error
    if isinstance(certificate, dict) and "_type" in certificate:
        return read_statement(certificate, folder)
    if not isinstance(certificate, dict) or "format" not in certificate:
        raise InputError(f"{folder}: {CERTIFICATE} is not a certificate; verify --record writes one")
    return certificate


def _read_certificate(folder: Path) -> dict[str, Any]:
    certificate = read_json(folder)
    if "subjects" not in certificate and certificate["format"] not in _FORMATS:
        raise InputError(f"{folder}: the certificate has another format; record it again with this nnorm_export")
    names_file = set() if "subjects" in certificate else {"sha256"}
    if missing := {"criteria", "data_sets", "computed_in", *names_file} - certificate.keys():
        raise InputError(f"{folder}: the certificate lacks {', '.join(sorted(missing))}; record it again")
    if certificate["computed_in"] not in ("", *FLOAT_TYPES):
        raise InputError(f"{folder}: the certificate is damaged (computed_in); record it again")
    if type(certificate["data_sets"]) is not int or certificate["data_sets"] not in range(1, SETS + 1):
        raise InputError(
            f"{folder}: the certificate says that it has {certificate['data_sets']!r} sets of inputs, "
            f"instead of 1 to {SETS}; record it again"
        )
    return certificate


def read_tensors(folder: Path, kind: str, indices: Iterable[int]) -> list[Array]:
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

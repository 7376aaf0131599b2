"""The certificate as an in-toto Statement v1: which files, and what is stated of them (docs/attestation.md).

``certificate.json`` is the statement. Its subjects are the model and its external data, and its predicate says how they
were compared. Certificates of the formats 4 to 6, which were no statements, are still read: there ``sha256`` is that of
:func:`nnorm_export.files.sha256.file_sha256`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, ParityError
from nnorm_export.files.inspection import describe
from nnorm_export.files.sha256 import file_digests, file_sha256
from nnorm_export.runtimes.tensorrt import is_engine

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:nnorm-export:parity:v"
VERSION = 1
PREDICATE_TYPE = f"{PREDICATE}{VERSION}"

_SHA256 = re.compile(r"[0-9a-f]{64}")


def statement(subjects: Mapping[str, str], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """The statement that ``predicate`` holds of the files ``subjects``, a SHA-256 for each name."""
    subject = [descriptor(name, sha256) for name, sha256 in subjects.items()]
    return {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": PREDICATE_TYPE, "predicate": dict(predicate)}


def descriptor(name: str, sha256: str) -> dict[str, Any]:
    """in-toto's ResourceDescriptor of a file."""
    return {"name": name, "digest": {"sha256": sha256}}


def read_statement(found: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The predicate of a statement, with its subjects, a list of (name, SHA-256), as ``subjects``.

    Args:
        found: the JSON of the statement.
        where: what errors name.

    Raises:
        InputError: it is a statement of another kind or version, or it names no file, or it is damaged.
    """
    if found["_type"] != STATEMENT_TYPE:
        raise InputError(
            f"{where}: it is of the type {found['_type']!r}, and {STATEMENT_TYPE} is read; record it again"
        )
    kind = found.get("predicateType")
    if kind != PREDICATE_TYPE:
        newer = isinstance(kind, str) and re.fullmatch(rf"{re.escape(PREDICATE)}(\d{{1,9}})", kind)
        if newer and int(newer[1]) > VERSION:
            raise InputError(f"{where}: a newer nnorm_export has written it ({kind}); update nnorm_export to read it")
        raise InputError(
            f"{where}: it states something else than parity (its predicateType is {kind!r}, not {PREDICATE_TYPE}); "
            "verify --record writes a certificate"
        )
    predicate = found.get("predicate")
    if not isinstance(predicate, dict):
        raise _damaged(where, "predicate")
    return {**predicate, "subjects": subjects_in(found.get("subject"), where)}


def subjects_in(subjects: Any, where: Path) -> list[tuple[str, str]]:
    """The (name, SHA-256) of each of ``subjects``, a list of ResourceDescriptors.

    Raises:
        InputError: there is none, or one has no name or no SHA-256.
    """
    if not subjects:
        raise InputError(f"{where}: it names no file (subject is empty), so it certifies none; record it again")
    try:
        found = [(each["name"], each["digest"]["sha256"]) for each in subjects]
        if not all(isinstance(name, str) and _SHA256.fullmatch(sha256) for name, sha256 in found):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(where, "subject") from error
    return found


def require_file(path: Path, certificate: Mapping[str, Any], where: Path) -> None:
    """Checks that ``certificate``, which ``where`` holds, is one of ``path``.

    Raises:
        ParityError: it is one of another file.
        ModelFileError: ``path`` or its external data cannot be read.
    """
    if "subjects" in certificate:
        require_subjects(path, certificate["subjects"], where)
    elif (found := file_sha256(path)) != certificate["sha256"]:
        raise _another(path, where, "certificate", "its SHA-256", found, str(certificate["sha256"]))


def require_subjects(path: Path, recorded: list[tuple[str, str]], where: Path, kind: str = "certificate") -> None:
    """Checks that ``path`` and its external data have the digests ``recorded``, whatever the file ``path`` is called.

    The file names its external data: of two such files that changed places, each has the other's digest.

    Args:
        where, kind: what has recorded them, for messages: a certificate or a BOM.

    Raises:
        ParityError: a file is missing in ``recorded``, or it has one more.
        ModelFileError: ``path`` or its external data cannot be read.
    """
    left = list(recorded)
    for name, sha256 in file_digests(path).items():
        of_its_name = [subject for subject in left if subject[0] == name and name != path.name]
        match = next((subject for subject in of_its_name or left if subject[1] == sha256), None)
        if match is None:
            of_name = next((digest for subject, digest in left if subject == name), left[0][1] if left else "")
            what = "its SHA-256" if name == path.name else f"the SHA-256 of its external data {name}"
            raise _another(path, where, kind, what, sha256, of_name)
        left.remove(match)
    if left:
        names = ", ".join(name for name, _ in left)
        raise ParityError(
            f"{path} is not all that {where} {_VERBS[kind]}: {names} is missing here, neither the file nor its "
            f"external data; {_remedy(kind)}"
        )


def _another(path: Path, where: Path, kind: str, what: str, found: str, recorded: str) -> ParityError:
    if not is_engine(path):
        describe(path)  # a damaged file is not another model: the error says that it cannot be read
    theirs = f"the {kind}'s {recorded[:12]}…" if recorded else f"and the {kind} has none"
    return ParityError(
        f"{path} is not the file that {where} {_VERBS[kind]}: {what} is {found[:12]}…, {theirs}; {_remedy(kind)}"
    )


_VERBS = {"certificate": "certifies", "BOM": "describes"}


def _remedy(kind: str) -> str:
    again = "record it again with verify --record" if kind == "certificate" else "write it again with verify --bom"
    return f"take that file, or {again}"


def _damaged(where: Path, what: str) -> InputError:
    return InputError(f"{where}: the certificate is damaged ({what}); record it again")

"""A BOM in the place of a certificate: what ``verify --replay model.cdx.json`` reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nnorm_export.errors import InputError, ParityError
from nnorm_export.parity.certificates.bom import ATTESTATION, MODEL
from nnorm_export.parity.certificates.files import CERTIFICATE
from nnorm_export.parity.certificates.statements import require_subjects
from nnorm_export.reading import JSON_BYTES, parse_json, read_bytes, size_of

_KNOWN = range(5, 8)  # the minor versions of CycloneDX 1 in which models and attestations are alike


def folder_of(path: Path, given: Path) -> Path:
    """The folder of the certificate that ``given`` is, or refers to.

    Args:
        path: the file that is certified.
        given: the folder, the statement in it, or a BOM.

    Raises:
        ParityError: a BOM is of another file than ``path``, or of another certificate than the one beside it.
        InputError: ``given`` is something else, or damaged.
    """
    if not given.is_file():  # a folder; of what is missing, the reading tells
        return given
    try:
        found = parse_json(read_bytes(given, JSON_BYTES, InputError))
    except ValueError as error:
        raise InputError(f"{given}: it is not JSON ({error}); give {_GIVE}") from error
    if isinstance(found, dict) and "bomFormat" in found:
        return _folder_of_bom(path, given, found)
    if given.name != CERTIFICATE:
        raise InputError(f"{given}: it is neither a BOM nor called {CERTIFICATE}; give {_GIVE}")
    return given.parent


_GIVE = f"a folder that verify --record wrote, the {CERTIFICATE} in it, or a BOM that verify --bom wrote"


def _folder_of_bom(path: Path, bom: Path, found: Mapping[str, Any]) -> Path:
    _require_version(bom, found)
    model = found.get("metadata", {}).get("component") if isinstance(found.get("metadata"), dict) else None
    if not isinstance(model, dict) or model.get("type") != MODEL:
        raise InputError(f"{bom}: it is a BOM of something else than a model; give {_GIVE}")
    try:
        parts = [model, *(each for each in model.get("components", ()) if each["type"] == "file")]
        subjects = [(str(part["name"]), _sha256(part)) for part in parts]
        references = [each for each in model.get("externalReferences", ()) if each["type"] == ATTESTATION]
        places = [(str(each["url"]), _sha256(each)) for each in references]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(f"{bom}: the BOM is damaged ({error}); write it again with verify --bom") from error
    if len(places) != 1:
        raise InputError(
            f"{bom}: it refers to {len(places)} certificates, instead of one; write it again with verify --bom"
        )
    require_subjects(path, subjects, bom, "BOM")
    return _certificate_at(bom, *places[0])


def _require_version(bom: Path, found: Mapping[str, Any]) -> None:
    version = str(found.get("specVersion"))
    if found["bomFormat"] != "CycloneDX" or version not in {f"1.{minor}" for minor in _KNOWN}:
        raise InputError(
            f"{bom}: it is {found['bomFormat']!r} {version!r}, and CycloneDX 1.{_KNOWN[0]} to 1.{_KNOWN[-1]} is read; "
            "write it again with verify --bom"
        )


def _sha256(part: Mapping[str, Any]) -> str:
    found = [str(each["content"]) for each in part["hashes"] if each["alg"] == "SHA-256"]
    if len(found) != 1:
        raise ValueError(f"{len(found)} SHA-256, instead of one, of {part.get('name', 'the certificate')}")
    return found[0]


def _certificate_at(bom: Path, url: str, sha256: str) -> Path:
    """The folder of the certificate at ``url``, which is relative to the BOM."""
    place = _relative(url)
    if place is None or place.is_absolute() or place.name != CERTIFICATE or "\0" in str(place):
        raise InputError(
            f"{bom}: it refers to {url!r} instead of a {CERTIFICATE} by a relative path; write it again with "
            "verify --bom"
        )
    certificate = bom.parent / place
    size_of(certificate, InputError, f"; {bom} refers to it: both keep their places relative to each other")
    found = hashlib.sha256(read_bytes(certificate, JSON_BYTES, InputError)).hexdigest()
    if found != sha256:
        raise ParityError(
            f"{certificate} is not the certificate of {bom}: its SHA-256 is {found[:12]}…, the BOM's {sha256[:12]}…; "
            "take the certificate that the BOM was written of, or write the BOM again with verify --bom"
        )
    return certificate.parent


def _relative(url: str) -> Path | None:
    """The path that a relative reference names; None for one with a scheme or a host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a host that is not one
        return None
    return None if parts.scheme or parts.netloc else Path(unquote(parts.path))

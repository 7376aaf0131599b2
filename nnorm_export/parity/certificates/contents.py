"""The tensors of a certificate, which ``certificate.json`` lists with their digests as ``files``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError
from nnorm_export.reading import PROTOBUF_BYTES, read_bytes


def digests_in(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in the folders of a certificate, by its name: ``test_data_set_0/input_0.pb``.

    Raises:
        InputError: one of them cannot be read.
    """
    files = sorted(folder.glob("*/*"))
    return {file.relative_to(folder).as_posix(): _sha256(file) for file in files}


def require_contents(folder: Path, certificate: Mapping[str, Any]) -> None:
    """Checks that ``folder`` has the files that ``certificate`` lists, with the same bytes, and no others.

    Raises:
        InputError: a file was changed, added or removed, or the list is damaged.
    """
    if "files" not in certificate and "subjects" not in certificate:  # formats 4 to 6 had no list
        return
    listed = certificate.get("files")
    if not isinstance(listed, dict):
        raise InputError(f"{folder}: the certificate is damaged (files); record it again")
    for name, found in digests_in(folder).items():
        if name not in listed:
            raise InputError(f"{folder}: it has {name}, which the certificate does not list; remove it")
        if found != listed[name]:
            raise InputError(
                f"{folder / name}: the certificate is damaged (its SHA-256 is {found[:12]}…, not "
                f"{str(listed[name])[:12]}…); record it again"
            )
    if missing := sorted(name for name in listed if not (folder / name).is_file()):
        raise InputError(f"{folder / missing[0]}: the certificate is damaged (no such file); record it again")


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_bytes(file, PROTOBUF_BYTES, InputError)).hexdigest()

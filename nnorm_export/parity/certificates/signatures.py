"""Signatures of a file and its certificate: OpenSSF Model Signing v1, made and checked with a pair of keys, offline.

``model.sig`` in the folder of the certificate covers the model, its external data and every other file of that folder.
It names them relative to the nearest folder that holds both, so that the two may move together. ``model_signing
verify key FOLDER`` of the standard's own package, the extra ``sign``, checks it too. :mod:`.dsse` signs
the statement alone.
"""

from __future__ import annotations

import ast
import base64
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, ModelFileError, ParityError, first_line
from nnorm_export.files import onnx_file
from nnorm_export.parity.certificates.dsse import ENVELOPE, import_for_signing, write_envelope
from nnorm_export.parity.certificates.files import CERTIFICATE
from nnorm_export.reading import JSON_BYTES, parse_json, read_bytes, size_of

SIGNATURE = "model.sig"


def is_signed(folder: Path) -> bool:
    return os.path.lexists(folder / SIGNATURE)


def check_private_key(key: Path) -> None:
    """Raises the errors of :func:`sign` that can be known before the comparison.

    Raises:
        RuntimeMissingError: model-signing is not installed.
        InputError: ``key`` is not a private key that can sign.
    """
    _signer(key)


def sign(path: Path, folder: Path, staged: Path, key: Path) -> None:
    """Writes the signatures of ``path`` and its certificate into ``staged``, the folder that will be ``folder``.

    Raises:
        RuntimeMissingError, InputError: as :func:`check_private_key`.
        OSError: the signature cannot be written.
    """
    write_envelope((staged / CERTIFICATE).read_bytes(), key, staged / ENVELOPE)  # before the other, which covers it
    root = _common_folder(path, folder)
    files = {os.path.relpath(file, root): file for file in _files_of_model(path)}
    name = os.path.relpath(folder.absolute(), root)
    files |= {os.path.join(name, file.relative_to(staged)): file.absolute() for file in _files_in(staged)}
    # The package signs a whole folder. This one has the files, and no others, under the names that they will have.
    with tempfile.TemporaryDirectory() as temporary:
        for name, file in files.items():
            link = Path(temporary, path.name, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
        _signer(key).set_hashing_config(_hashing()).sign(Path(temporary, path.name), staged / SIGNATURE)


def check(path: Path, folder: Path, key: Path) -> None:
    """Checks that the public key ``key`` confirms ``path``, its external data and every file of the certificate.

    Raises:
        ParityError: the signature was made with another key, or a file was changed, added, removed or renamed.
        InputError: there is no signature, or ``key`` is not a public key.
        RuntimeMissingError: model-signing is not installed.
    """
    library = import_for_signing("model_signing.verifying")
    verifier = _with_key(key, "public", lambda: library.Config().use_elliptic_key_verifier(public_key=key))
    if not is_signed(folder):
        raise InputError(
            f"{folder}: the certificate is not signed (it has no {SIGNATURE}); take the signed one, or leave out the "
            "public key"
        )
    size_of(path, ModelFileError, f"; give the file that {folder} certifies")
    content = read_bytes(folder / SIGNATURE, JSON_BYTES, InputError)
    root = _common_folder(path, folder)
    try:
        with tempfile.TemporaryDirectory() as temporary:  # what is checked here is what is read below
            copy = Path(temporary, SIGNATURE)
            copy.write_bytes(content)
            verifier.set_hashing_config(_hashing()).set_ignore_unsigned_files(True).verify(root, copy)
        signed = _signed_names(content)
    except Exception as error:  # whatever went wrong, the signature was not confirmed: the user is told so, and why
        raise ParityError(
            f"{folder}: its signature does not hold for {path}, the certificate's files and the key {key}: "
            f"{_reason(error)}",
            _REMEDY,
        ) from error
    present = {os.path.relpath(file, root) for file in (*_files_of_model(path), *_files_in(folder.absolute()))}
    if unsigned := sorted(present - signed):
        raise ParityError(f"{folder}: its signature does not cover {', '.join(unsigned)}", _REMEDY)


def _reason(error: Exception) -> str:
    """What the package says, with the differences between files that it lists as Python does.

    It quotes two digests in each, as text in text, in marks that depend on the digests' bytes: they are left out.
    """
    message, mark, differences = str(error).partition(": [")
    try:
        listed = ast.literal_eval(f"[{differences}") if mark else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        listed = []
    if not listed:
        return first_line(error)
    files = "; ".join(str(each).partition(": Expected ")[0] for each in listed)
    return first_line(ValueError(f"{message}: {files}"))


_REMEDY = (
    "Use neither the file nor the certificate until you know why. Both keep their names and stay where they were "
    "relative to each other; the key is the public one of the pair that signed"
)


def _common_folder(path: Path, folder: Path) -> Path:
    try:
        return Path(os.path.commonpath([os.path.dirname(os.path.abspath(each)) for each in (path, folder)]))
    except ValueError as error:
        raise InputError(f"{folder} and {path} lie on different drives; a signature needs one for both") from error


def _files_of_model(path: Path) -> list[Path]:
    return [file.absolute() for file in (path, *onnx_file.companions(path))]


def _files_in(folder: Path) -> list[Path]:
    """All files in ``folder`` but the signature; a link to a folder counts as one, because its files are not here."""
    entries = (entry for entry in folder.rglob("*") if entry.is_symlink() or not entry.is_dir())
    return [entry for entry in entries if entry != folder / SIGNATURE]


def _signed_names(content: bytes) -> set[str]:
    """The names of the files in a signature that has been checked."""
    payload = base64.b64decode(parse_json(content)["dsseEnvelope"]["payload"])
    resources = parse_json(payload)["predicate"]["resources"]
    return {os.path.normpath(resource["name"]) for resource in resources}


def _signer(key: Path) -> Any:
    library = import_for_signing("model_signing.signing")
    return _with_key(key, "private", lambda: library.Config().use_elliptic_key_signer(private_key=key))


def _with_key(key: Path, kind: str, configure: Callable[[], Any]) -> Any:
    try:
        return configure()
    except Exception as error:  # missing, damaged, with a password: the user is told why it cannot be read
        raise InputError(
            f"{key}: it cannot be read as a {kind} key ({getattr(error, 'strerror', None) or first_line(error)}); give "
            "one of an elliptic curve, as PEM without a password: openssl ecparam -name prime256v1 -genkey -noout "
            "-out KEY.pem; openssl ec -in KEY.pem -pubout -out PUB.pem"
        ) from error


def _hashing() -> Any:
    """Hashes every file, whatever it is called, and the files that links lead to."""
    config = import_for_signing("model_signing.hashing").Config()
    return config.set_ignored_paths(paths=(), ignore_git_paths=False).set_allow_symlinks(True)

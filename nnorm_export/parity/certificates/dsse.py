"""The statement in a DSSE envelope, ``certificate.dsse.json``, which tools of the supply chain verify, cosign for one.

signature = sign("DSSEv1" length(type) type length(statement) statement)

``model.sig`` covers the envelope too, and alone decides in ``replay``, because it covers the bytes of every file. The
envelope is for tools that do not know model signatures.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, RuntimeMissingError, first_line

ENVELOPE = "certificate.dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def write_envelope(statement: bytes, key: Path, output: Path) -> None:
    """Signs ``statement`` with the private key ``key``, and writes both to ``output``.

    Raises:
        RuntimeMissingError: cryptography, which model-signing brings, is not installed.
        InputError: ``key`` is not a private key of an elliptic curve.
        OSError: ``output`` cannot be written.
    """
    serialization, hashes, ec = (
        import_for_signing(f"cryptography.hazmat.primitives.{name}")
        for name in ("serialization", "hashes", "asymmetric.ec")
    )
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
        # Each curve with the hash of its size, as model-signing and in-toto's own package have it.
        name = {256: "SHA256", 384: "SHA384", 521: "SHA512"}[private.curve.key_size]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{key}: it cannot be read as a private key of P-256, P-384 or P-521 ({error})") from error
    signature = private.sign(_encoded(statement), ec.ECDSA(getattr(hashes, name)()))
    der, info = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    keyid = hashlib.sha256(private.public_key().public_bytes(der, info)).hexdigest()
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": _text(statement),
        "signatures": [{"keyid": keyid, "sig": _text(signature)}],
    }
    output.write_text(json.dumps(envelope) + "\n", encoding="utf-8")


def _encoded(statement: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(statement), statement)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def import_for_signing(module: str) -> Any:
    """A module of cryptography or of model-signing, which the extra ``sign`` installs.

    Raises:
        RuntimeMissingError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise RuntimeMissingError(
            f"signatures need {package} ({first_line(error)}): pip install 'nnorm_export[sign]'"
        ) from error

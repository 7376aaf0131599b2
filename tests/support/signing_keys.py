"""Pairs of keys with which certificates are signed and checked."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa


def write_keys(folder: Path, name: str, private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    """Writes ``name.pem``, the private key, and ``name.pub``, the public one."""
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted)
    (folder / f"{name}.pem").write_bytes(secret)
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)

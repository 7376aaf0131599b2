"""The user's own texts in a file: in ONNX's metadata beside those of this package, in the note of the other formats."""

from __future__ import annotations

from collections.abc import Mapping

from nnorm_export.errors import ExportError
from nnorm_export.names import METADATA_PREFIX


def check_user_metadata(metadata: Mapping[str, str]) -> None:
    """Raises an ExportError if a key or a value is not text, or a key is empty or one of this package."""
    if not isinstance(metadata, Mapping):
        raise ExportError(f"metadata is {type(metadata).__name__}; give a dict of texts: {{'author': '…'}}")
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise ExportError(f"metadata: the key {key!r} is not text; a file keeps text alone")
        if not isinstance(value, str):
            raise ExportError(f"metadata {key!r} is {type(value).__name__}; a file keeps text alone: give str(…)")
        if not key or key.startswith(METADATA_PREFIX):
            raise ExportError(
                f"metadata {key!r}: give a key that is not empty and does not begin with {METADATA_PREFIX}"
            )
        if any("\ud800" <= character <= "\udfff" for character in key + value):
            raise ExportError(f"metadata {key!r} has a lone surrogate, which UTF-8 does not have; give other text")

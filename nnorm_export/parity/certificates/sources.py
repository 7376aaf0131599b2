"""The files that a certified model came from, and those that it was compared on: a certificate names their digests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from nnorm_export.errors import InputError
from nnorm_export.files.sha256 import plain_sha256
from nnorm_export.parity.certificates.statements import descriptor
from nnorm_export.reading import size_of

CHECKPOINT, DATA = "checkpoint", "data"
KINDS = (CHECKPOINT, DATA)

Paths: TypeAlias = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Source:
    """A file, and its SHA-256 before the comparison."""

    kind: str
    path: Path
    sha256: str


Sources: TypeAlias = Mapping[str, Paths] | Sequence[Source]


def sources_of(given: Sources | None) -> Sequence[Source]:
    """The sources that a user names, ``{"checkpoint": "best.pth", "data": ["data.npz", "labels.npz"]}``, with digests.

    What is such a sequence already is returned as it is: the command line reads the digests before it loads the model.

    Raises:
        InputError: a kind is unknown, or a file cannot be read.
    """
    if given is not None and not isinstance(given, Mapping):
        return given
    found = []
    for kind, paths in (given or {}).items():
        if kind not in KINDS:
            raise InputError(f"sources: {kind!r} is not one of {', '.join(KINDS)}")
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        found += [Source(kind, Path(path), _sha256(Path(path))) for path in several]
    return found


def in_predicate(sources: Sequence[Source]) -> dict[str, list[dict[str, Any]]]:
    """The sources of each kind, as ResourceDescriptors, in the order in which they were given.

    Raises:
        InputError: a file has changed since :func:`sources_of`.
    """
    for source in sources:
        if _sha256(source.path) != source.sha256:
            raise InputError(f"{source.path}: it was replaced while the file was compared; verify it again")
    return {
        kind: [descriptor(source.path.name, source.sha256) for source in sources if source.kind == kind]
        for kind in KINDS
    }


def _sha256(path: Path) -> str:
    size_of(path, InputError)  # a device or a pipe may never end
    try:
        return plain_sha256(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error

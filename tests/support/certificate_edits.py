"""Changes of a certificate whose digests fit again, as of another machine or by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nnorm_export.parity.certificates.contents import digests_in
from nnorm_export.parity.certificates.files import CERTIFICATE


def predicate_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CERTIFICATE).read_text())["predicate"]
    return found


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the predicate, writes what the block made of it, and lists the tensors as they are now."""
    file = folder / CERTIFICATE
    statement = json.loads(file.read_text())
    yield statement["predicate"]
    statement["predicate"]["files"] = digests_in(folder)
    file.write_text(json.dumps(statement))


def list_again(folder: Path) -> None:
    """Lists the tensors as they are now."""
    with edited(folder):
        pass

"""Objects of Kubernetes as YAML, with the changes that a user has made to the file."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnorm_export.errors import ExportError, RuntimeMissingError
from nnorm_export.reading import read_bytes

_HEADER = "# nnorm-export serve-repo wrote this file, and keeps your changes: "
_SIGNATURE = re.compile(rf"\A{re.escape(_HEADER)}(?P<digest>[0-9a-f]{{64}})\n")
# Text that every reader takes as text. Readers of YAML 1.1 take y for true, and others 1e3 or 0o7 for a number.
_PLAIN = re.compile(r"[A-Za-z/][\w./\-]+(:[\w./\-]+)*", re.ASCII)
_MODEL = re.compile(r"^ *nnorm-export/model: *(.+?) *$", re.MULTILINE)
_BYTES = 2**20  # as etcd, which keeps no larger object


def yaml_of(objects: Sequence[dict[str, Any]]) -> str:
    """The documents of ``objects``, which are of dicts, lists, text, numbers and truth values.

    Raises:
        RuntimeMissingError: PyYAML is not installed.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise RuntimeMissingError(
            "manifests are written by PyYAML, which is not installed: pip install 'nnorm_export[kubernetes]'"
        ) from error

    # The same labels appear several times: no reader shall look them up by an alias.
    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})

    yaml.add_representer(str, _represented, Dumper=dumper)
    return str(yaml.dump_all(objects, Dumper=dumper, sort_keys=False, width=120, explicit_start=True))


def _represented(dumper: Any, value: str) -> Any:
    style = None if _PLAIN.fullmatch(value) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def merged(path: Path, text: str, *, overwrite: bool) -> str:
    """What the file ``path`` is to have: ``text``, or its present content if that is ``text`` with changes of its user.

    Raises:
        ExportError: it has changes that would be lost, or is another program's file.
    """
    new = f"{_HEADER}{_digest(text)}\n{text}"
    if overwrite or not path.exists():
        return new
    # Git on Windows ends lines with \r\n.
    old = read_bytes(path, _BYTES, ExportError).decode("utf-8", "replace").replace("\r\n", "\n")
    signature = _SIGNATURE.match(old)
    if signature is None:
        raise ExportError(
            f"{path}: serve-repo did not write it, and would replace it; give another folder (--manifests), or "
            "overwrite_config=True (--overwrite-config)"
        )
    if (theirs := _MODEL.search(old)) and (ours := _MODEL.search(text)) and theirs[1] != ours[1]:
        raise ExportError(
            f"{path}: it is of the model {theirs[1]}, whose objects have the same name in a cluster; give another "
            "name= (--name), or another folder (--manifests)"
        )
    if signature["digest"] == _digest(text):
        return old
    if signature["digest"] != _digest(old[signature.end() :]):
        raise ExportError(
            f"{path}: it has changes that serve-repo did not write, and these options would replace it. Keep the "
            "changes in a patch (kubectl kustomize), or replace the file by overwrite_config=True (--overwrite-config)"
        )
    return new


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""The archives that PyTorch writes: the format of a file, and the note that nnorm_export wrote into it.

Reading them does not need PyTorch.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from nnorm_export.errors import ModelFileError
from nnorm_export.files.note import Note
from nnorm_export.names import NOTE_FILE

TORCHSCRIPT, PT2, AOTI = FORMATS = ("torchscript", "pt2", "aoti")


@dataclass(frozen=True)
class Archive:
    """A file that PyTorch wrote.

    Attributes:
        format: ``torchscript``, ``pt2`` or ``aoti``.
        note: what nnorm_export wrote about it; None if nnorm_export did not write the file.
        compiled_for: AOTInductor's description of the machine: ``AOTI_MACHINE``, ``AOTI_CPU_ISA`` and others.
    """

    path: Path
    format: str
    note: Note | None
    compiled_for: dict[str, str] = field(default_factory=dict)

    @property
    def form(self) -> str:
        return "unknown" if self.note is None else self.note.form

    @property
    def machine(self) -> str:
        """``x86_64 AVX512``; empty for a file without machine code."""
        keys = ("AOTI_MACHINE", "AOTI_CPU_ISA", "AOTI_COMPUTE_CAPABILITY")
        return " ".join(value for key in keys if (value := self.compiled_for.get(key)))


def is_archive(path: str | Path) -> bool:
    """Whether the file, if there is one, is a zip archive, as everything that ``torch`` saves is."""
    return Path(path).is_file() and zipfile.is_zipfile(path)


def read_archive(path: str | Path) -> Archive:
    """Raises ModelFileError if ``path`` is missing or is not a model that PyTorch saved."""
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
            kind = _format(entries)
            noted = next((entry for entry in entries if entry.endswith(f"/extra/{NOTE_FILE}")), None)
            text = None if noted is None else archive.read(noted)
            machines = [entry for entry in entries if entry.endswith("wrapper_metadata.json")]
            compiled_for = json.loads(archive.read(machines[0])) if machines else {}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error}); a model that PyTorch saved is a zip archive"
        ) from error
    if kind is None:
        raise ModelFileError(
            f"{path}: neither TorchScript, nor an exported program, nor a package of AOTInductor. For a checkpoint, "
            "export the model that it is for: -m package.module:factory --checkpoint"
        )
    try:
        return Archive(path, kind, None if text is None else Note.from_json(text), compiled_for)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path}: its entry {NOTE_FILE} is damaged ({error}); export the model again") from error


def _format(entries: list[str]) -> str | None:
    inside = [entry.partition("/")[2] for entry in entries]
    if any(entry.startswith("data/aotinductor/") for entry in inside):
        return AOTI
    if any(entry.startswith("models/") for entry in inside):
        return PT2
    return TORCHSCRIPT if "constants.pkl" in inside and any(e.startswith("code/") for e in inside) else None

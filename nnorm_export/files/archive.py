"""The files that are not ONNX (:mod:`.formats`), and the note that nnorm_export wrote into them.

PyTorch's own are archives. A flatbuffer has an archive with the note behind its content, and a folder has the note as a
file. Reading them does not need PyTorch.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nnorm_export.errors import ModelFileError
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.layer_entries import check_layers
from nnorm_export.files.least_batch import least_rows
from nnorm_export.files.lengths import checked
from nnorm_export.files.note import Note
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.names import NOTE_FILE
from nnorm_export.reading import check_entries, is_regular, parse_json, read_bytes, read_entry, size_of

_LONGEST_NOTE = 1 << 28
# What zipfile raises for damaged archives; the last two for encrypted entries and unknown compressions.
_DAMAGED = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Archive:
    """A model file that is not ONNX.

    Attributes:
        format: a name in :data:`.formats.FORMATS`.
        note: what nnorm_export wrote about it; None if nnorm_export did not write the file.
        compiled_for: AOTInductor's description of the machine: ``AOTI_MACHINE``, ``AOTI_CPU_ISA`` and others.
    """

    path: Path
    format: str
    note: Note | None
    compiled_for: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """In bytes; of a folder, that of the files in it."""
        files = [self.path] if self.path.is_file() else [entry for entry in self.path.rglob("*") if entry.is_file()]
        return sum(file.stat().st_size for file in files)

    @property
    def machine(self) -> str:
        """``x86_64 AVX512``; empty for a file without machine code."""
        keys = ("AOTI_MACHINE", "AOTI_CPU_ISA", "AOTI_COMPUTE_CAPABILITY")
        return " ".join(value for key in keys if (value := self.compiled_for.get(key)))


def is_package(path: str | Path) -> bool:
    """Whether ``path`` is a folder that is a file of a format, as the packages of Core ML are."""
    return _folder_format(Path(path)) is not None


def is_archive(path: str | Path) -> bool:
    """Whether the file, if there is one, is a zip archive, as all that ``torch`` saves is, or a runtime's."""
    if is_package(path):
        return True
    return is_regular(path) and (zipfile.is_zipfile(path) or _flatbuffer_format(Path(path)) is not None)


def read_archive(path: str | Path) -> Archive:
    """Raises ModelFileError if ``path`` is missing or is not a model that PyTorch saved."""
    path = Path(path)
    if (folder := _folder_format(path)) is not None:
        return _read_folder(path, folder)
    size_of(path, ModelFileError)
    identified = _flatbuffer_format(path)
    if identified is not None and not zipfile.is_zipfile(path):
        return Archive(path, identified, None)
    try:
        with zipfile.ZipFile(path) as archive:
            check_entries(path, archive.infolist(), ModelFileError)
            entries = archive.namelist()
            kind = identified or _archive_format(entries)
            noted = next((entry for entry in entries if entry.endswith(f"/extra/{NOTE_FILE}")), None)
            text = None if noted is None else read_entry(archive, noted)
            machines = [entry for entry in entries if entry.endswith("wrapper_metadata.json")]
            compiled_for = _machine(read_entry(archive, machines[0])) if machines else {}
    except _DAMAGED as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error}); a model that PyTorch saved is a zip archive"
        ) from error
    if kind is None:
        raise ModelFileError(
            f"{path}: neither TorchScript, nor an exported program, nor a package of AOTInductor. For a checkpoint, "
            "export the model that it is for (-m package.module:factory --checkpoint)"
        )
    return Archive(path, kind, _note_of(path, text), compiled_for)


def _read_folder(path: Path, folder: str) -> Archive:
    noted = path / NOTE_FILE
    text = read_bytes(noted, _LONGEST_NOTE, ModelFileError) if noted.is_file() else None
    return Archive(path, folder, _note_of(path, text))


def add_note(path: Path, note: Note) -> None:
    """Adds ``note`` to a folder as a file, and to a file as an entry of its archive.

    A flatbuffer has none: the archive is put behind its content, which runtimes do not read. LiteRT keeps its own
    metadata there too.
    """
    if path.is_dir():
        (path / NOTE_FILE).write_text(note.to_json(), encoding="utf-8")
        return
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        folder = next((name for name in archive.namelist() if "/" in name), "nnorm_export/").partition("/")[0]
        archive.writestr(f"{folder}/extra/{NOTE_FILE}", note.to_json())


def _note_of(path: Path, text: bytes | None) -> Note | None:
    try:
        return None if text is None else _note(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path}: its entry {NOTE_FILE} is damaged ({error}); export the model again") from error


def _machine(text: bytes) -> dict[str, str]:
    described = parse_json(text)
    if not isinstance(described, dict):
        raise ValueError("wrapper_metadata.json does not describe a machine")
    return {str(key): str(value) for key, value in described.items()}


def _note(text: bytes) -> Note:
    """The note, of the right types: others may have changed it."""
    note = Note.from_json(text)
    for entry in (*note.inputs, *note.outputs):
        TensorInfo.from_json(entry)
    check_layers(note.layers)
    least_rows(note.least_batch)
    optional = [choice for choice in (note.method, note.operators) if choice is not None]
    texts = (note.format, *optional, note.version, note.torch, note.device, note.weights_sha256, *note.nodes)
    is_typed = isinstance(note.nodes, dict) and isinstance(note.metadata, dict)
    if not is_typed or not all(isinstance(text, str) for text in (*texts, *note.metadata.values())):
        raise ValueError("a fact of the wrong type")
    return replace(note, lengths=checked(note.lengths))


def _folder_format(path: Path) -> str | None:
    """The format of a folder by its ending and entries; None for other folders and files."""
    rows = (row for row in FORMATS.values() if row.is_folder and row.ending == path.suffix)
    return next((row.name for row in rows if all(Path(path, entry).is_file() for entry in row.entries)), None)


def _flatbuffer_format(path: Path) -> str | None:
    """The format of a flatbuffer by its identifier; None for other files."""
    try:
        with path.open("rb") as file:
            identifier = file.read(8)[4:]
    except OSError:  # whoever reads the file reports it
        return None
    return next((row.name for row in FORMATS.values() if row.identifier and row.identifier == identifier), None)


def _archive_format(entries: Iterable[str]) -> str | None:
    """The format of an archive of PyTorch by the names of its entries; None for other archives."""
    inside = [entry.partition("/")[2] for entry in entries]
    rows = (row for row in FORMATS.values() if row.entries and not row.is_folder)
    return next(
        (row.name for row in rows if all(any(name.startswith(start) for name in inside) for start in row.entries)), None
    )

"""The tensors in a TorchScript archive, checked before PyTorch opens it.

``torch.jit.load`` trusts the archive's pickles: if the entry of a tensor is shorter than the pickle says, PyTorch reads
beyond the end of the entry, and a malformed pickle ends the process. Here the pickles are read first. Inert objects
replace all classes and functions that a pickle names, so that no code runs.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

from nnorm_export.errors import ModelFileError
from nnorm_export.reading import read_entry

_PICKLES = {"data.pkl": "data", "constants.pkl": "constants"}  # pickle -> the folder of its tensors
_BYTES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}


class _Inert:
    """Replaces every object that a pickle makes. It accepts any arguments, items and state, and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...


class _Reader(pickle.Unpickler):
    """Collects the tensors of a pickle: entry -> the number of bytes that it must have."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, entry, _, count = pid
        if kind != "storage" or not isinstance(entry, str) or not isinstance(count, int) or count < 0:
            raise ValueError("a tensor without a place or a length")
        # An inert text replaces the class if the pickle names no class.
        size = _BYTES[getattr(storage, "__name__", "")] * count
        self.sizes[entry] = max(size, self.sizes.get(entry, 0))
        return _Inert()


def check_storages(path: Path, content: IO[bytes]) -> None:
    """Raises ModelFileError if a pickle in ``content`` is malformed, or the entry of a tensor is too short.

    Args:
        path: the file that ``content`` was read from, for the messages.
    """
    with zipfile.ZipFile(content) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for name, folder in _PICKLES.items():
            if name not in entries:
                continue
            reader = _Reader(read_entry(archive, entries[name].filename))
            try:
                reader.load()
            except Exception as error:  # a damaged pickle may raise any error
                raise ModelFileError(
                    f"{path}: its entry {name} is damaged ({type(error).__name__}: {error}); export the model again"
                ) from error
            for entry, size in reader.sizes.items():
                found = entries.get(f"{folder}/{entry}")
                if found is None or found.file_size < size:
                    there = "is missing" if found is None else f"has {found.file_size} bytes of {size}"
                    raise ModelFileError(f"{path}: its entry {folder}/{entry} {there}; export the model again")

"""External data: the files that the location of a weight may name. Every reader uses this check."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from onnx.external_data_helper import uses_external_data

from nnorm_export.errors import ModelFileError
from nnorm_export.files.messages import messages
from nnorm_export.reading import size_of


def locate(model: Path, location: str) -> Path:
    """Returns the file that ``location`` in the file ``model`` names. The file need not exist.

    After links are followed, the file is a regular file in the folder of ``model`` or below. If ``model`` itself is a
    link, as in the cache of Hugging Face, the weights may also be beside the file to which the link leads, or in the
    store of that cache for files that repositories share.

    Raises:
        ModelFileError: the location is empty, absolute, has ``..``, or leaves the folder by a link; or it names
            the model itself, or something other than a regular file.
    """
    paths = PurePosixPath(location), PureWindowsPath(location)
    leaves = any(path.is_absolute() or path.drive or path.root or ".." in path.parts for path in paths)
    if not location or "\0" in location or not paths[0].name:
        raise ModelFileError(f"{model}: a weight names the file {location!r} for its data, which is not a name")
    file = model.parent / location
    try:
        real, folder, real_model = file.resolve(), model.parent.resolve(), model.resolve()
        exists = _exists(real)
    except (OSError, RuntimeError) as error:  # a cycle of links, or a name that is too long
        raise ModelFileError(f"{model}: its weights lie in {location!r}, which cannot be found ({error})") from None
    beside = file.is_symlink() and (real.parent == real_model.parent or _is_shared(real, folder))
    if leaves or not (real.is_relative_to(folder) or beside):
        raise ModelFileError(
            f"{model}: its weights lie in {location!r}, outside of its folder; save the model again with the weights "
            "beside it"
        )
    if real == real_model:
        raise ModelFileError(f"{model}: its weights lie in {location!r}, which is the model itself; save it again")
    if exists:
        size_of(real, ModelFileError, f", and {model} has weights there")
    return file


def _is_shared(real: Path, folder: Path) -> bool:
    """Whether ``real`` is in the store of the cache of Hugging Face that ``folder``, a snapshot, is a part of.

    Since version 2 of huggingface_hub, a link in a snapshot leads to a blob of its repository, and that may be a link
    to ``CACHE/blobs/<two digits>/<hash>``. The store has a mark, and the name of a file in it is its hash.
    """
    if len(real.parents) < 3 or not _HASH.fullmatch(real.name) or real.parent.name != real.name[:2]:
        return False
    store = real.parents[1]
    mark = store / ".huggingface-shared-blobs"
    is_marked = store.name == "blobs" and mark.is_file() and not mark.is_symlink()
    return is_marked and folder.is_relative_to(store.parent)


_HASH = re.compile(r"[0-9a-f]{64}")


def _exists(path: Path) -> bool:
    """Whether ``path`` exists.

    Raises:
        OSError: the system reports an error, for which Path.exists() returns False since Python 3.14.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def locations(proto: onnx.ModelProto) -> list[str]:
    """The locations of all tensors of ``proto``, each once."""
    return sorted({_location(tensor) for tensor in external_tensors(proto)})


def external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors of ``proto`` with external data: weights, constants, defaults, sparse ones, in graphs and functions.

    Runtimes read all of them, so that every hash, signature, copy and check of locations takes them from here.
    """
    return filter(uses_external_data, messages(proto, onnx.TensorProto))


def load_weights(model: Path, proto: onnx.ModelProto) -> None:
    """Reads the external data of ``proto``, the content of the file ``model``, into ``proto``.

    onnx's own function refuses links, of which the cache of Hugging Face consists, and :func:`.locate` has its reasons
    for the links that it follows.

    Raises:
        ModelFileError: a file is missing or too short, or :func:`.locate` refuses it.
    """
    for tensor in [*external_tensors(proto)]:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = locate(model, _location(tensor))
        try:
            with file.open("rb") as data:
                size = os.fstat(data.fileno()).st_size
                offset = int(entries.get("offset", 0))
                length = int(entries.get("length", size - offset))
                if offset < 0 or length < 0 or offset + length > size:
                    raise ValueError(f"bytes {offset} to {offset + length} of {file}, which has {size}")
                data.seek(offset)
                tensor.raw_data = data.read(length)
        except (OSError, ValueError) as error:
            reason = f"{file}: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise ModelFileError(
                f"{model}: its weight {tensor.name!r} lies in another file, which cannot be read ({reason}); copy it "
                "beside the model"
            ) from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def unread_bytes(model: Path, proto: onnx.ModelProto) -> dict[str, int]:
    """File of weights -> the number of its bytes behind the last weight, for files with such bytes."""
    ends: dict[str, int] = {}
    for tensor in external_tensors(proto):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = locate(model, _location(tensor))
        try:
            length = int(entries["length"]) if "length" in entries else file.stat().st_size
            end = int(entries.get("offset", 0)) + length
        except (OSError, ValueError):  # the runtime reports the error of this file
            continue
        ends[_location(tensor)] = max(end, ends.get(_location(tensor), 0))
    sizes = {location: locate(model, location).stat().st_size for location in ends if locate(model, location).exists()}
    return {location: size - ends[location] for location, size in sizes.items() if size > ends[location]}


def _location(tensor: onnx.TensorProto) -> str:
    return next((entry.value for entry in reversed(tensor.external_data) if entry.key == "location"), "")

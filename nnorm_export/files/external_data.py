"""Weights in a file beside the model: when they are written there, and the names of such files.

Two files cannot be replaced in one step, but one can. Therefore no file of weights that a model refers to is ever
overwritten. New weights get a name of their own, and the model, which refers to it, is renamed into place last:

- ``model.onnx.data``, if there is no such file and the older ``model.onnx`` has no weights beside it;
- ``model.onnx.<16 digits>.data`` otherwise, with the first digits of the SHA-256 of the weights.

Equal weights keep the name that they have.
"""

from __future__ import annotations

import filecmp
import hashlib
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from nnorm_export.errors import ExportError
from nnorm_export.files.locations import external_tensors, locations
from nnorm_export.files.wire import field_header

EXTERNAL_DATA_BYTES = 2**31 - 2**24  # protobuf's limit of 2 GiB, less room for the graph


def save(model: ir.Model, path: Path, external_data: bool | None) -> None:
    """Writes ``model``; the weights go into ``<path>.data`` if ``external_data``, for None where they exceed 2 GiB.

    Raises:
        ExportError: the weights exceed 2 GiB and ``external_data`` is False, or they go into a file of their own and
            the name of ``path`` is not UTF-8.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    with _weights_undescribed(model):
        if external_data or (external_data is None and size > EXTERNAL_DATA_BYTES):
            _refuse_undecoded(path)
            ir.save(model, path, external_data=first_name(path))
        elif size > EXTERNAL_DATA_BYTES:
            raise ExportError(
                f"the weights take {size / 2**30:.1f} GiB, and a file without external data holds 2 at most; leave "
                "external_data out, or set it to True"
            )
        else:
            _write(ir.to_proto(model), path)


def _refuse_undecoded(path: Path) -> None:
    try:
        path.name.encode()
    except UnicodeEncodeError as error:
        raise ExportError(
            f"{path} is not UTF-8, and a model holds the name of the file with its weights; give another name"
        ) from error


@contextmanager
def _weights_undescribed(model: ir.Model) -> Iterator[None]:
    """Keeps onnx_ir from describing each weight in ``value_info`` too; onnxscript's notes on weights are removed.

    ``onnxruntime.quantization`` replaces weights by others of another dtype, and the description would contradict them.
    """
    # Those that are inputs or outputs too are described there, as they have to be.
    graph = model.graph
    weights = [v for v in graph.initializers.values() if not v.is_graph_input() and not v.is_graph_output()]
    described = [(value.type, value.shape) for value in weights]
    try:
        for value in weights:
            value.type = value.shape = None
            value.metadata_props.clear()
        yield
    finally:
        for value, (kind, shape) in zip(weights, described, strict=True):
            value.type, value.shape = kind, shape


def _write(proto: onnx.ModelProto, path: Path) -> None:
    """Writes ``proto``, and empties it: protobuf's own function takes four times the memory of the weights.

    The file is the same message, with the initializers last in its graph and the graph last in the model.
    """
    weights = [*proto.graph.initializer]
    del proto.graph.initializer[:]
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    initializer = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
    sizes = [weight.ByteSize() for weight in weights]
    size = len(graph) + sum(len(field_header(initializer, size)) + size for size in sizes)
    with path.open("wb") as file:
        file.write(proto.SerializeToString() + field_header(onnx.ModelProto.GRAPH_FIELD_NUMBER, size) + graph)
        for weight, size in zip(weights, sizes, strict=True):
            file.write(field_header(initializer, size))
            file.write(weight.SerializeToString())


def first_name(path: Path) -> str:
    return f"{path.name}.data"


def is_own(path: Path, name: str) -> bool:
    """Whether ``name`` is one that this package gives to the weights of ``path``."""
    return re.fullmatch(rf"{re.escape(path.name)}(\.[0-9a-f]{{16}})?\.data", name) is not None


def owned(path: Path) -> set[str]:
    """The names of the files beside ``path`` that this package wrote for it and that it refers to.

    Raises:
        OSError: the folder or ``path`` cannot be read.
    """
    present = {entry for entry in os.listdir(path.parent) if is_own(path, entry)}
    if not present or not path.is_file() or not any(_holds(path, name) for name in present):
        return set()
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError:
        return set()
    return present.intersection(locations(proto))


def is_read_by_others(path: Path, name: str) -> bool:
    """Whether another model beside ``path``, a copy of the older one for example, may refer to the weights ``name``.

    ``path`` need not exist. A model that cannot be read may refer to them.
    """
    for other in path.parent.glob("*.onnx"):
        try:
            if other.name != path.name and other.is_file() and _holds(other, name):
                return True
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except OSError:
            return True
    return False


def named(path: Path, model: Path, old: set[str]) -> str:
    """The name of ``model``'s weights in the place of ``path``; ``model``, a new file, is changed to refer to it.

    Args:
        path: where the model is to lie.
        model: the model, with its weights beside it under the first name.
        old: the weights of the older ``path``, by name.

    Raises:
        OSError: the files cannot be read or written.
    """
    weights = model.with_name(first_name(model))
    same = [name for name in old if filecmp.cmp(path.with_name(name), weights, shallow=False)]
    if same or not (old or os.path.lexists(path.with_name(weights.name))):
        name = same[0] if same else weights.name
    else:
        name = f"{path.name}.{_sha256(weights)[:16]}.data"
    if name != weights.name:
        proto = onnx.load(model, load_external_data=False)
        for tensor in external_tensors(proto):
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = name
        model.write_bytes(proto.SerializeToString())
        weights.rename(weights.with_name(name))
    return name


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _holds(path: Path, name: str) -> bool:
    """Whether the bytes of ``name`` occur in ``path``: parsing a file of 2 GiB to learn that they do not is slow."""
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        return contents.find(name.encode()) >= 0

"""Weights in a file beside the model: when they are written there, how that file is called, and when it is removed.

Two files cannot be replaced in one step, but one can. Therefore the name of the weights has their hash:
``model.onnx.<16 digits>.data``, the first digits of the file's SHA-256. Weights that a model refers to are never
overwritten, and equal ones are kept. The model, which refers to its weights, is replaced last.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import onnx
import onnx_ir as ir

from nnorm_export.errors import ExportError
from nnorm_export.files.durable import flush
from nnorm_export.files.locations import external_tensors
from nnorm_export.files.wire import field_header

EXTERNAL_DATA_BYTES = 2**31 - 2**24  # protobuf's limit of 2 GiB, less room for the graph
_BLOCK_BYTES = 2**20


def save(model: ir.Model, path: Path, external_data: bool | None) -> None:
    """Writes ``model``; the weights go into a file beside it if ``external_data``, for None where they exceed 2 GiB.

    Raises:
        ExportError: the weights exceed 2 GiB and ``external_data`` is False, or they go into a file of their own and
            the name of ``path`` is not UTF-8.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    with _weights_undescribed(model):
        if external_data or (external_data is None and size > EXTERNAL_DATA_BYTES):
            try:
                path.name.encode()
            except UnicodeEncodeError as error:
                raise ExportError(
                    f"{path} is not UTF-8, and a model holds the name of the file with its weights; give another name"
                ) from error
            weights = path.with_name(f"{path.name}.data")
            ir.save(model, path, external_data=weights.name)
            if weights.exists():  # onnx_ir keeps small weights in the model
                _rename_weights(path, weights)
        elif size > EXTERNAL_DATA_BYTES:
            raise ExportError(
                f"the weights take {size / 2**30:.1f} GiB, and a file without external data holds 2 at most; leave "
                "external_data out, or set it to True"
            )
        else:
            _write(ir.to_proto(model), path)


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


def _rename_weights(model: Path, weights: Path) -> None:
    """Gives ``weights`` the name that has their hash, in the file ``model`` too."""
    digest = hashlib.sha256()
    with weights.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    name = f"{model.name}.{digest.hexdigest()[:16]}.data"
    proto = onnx.load(model, load_external_data=False)
    for tensor in external_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    model.write_bytes(proto.SerializeToString())
    os.replace(weights, model.with_name(name))


def move_weights(new: Path, output: Path) -> None:
    """Moves the weights beside the model ``new`` to where they lie beside ``output``, unless equal ones lie there.

    Raises:
        OSError: a file cannot be moved.
    """
    for name in _weights_of(output, new.parent):
        weights = output.with_name(name)
        if not (weights.exists() and filecmp.cmp(new.with_name(name), weights, shallow=False)):
            os.replace(new.with_name(name), weights)
        flush(output.parent)


def remove_unread(output: Path, unfinished: str) -> None:
    """Removes the weights that were written for ``output`` and that no model refers to.

    The models are ``output``, the ONNX files beside it, a copy of an older ``output`` for example, and the files that
    match the pattern ``unfinished``, which other writers are about to move.
    """
    if not (names := _weights_of(output, output.parent)):
        return
    # In this order no model is missed that another machine moves meanwhile.
    models = [*output.parent.glob(unfinished), *output.parent.glob("*.onnx"), output]
    for name in names:
        if not any(_may_refer(model, name) for model in models):
            with suppress(OSError):  # the next writer tries again
                output.with_name(name).unlink()


def _weights_of(output: Path, folder: Path) -> list[str]:
    """The names of the files in ``folder`` that :func:`save` wrote for ``output``."""
    pattern = re.compile(rf"{re.escape(output.name)}\.[0-9a-f]{{16}}\.data")
    return [name for name in os.listdir(folder) if pattern.fullmatch(name)]


def _may_refer(model: Path, name: str) -> bool:
    """Whether the bytes of ``name`` occur in ``model``, a search that is faster than parsing a file of 2 GiB.

    The file is read and not mapped: a process ends when another shortens a file that it has mapped.
    """
    sought, overlap = os.fsencode(name), b""
    try:
        if not model.is_file():
            return False
        with model.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if sought in overlap + block:
                    return True
                overlap = block[-len(sought) :]
        return False
    except FileNotFoundError:  # it was removed meanwhile
        return False
    except (OSError, ValueError):  # a model that cannot be read may refer to them
        return True

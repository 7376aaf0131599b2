"""Makes the notes of :mod:`nnorm_export.files.note`; ONNX files have the metadata of the module beside it."""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export._version import __version__
from nnorm_export.exporting.decompose import calls_of_operators
from nnorm_export.exporting.source import Source
from nnorm_export.files.note import Entry, Note
from nnorm_export.names import NOTE_FILE
from nnorm_export.operators import FrozenOperator

Tensors = tuple[list[Entry], list[Entry]]  # the inputs and the outputs of a file


def note(
    module: nn.Module, *, file_format: str, form: str, nodes: dict[str, int], layers: list[Entry], tensors: Tensors
) -> Note:
    """The note on a file made of the frozen ``module``."""
    return Note(
        format=file_format,
        form=form,
        version=__version__,
        torch=torch.__version__.partition("+")[0],
        device=device_of(module).type,
        nodes=nodes,
        weights_sha256=_weights_sha256(module.state_dict()),
        inputs=tensors[0],
        outputs=tensors[1],
        layers=layers,
    )


def add(archive: Path, text: str) -> None:
    """Adds the note to an archive that PyTorch has written."""
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_STORED) as file:
        folder = file.namelist()[0].partition("/")[0]
        file.writestr(f"{folder}/extra/{NOTE_FILE}", text)


def device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def layers_of_program(source: Source) -> list[Entry]:
    """One entry for each call of an operator, as :func:`nnorm_export.exporting.metadata.layer_table` makes them."""
    return _layers(calls_of_operators(source.program), source.records)


def layers_of_module(module: nn.Module) -> list[Entry]:
    """The same by the modules themselves, for a file whose calls nothing but TorchScript counts."""
    operators = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, FrozenOperator)]
    records = {path: layer.record for path, layer in operators}
    return _layers([(path, layer.operator.op_type) for path, layer in operators], records)


def _layers(calls: Iterable[tuple[str, str]], records: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    counted: Counter[str] = Counter()
    entries = []
    for path, op_type in calls:
        name = f"{path or 'model'}/{op_type}"
        counted[name] += 1
        node = name if counted[name] == 1 else f"{name}_{counted[name]}"
        entries.append({"node": node, "op_type": op_type, "path": path, **records.get(path, {})})
    return entries


def _weights_sha256(tensors: Mapping[str, Any]) -> str:
    """A hash of every weight, by name: equal for the same frozen model in every format of PyTorch's."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tensors_of_program(source: Source, inputs: Sequence[str], outputs: Sequence[str]) -> Tensors:
    """The tensors that the program takes and gives, a dynamic axis by its name."""
    program = source.program
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    taken = [values[name] for name in program.graph_signature.user_inputs if isinstance(values.get(str(name)), Tensor)]
    given = [values[name] for name in program.graph_signature.user_outputs if isinstance(values.get(str(name)), Tensor)]
    axes = {}
    for (index, axis), name in source.axis_names.items():
        if index < len(taken) and axis < taken[index].dim() and not isinstance(taken[index].shape[axis], int):
            axes[str(taken[index].shape[axis])] = name

    def entry(name: str, tensor: Tensor) -> Entry:
        shape = [length if isinstance(length, int) else axes.get(str(length), str(length)) for length in tensor.shape]
        return {"name": name, "dtype": _dtype(tensor), "shape": shape}

    return (
        [entry(name, tensor) for name, tensor in zip(inputs, taken, strict=True)],
        [entry(name, tensor) for name, tensor in zip(outputs, given, strict=True)],
    )


def tensors_of_any_size(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Entry]:
    """Tensors of which only the rank is known."""
    return [
        {"name": name, "dtype": _dtype(tensor), "shape": [None] * tensor.dim()}
        for name, tensor in zip(names, tensors, strict=True)
    ]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

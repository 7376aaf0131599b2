"""What a written file says of itself: ONNX's metadata, and the note in the formats of PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from nnorm_export._version import __version__
from nnorm_export.exporting.source import Frozen
from nnorm_export.exporting.trace import Call, Traced
from nnorm_export.files.note import Entry, Note
from nnorm_export.names import METADATA_PREFIX, PRODUCER

Tensors = tuple[list[Entry], list[Entry]]  # the inputs and the outputs of a file

_TORCH = torch.__version__.partition("+")[0]


def layer_table(calls: Iterable[Call], frozen: Frozen) -> list[Entry]:
    """One entry for each call of a normalization, with the :attr:`FrozenOperator.record` of its layer."""
    return [{**call._asdict(), **frozen.records.get(call.path, {})} for call in calls]


def stamp(model: ir.Model, form: str, table: list[Entry], weights_sha256: str) -> None:
    """Writes into ``model`` which program made it, in which form, and what its layers were."""
    model.producer_name = PRODUCER
    model.producer_version = __version__
    model.graph.name = "main_graph"
    facts = {
        "version": __version__,
        "torch": _TORCH,
        "form": form,
        "layers": json.dumps(table),
        "weights_sha256": weights_sha256,
    }
    model.metadata_props.update({METADATA_PREFIX + name: fact for name, fact in facts.items()})


def note(
    frozen: Frozen, *, file_format: str, form: str, nodes: dict[str, int], calls: Iterable[Call], tensors: Tensors
) -> Note:
    """The note for a file of PyTorch's made of ``frozen``."""
    return Note(
        format=file_format,
        form=form,
        version=__version__,
        torch=_TORCH,
        device=device_of(frozen.module).type,
        nodes=nodes,
        weights_sha256=frozen.weights_sha256,
        inputs=tensors[0],
        outputs=tensors[1],
        layers=layer_table(calls, frozen),
    )


def device_of(module: nn.Module) -> torch.device:
    """The device of the first weight."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def tensors_of_program(traced: Traced) -> Tensors:
    """The tensors that the program takes and returns, with the name of each dynamic axis."""
    program = traced.program
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    taken, returned = (
        [values[name] for name in names if isinstance(values.get(str(name)), Tensor)]
        for names in (signature.user_inputs, signature.user_outputs)
    )
    axes = {}
    for (index, axis), name in traced.axis_names.items():
        if index < len(taken) and axis < taken[index].dim() and not isinstance(taken[index].shape[axis], int):
            axes[str(taken[index].shape[axis])] = name

    def entry(name: str, tensor: Tensor) -> Entry:
        shape = [length if isinstance(length, int) else axes.get(str(length), str(length)) for length in tensor.shape]
        return _entry(name, tensor, shape)

    return (
        [entry(name, tensor) for name, tensor in zip(traced.inputs, taken, strict=True)],
        [entry(name, tensor) for name, tensor in zip(traced.outputs, returned, strict=True)],
    )


def tensors_of_any_size(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Entry]:
    """Tensors of which only the rank is known."""
    return [_entry(name, tensor, [None] * tensor.dim()) for name, tensor in zip(names, tensors, strict=True)]


def _entry(name: str, tensor: Tensor, shape: Sequence[Any]) -> Entry:
    return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(shape)}

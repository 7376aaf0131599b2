"""What a written file says of itself: ONNX's metadata, and the note in the other formats."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from nnorm_export._version import __version__
from nnorm_export.exporting.passes.program import nodes_of
from nnorm_export.exporting.request import Frozen
from nnorm_export.exporting.trace import Traced
from nnorm_export.files import lengths
from nnorm_export.files.least_batch import LEAST_BATCH
from nnorm_export.files.note import Entry, Note
from nnorm_export.graphs.forms import nodes_of as normalizations_of
from nnorm_export.models.large_constants import path_of
from nnorm_export.names import LAYER_PATH, METADATA_PREFIX, PRODUCER, length_by_names, node_names
from nnorm_export.operators import NORMALIZATIONS, FrozenOperator

Tensors = tuple[list[Entry], list[Entry]]  # the inputs and the outputs of a file

_TORCH = torch.__version__.partition("+")[0]


def layers_of_model(model: ir.Model, frozen: Frozen) -> list[Entry]:
    """One entry for each normalization of an ONNX model: its node, its operator, and what its layer was."""
    return [
        _layer(str(node.name), node.op_type, node.metadata_props[LAYER_PATH], frozen)
        for node in normalizations_of(model)
    ]


def layers_of_program(traced: Traced) -> list[Entry]:
    """One entry for each call of a normalization, named as an ONNX node would be."""
    op_types: dict[Any, str] = {operator.torch_op: operator.op_type for operator in NORMALIZATIONS.values()}
    nodes = [node for node in nodes_of(traced.program) if node.target in op_types]
    return _layers([(path_of(node), op_types[node.target]) for node in nodes], traced.frozen)


def layers_of_module(frozen: Frozen) -> list[Entry]:
    """One entry for each normalization in the module, for a file whose calls only TorchScript can count."""
    modules = frozen.module.named_modules()
    return _layers([(path, m.operator.op_type) for path, m in modules if isinstance(m, FrozenOperator)], frozen)


def _layers(calls: Sequence[tuple[str, str]], frozen: Frozen) -> list[Entry]:
    named = zip(node_names(calls), calls, strict=True)
    return [_layer(node, op_type, path, frozen) for node, (path, op_type) in named]


def _layer(node: str, op_type: str, path: str, frozen: Frozen) -> Entry:
    return {"node": node, "op_type": op_type, "path": path, **frozen.records.get(path, {})}


def write_metadata(model: ir.Model, form: str, target: str, layers: list[Entry], frozen: Frozen) -> None:
    """Writes into ``model`` which program made it, in which form, for which target, and what its layers were."""
    model.producer_name = PRODUCER
    model.producer_version = __version__
    model.graph.name = "main_graph"
    facts = {
        "version": __version__,
        "torch": _TORCH,
        "form": form,
        "target": target,
        "layers": json.dumps(layers),
        "weights_sha256": frozen.weights_sha256,
        **({LEAST_BATCH: frozen.least_batch} if frozen.least_batch else {}),
    }
    if frozen.lengths:
        facts[lengths.KEY] = lengths.to_json(frozen.lengths)
    model.metadata_props.update({METADATA_PREFIX + name: fact for name, fact in facts.items()})
    model.metadata_props.update(frozen.request.metadata)


def note(
    frozen: Frozen,
    nodes: dict[str, int],
    layers: list[Entry],
    tensors: Tensors,
    *,
    method: str | None = None,
    operators: str | None = None,
) -> Note:
    """The note for a file that is made from ``frozen``."""
    axes = {dim for entry in tensors[0] for dim in entry["shape"]}
    return Note(
        format=frozen.request.target.format.name,
        method=method,
        operators=operators,
        version=__version__,
        torch=_TORCH,
        device=device_of(frozen.module).type,
        nodes=nodes,
        weights_sha256=frozen.weights_sha256,
        inputs=tensors[0],
        outputs=tensors[1],
        layers=layers,
        lengths={name: bounds for name, bounds in frozen.lengths.items() if name in axes},
        least_batch=frozen.least_batch,
        metadata=dict(frozen.request.metadata),
    )


def note_of_program(traced: Traced, program: torch.export.ExportedProgram, operators: str | None = None) -> Note:
    """The note for a file of ``program``, which was made from ``traced``."""
    called = [node.target for node in nodes_of(program)]
    nodes = dict(Counter(operator.namespace for operator in called if isinstance(operator, torch._ops.OpOverload)))
    return note(traced.frozen, nodes, layers_of_program(traced), tensors_of_program(traced), operators=operators)


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
        shape = [length if isinstance(length, int) else length_by_names(str(length), axes) for length in tensor.shape]
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

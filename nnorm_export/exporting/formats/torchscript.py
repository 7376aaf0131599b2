"""TorchScript, for LibTorch and ``torch.jit.load``; the normalizations are plain ATen."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.errors import ExportError, InputError, reported_as
from nnorm_export.exporting import metadata
from nnorm_export.exporting.mutations import Changes
from nnorm_export.exporting.passes.decompose import decomposed
from nnorm_export.exporting.passes.scripted import scripted
from nnorm_export.exporting.random_operators import draws_numbers, refusal
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Frozen, Request, freeze_source
from nnorm_export.exporting.trace import exporting_state, flat, trace
from nnorm_export.exporting.write_verified import write_with_note
from nnorm_export.files.note import Entry
from nnorm_export.files.staging import opened_for_torch, writing
from nnorm_export.models import arguments
from nnorm_export.models.dynamic_axes import widened
from nnorm_export.models.modules import deepcopy, without_reading_masks
from nnorm_export.names import NOTE_FILE, TORCHSCRIPT_METHODS
from nnorm_export.process import without_warnings
from nnorm_export.steps import step

_UNSUPPORTED_PYTHON = (3, 14)


def write(request: Request, *, method: str = "trace", optimize: bool = True) -> ExportReport:
    """See :func:`nnorm_export.export_torchscript`."""
    if method not in TORCHSCRIPT_METHODS:
        raise ExportError(f"unknown method {method!r}; choose one of {', '.join(TORCHSCRIPT_METHODS)}")
    if isinstance(request.model, torch.export.ExportedProgram):
        raise ExportError(
            "TorchScript is made from a module, and this is an exported program, which has lost the model's own code; "
            "give the module, or export the program for the target pt2 or aoti"
        )
    if method == "script" and (request.input_names is not None or request.dynamic_shapes):
        option = "input_names" if request.input_names is not None else "dynamic_shapes"
        raise ExportError(
            f"{option} needs method='trace': a scripted model takes any shape, by the names of forward's parameters"
        )
    if sys.version_info >= _UNSUPPORTED_PYTHON:
        warnings.warn(
            "TorchScript is deprecated, and PyTorch does not support it on Python 3.14 and newer. Its successors are "
            "the targets pt2 and aoti",
            stacklevel=2,
        )
    frozen = freeze_source(request)
    module, layers, tensors = _traced(frozen) if method == "trace" else _scripted(frozen)
    _name_inputs(module, [entry["name"] for entry in tensors[0]])
    if optimize:
        step("optimize")
        with exporting_state():
            module = _optimized(module)
    note = metadata.note(frozen, _nodes(module), layers, tensors, method=method)

    def save(staging: Path) -> None:
        step("write")
        with exporting_state(), writing(request.path, RuntimeError), opened_for_torch(staging) as file:
            torch.jit.save(module, file, _extra_files={NOTE_FILE: note.to_json()})

    return write_with_note(frozen, note, save)


def _optimized(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """``torch.jit.freeze``, which folds what follows a convolution into it, without its folding of linear maps.

    PyTorch (2.13) folds a batch norm into a linear map before it wherever their sizes agree. With more than two axes
    the channels of the norm are axis 1 and those of the linear map the last one, so that the result is wrong.
    """
    module = torch.jit.freeze(module, optimize_numerics=False)
    while any(fold(module.graph) for fold in _FOLDS):
        pass
    return module


_FOLDS = (
    torch._C._jit_pass_fold_frozen_conv_bn,
    torch._C._jit_pass_fold_frozen_conv_add_or_sub,
    torch._C._jit_pass_fold_frozen_conv_mul_or_div,
)
_Parts = tuple[torch.jit.ScriptModule, list[Entry], metadata.Tensors]


def _traced(frozen: Frozen) -> _Parts:
    # torch.jit.trace follows one path through the model without a warning. torch.export refuses a model with several.
    failed = f"torch.jit.trace cannot trace {type(frozen.model).__name__}"
    remedy = "Change that part of the model, or export with method='script' or for another target"
    keeps_state = frozen.changes is not None and _keeps_state(frozen.module, frozen.changes)
    with exporting_state():
        traced = trace(frozen, keeps_state=keeps_state, takes_complex=True)
        layers, tensors = metadata.layers_of_program(traced), metadata.tensors_of_program(traced)
        if traced.strict_trace:  # torch.jit.trace would fix the lengths that strict=False fixes
            program = decomposed(traced.program)
            step("compile as TorchScript")
            quiet = without_warnings(UserWarning, message="The TorchScript type system doesn't support")
            with reported_as(ExportError, failed, remedy, _first_lines), quiet:
                return scripted(program), layers, tensors
    step("trace as TorchScript")
    if frozen.dynamic_batch:
        example, _ = arguments.dynamic_batch(frozen.example)
    else:
        example = widened(frozen.example, frozen.request.dynamic_shapes)
    # TracerWarning is about shapes: other batch sizes are compared.
    unwarned = without_warnings(torch.jit.TracerWarning)
    with exporting_state(fused_attention=True), without_reading_masks(), unwarned:
        # The model may change its input in place.
        inputs = tuple(tensor.clone() for tensor in arguments.tensors_in(example))
        buffers = [(buffer, buffer._version, buffer.clone()) for buffer in frozen.module.buffers()]
        with reported_as(ExportError, failed, remedy, _first_lines):
            module = torch.jit.trace(flat(frozen.module, example), inputs, check_trace=False)
    with torch.no_grad():  # tracing has run the model, and the file has its tensors
        for buffer, version, before in buffers:
            if buffer._version != version:
                buffer.copy_(before)
    return module, layers, tensors


def _keeps_state(module: nn.Module, changes: Changes) -> bool:
    """Whether a trace keeps what ``changes`` tells of: it records what is written to buffers, and no assignments."""
    return not changes.assigned and changes.written <= {
        name for name, _ in module.named_buffers(remove_duplicate=False)
    }


def _scripted(frozen: Frozen) -> _Parts:
    name = type(frozen.model).__name__
    if others := [name for name, value in frozen.example.items() if not isinstance(value, Tensor)]:
        raise ExportError(
            f"argument {others[0]} of forward is not a tensor, and a scripted file takes tensors only. Leave it to its "
            "default, or export with method='trace', which keeps its value and takes the tensors within it"
        )
    step("compile as TorchScript")
    with exporting_state():
        remedy = "Write that part of the model in the language of TorchScript, or export with method='trace'"
        with reported_as(ExportError, f"torch.jit.script cannot compile {name}", remedy, _first_lines):
            module = torch.jit.script(frozen.module)
        if frozen.request.verify:
            _refuse_random(module, frozen.request.path)
        copies = {name: value.clone() for name, value in frozen.example.items()}
        positional, keywords = arguments.unbind(frozen.module, copies)
        # The compiled module shares its tensors with the frozen one, and the run may change buffers.
        duplicate = deepcopy(frozen.module, {id(parameter): parameter for parameter in frozen.module.parameters()})
        try:
            result = duplicate(*positional, **keywords)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"{name} does not run on these inputs: {error}. Give an example that the model takes"
            ) from error
    inputs, outputs = frozen.names(arguments.tensor_names(result))
    return (
        module,
        metadata.layers_of_module(frozen),
        (
            metadata.tensors_of_any_size(inputs, list(frozen.example.values())),
            metadata.tensors_of_any_size(outputs, arguments.tensors_in(result)),
        ),
    )


def _refuse_random(module: torch.jit.ScriptModule, path: Path) -> None:
    """Raises a ParityError if a scripted module draws random numbers."""
    frozen = torch.jit.freeze(deepcopy(module), optimize_numerics=False)  # self.training is a constant there
    for node in _with_branches(frozen.inlined_graph.nodes()):
        schema = node.schema()
        found = None if schema == "(no schema)" else torch._C.parse_schema(schema)
        if found is None or torch.Tag.nondeterministic_seeded not in _tags(found):
            continue
        if draws_numbers(
            {argument.name: value.toIValue() for argument, value in zip(found.arguments, node.inputs(), strict=False)}
        ):
            raise refusal(path, f"{found.name} at {str(node.sourceRange()).strip().splitlines()[0]}")


def _tags(schema: Any) -> list[Any]:
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    overload = getattr(packet, schema.overload_name or "default", None)
    return getattr(overload, "tags", [])


def _name_inputs(module: torch.jit.ScriptModule, inputs: Sequence[str]) -> None:
    for value, name in zip(list(module.graph.inputs())[1:], inputs, strict=False):
        if name.isidentifier():
            value.setDebugName(name)


def _nodes(module: torch.jit.ScriptModule) -> dict[str, int]:
    kinds = [node.kind().partition("::")[0] for node in _with_branches(module.inlined_graph.nodes())]
    return dict(Counter(kind for kind in kinds if kind != "prim"))


def _with_branches(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        for block in node.blocks():
            yield from _with_branches(block.nodes())


def _first_lines(error: Exception) -> str:
    """torch's reason and the line of the model that it points at."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    where = [line for line in lines if re.search(r'File "', line) and "/torch/" not in line][:1]
    pointed = [lines[i - 1] for i, line in enumerate(lines) if "<--- HERE" in line and i > 0][:1]
    return f"{type(error).__name__}: " + "\n".join(dict.fromkeys([*lines[:2], *where, *pointed]))

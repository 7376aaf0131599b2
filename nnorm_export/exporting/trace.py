"""From a frozen model to a ``torch.export.ExportedProgram``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError, ParityError
from nnorm_export.exporting.capture import capture
from nnorm_export.exporting.lengths import lengths_of
from nnorm_export.exporting.mutations import mutated_in, refusal, refuse_state, refuse_written_constants
from nnorm_export.exporting.passes.program import functional, nodes_of, writes_to_tensors
from nnorm_export.exporting.passes.whitening import fold_whitening
from nnorm_export.exporting.random_operators import refuse_random
from nnorm_export.exporting.request import Frozen
from nnorm_export.files.formats import PT2
from nnorm_export.files.least_batch import least_rows
from nnorm_export.models import arguments
from nnorm_export.models.dynamic_axes import widened
from nnorm_export.models.guards import Search, beyond_guards
from nnorm_export.models.large_constants import path_of
from nnorm_export.models.modules import without_fused_attention
from nnorm_export.models.program_guards import beyond_program_guards
from nnorm_export.process import LOCK, redirected, silent_loggers, without_warnings
from nnorm_export.steps import step


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A frozen model on its way into a file by ``torch.export``.

    Attributes:
        inputs, outputs: the names of the tensors that the file takes and returns.
        axis_names: (input, axis) -> name of a dynamic axis.
        changed_inputs: the inputs that forward changes in place, whose new values it does not return.
        strict_trace: whether torch.export traced it with ``strict=True``, because ``strict=False`` fixes lengths of it.
    """

    frozen: Frozen
    program: torch.export.ExportedProgram
    inputs: list[str]
    outputs: list[str]
    axis_names: dict[tuple[int, int], str]
    changed_inputs: list[str]
    strict_trace: bool


def trace(frozen: Frozen, *, keeps_state: bool = False, takes_complex: bool = False) -> Traced:
    """The program of ``frozen``; each whitening is folded into the layer before it where possible.

    Call it within :func:`exporting_state`.

    Args:
        keeps_state: whether a file of the format keeps the tensors that forward changes, as PyTorch does.
        takes_complex: whether the format has complex numbers.

    Raises:
        ParityError: a result depends on random numbers, and the file is to be compared.
        ExportError: the model cannot be traced, returns something that is not a tensor, takes or returns complex
            numbers, or depends on what its earlier calls have changed. Where the format has them, state and complex
            outputs are refused only if the file is to be compared.
    """
    step("trace")
    if frozen.program is not None:
        # A program does not keep the names of its axes. If the first axis of the first input is dynamic, it is a batch.
        program, axis_names, strict = frozen.program, {(0, 0): arguments.BATCH}, False
        if frozen.request.verify and frozen.request.target.format.name != PT2:  # which keeps the conditions
            frozen.note_guards(_beyond_program_guards(frozen, program))
        frozen.lengths.update(lengths_of(program, None, axis_names))
    else:
        example, shapes = frozen.example, frozen.request.dynamic_shapes
        if frozen.dynamic_batch:
            example, shapes = arguments.dynamic_batch(example, least_rows(frozen.least_batch))
        else:
            example = widened(example, shapes)
        program, way = capture(frozen, example, shapes)
        if fold_whitening(frozen.module, {node: path_of(node) for node in nodes_of(program)}):
            program, _ = capture(frozen, example, shapes, way)
        strict, shapes = way.strict, way.dynamic_shapes
        axis_names = arguments.axis_names(example, shapes)
        if not frozen.dynamic_batch:  # which has a least length alone, with its reason
            frozen.lengths.update(lengths_of(program, arguments.named_dims(example, shapes), axis_names))
        if frozen.request.verify:
            stderr = sys.stderr  # where the model prints while it is traced
            with redirected(lambda text, _: stderr.write(text), "stdout"):
                frozen.note_guards(beyond_guards(program, frozen.module, example, shapes))
    inputs, outputs = frozen.names(_output_keys(program))
    if frozen.request.verify:
        refuse_random(frozen.request.path, {node: path_of(node) for node in nodes_of(program)})
    signature = program.graph_signature
    if not takes_complex:
        _refuse_complex(program, signature.user_inputs, "takes", "the file has no complex numbers")
    if not takes_complex or frozen.request.verify:
        why = "it is not compared" if takes_complex else "the file has no complex numbers"
        _refuse_complex(program, signature.user_outputs, "returns", why)
    return Traced(
        frozen=frozen,
        program=program,
        inputs=inputs,
        outputs=outputs,
        axis_names=axis_names,
        changed_inputs=_changed_inputs(frozen, program, keeps_state),
        strict_trace=strict,
    )


def _beyond_program_guards(frozen: Frozen, program: torch.export.ExportedProgram) -> Search:
    """Inputs that the operators of ``program`` take, and its guards do not.

    Raises:
        ParityError: a guard is what is left of a branch of forward.
    """
    result, branch = beyond_program_guards(program, frozen.module, frozen.example)
    if branch is not None:
        lengths = ", ".join(f"{name} = {length}" for name, length in branch.lengths.items())
        raise ParityError(
            f"{frozen.request.path} was not written: the program is right only where {branch.guard}, a condition of "
            f"forward that torch.export keeps. Elsewhere, at ({lengths}) for instance, the program refuses its inputs "
            "and the file would not. Make the program again with ranges of its axes in which the condition holds; or "
            "compute both paths in forward and choose with torch.where; or export for the target pt2, which keeps it"
        )
    return result


def _refuse_complex(program: torch.export.ExportedProgram, names: Sequence[Any], does: str, why: str) -> None:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for name in names:
        value = values.get(str(name))
        if isinstance(value, Tensor) and value.is_complex():
            raise ExportError(
                f"forward {does} a complex tensor, {name}, and {why}: let it take and return real ones, "
                "torch.view_as_real(z) of shape [..., 2], which torch.view_as_complex turns back"
            )


def _changed_inputs(frozen: Frozen, program: torch.export.ExportedProgram, keeps_state: bool) -> list[str]:
    """The inputs that forward changes in place, whose new values it does not return.

    Raises:
        ExportError: as :func:`trace`, of state.
    """
    changes = frozen.changes
    if changes is not None and changes.forgotten:
        raise refusal(changes.forgotten, keeps_state=False)
    if changes is None and not mutated_in(program) and not any(map(writes_to_tensors, nodes_of(program))):
        return _not_returned(program)
    if (changes is not None and not changes) or (keeps_state and not frozen.request.verify):
        return []
    refuse_written_constants(program, changes)
    remedy = "What forward changes is then unknown: do not write to tensors of the model in eval mode"
    without_writes = functional(program, remedy)
    refuse_state(without_writes, changes, keeps_state=keeps_state)
    return _not_returned(without_writes)


def _not_returned(program: torch.export.ExportedProgram) -> list[str]:
    signature = program.graph_signature
    return [path for value, path in signature.user_inputs_to_mutate.items() if value not in signature.user_outputs]


def flat(model: nn.Module, example: dict[str, Any]) -> nn.Module:
    """The model as a function of its tensors alone; everything else among its arguments is built in."""

    class Flat(nn.Module):  # the example must not be an attribute, which TorchScript would save
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Tensor) -> Any:
            args, kwargs = arguments.unbind(model, arguments.with_tensors(example, tensors))
            outputs = tuple(arguments.tensors_in(self.model(*args, **kwargs)))
            return outputs[0] if len(outputs) == 1 else outputs

    return Flat().eval()


def _output_keys(program: torch.export.ExportedProgram) -> list[str]:
    """The keys that lead to each output of the file; a None that the model returns is not one."""
    spec = program.call_spec.out_spec
    assert spec is not None
    leaves = program.graph_signature.user_outputs
    keys = arguments.leaf_names(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    tensors = {node.name for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    found = []
    for key, leaf in zip(keys, leaves, strict=True):
        if isinstance(leaf, str) and leaf in tensors:
            found.append(key)
        elif leaf is not None:  # a constant, or a number that the program computes
            raise ExportError(f"the model returns {leaf!r} at output {key or '0'}; return tensors only")
    return found


_CHATTY_LOGGERS = (
    "torch.onnx",
    "torch.export",
    "torch._export",
    "torch._dynamo",
    "torch._guards",
    "torch.fx.experimental",
    "onnxscript",
    "onnx_ir",
)


@contextlib.contextmanager
def exporting_state(*, fused_attention: bool = False) -> Iterator[None]:
    """Sets what tracing needs of the process, and restores it afterwards.

    torch's exporter logs every optional package that is not installed, and warns of its own internals. It cannot
    express PyTorch's fused attention. TorchScript can: ``fused_attention`` leaves that setting as the user has it.
    """
    attention: contextlib.AbstractContextManager[None] = (
        contextlib.nullcontext() if fused_attention else without_fused_attention()
    )
    loggers, filters = silent_loggers(_CHATTY_LOGGERS), without_warnings(FutureWarning, DeprecationWarning)
    # One thread at a time: torch's exporters change more of the process, and are not made for several.
    with LOCK, loggers, filters, torch.no_grad(), attention:
        yield

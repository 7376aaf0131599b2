"""From a frozen model to a ``torch.export.ExportedProgram``."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError, ParityError
from nnorm_export.exporting.lengths import lengths_of
from nnorm_export.exporting.mutations import mutated_in, refusal, refuse_state, refuse_written_constants
from nnorm_export.exporting.passes.program import functional, nodes_of, writes_to_tensors
from nnorm_export.exporting.passes.whitening import fold_whitening
from nnorm_export.exporting.random_operators import refuse_random
from nnorm_export.exporting.request import Frozen
from nnorm_export.files.formats import PT2
from nnorm_export.files.least_batch import least_rows
from nnorm_export.freezing.attributes import about_gradients
from nnorm_export.models import arguments
from nnorm_export.models.dynamic_axes import widened
from nnorm_export.models.guards import Search, beyond_guards
from nnorm_export.models.large_constants import path_of
from nnorm_export.models.modules import without_fused_attention, without_reading_masks
from nnorm_export.models.program_guards import beyond_program_guards
from nnorm_export.names import layer_name
from nnorm_export.process import LOCK, redirected, silent_loggers, without_warnings
from nnorm_export.steps import step

# What torch.export says of dynamic_shapes that do not fit the inputs: then lengths are not the cause.
_WRONG_NAMES = "top-level keys must be the arg names|mismatch between the structure|Unexpected dimension mapped"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A frozen model on its way into a file by ``torch.export``.

    Attributes:
        inputs, outputs: the names of the tensors that the file takes and returns.
        axis_names: (input, axis) -> name of a dynamic axis.
        changed_inputs: the inputs that forward changes in place, whose new values it does not return.
    """

    frozen: Frozen
    program: torch.export.ExportedProgram
    inputs: list[str]
    outputs: list[str]
    axis_names: dict[tuple[int, int], str]
    changed_inputs: list[str]


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
        program, axis_names = frozen.program, {(0, 0): arguments.BATCH}
        if frozen.request.verify and frozen.request.target.format.name != PT2:  # which keeps the conditions
            frozen.note_guards(_beyond_program_guards(frozen, program))
        frozen.lengths.update(lengths_of(program, None, axis_names))
    else:
        example, shapes = frozen.example, frozen.request.dynamic_shapes
        if frozen.dynamic_batch:
            example, shapes = arguments.dynamic_batch(example, least_rows(frozen.least_batch))
        else:
            example = widened(example, shapes)
        program = _traced(frozen, example, shapes)
        if fold_whitening(frozen.module, {node: path_of(node) for node in nodes_of(program)}):
            program = _traced(frozen, example, shapes)
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


def _traced(frozen: Frozen, example: dict[str, Any], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    args, kwargs = arguments.unbind(frozen.module, example)
    _refuse_scripted(frozen.module)
    if dynamic_shapes:
        _refuse_dynamic_var_keyword(frozen.module, example)
    said, stderr = io.StringIO(), sys.stderr  # torch prints a graph before it raises

    def pass_on(text: str, module: str) -> None:
        (said if module.partition(".")[0] == "torch" else stderr).write(text)

    try:
        with redirected(pass_on, "stdout", "stderr"), without_reading_masks():
            program = torch.export.export(
                frozen.module, args, kwargs, dynamic_shapes=arguments.for_torch(dynamic_shapes) or None
            )
        stderr.write(said.getvalue())
        _replace_source_lines(program)
        _turn_gradients_off(program)
        return program
    except Exception as error:  # torch.export raises dozens of unrelated types
        remedy = ""
        if re.search(r"onstraint|specializ|dynamic_shapes|Dim\b|generated guard|must always be equal", str(error)):
            if frozen.dynamic_batch:
                remedy = (
                    "\nThe model's code fixes the first axis of its inputs, which is taken to be a batch of any size. "
                    "Export with dynamic_shapes={} (--fixed-shape) to fix every axis, or say which are dynamic "
                    "(--dynamic)."
                )
            elif dynamic_shapes and not re.search(_WRONG_NAMES, str(error)):
                remedy = (
                    "\nThe model does not take every length of the dynamic axes. Give the lengths that it takes, as in "
                    "Dim('seq', min=6) (--dynamic 'x:1=seq[6..]'), give axes that must be equal one name, or leave out "
                    "axes that the model's code fixes."
                )
        if gradients := about_gradients(frozen.module):
            if "fake tensor in the exported program" in str(error):  # torch's text names no cause
                raise ExportError(f"torch.export cannot trace {type(frozen.module).__name__}: {gradients}") from error
            remedy = f"\nPerhaps because {gradients}."
        elif cache := re.search(r"<class 'transformers\.[\w.]*\.(\w*Cache\w*)'>", str(error)):
            remedy = (
                f"\ntorch.export does not see the tensors in a {cache[1]}. Export without a cache "
                "(kwargs={'use_cache': False}, or model.config.use_cache = False), or give the keys and values in a "
                "transformers.DynamicCache."
            )
        elif unknown := re.search(r"(?:Found|Unsupported input type) <class '(?:[^']*\.)?(\w+)'>", str(error)):
            remedy = (
                f"\nIf {unknown[1]} is a dataclass, call torch.export.register_dataclass({unknown[1]}) first; "
                "else let the model take and return tensors, tuples and dicts."
            )
        raise ExportError(
            f"torch.export cannot trace {type(frozen.module).__name__}: {_reason(error)}{remedy}"
        ) from error


def _refuse_scripted(model: nn.Module) -> None:
    """Raises an ExportError that names a TorchScript module in ``model``, which torch.export cannot trace."""
    for path, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ExportError(
                f"layer {layer_name(path)} ({getattr(layer, 'original_name', type(layer).__name__)}) is TorchScript, "
                "which torch.export cannot trace; put the Python module in its place, or export for the target "
                "torchscript with method='script'"
            )


def _refuse_dynamic_var_keyword(model: nn.Module, example: dict[str, Any]) -> None:
    """Raises an ExportError where torch.export would fail on an assertion of its own."""
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and example.get(parameter.name):
            names = ", ".join(example[parameter.name])
            raise ExportError(
                f"torch.export cannot make axes dynamic where forward takes **{parameter.name}: name {names} in its "
                "signature, or export with dynamic_shapes={} (--fixed-shape)"
            )


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


_ADVICE = re.compile(
    r"\n\s*(The following call raised|To fix the error|Suggested fixes|For more information|The error)"
)
_FRAME = re.compile(r'File "[^"]+", line \d+, in \w+\n\s+[^\n]+')


def _reason(error: Exception) -> str:
    """torch's first words and the last line of the user's code, without its advice on flags that users do not have."""
    text = str(error).strip()
    first = _ADVICE.split(text)[0].partition("\nFrom user code")[0].strip()
    lines = [line.partition(" If you're using")[0] for line in first.splitlines() if "TORCH_LOGS" not in line][:6]
    frames = [frame for frame in _FRAME.findall(text) if "/torch/" not in frame]
    where = f"\n{frames[-1]}" if frames else ""
    return f"{type(error).__name__}: " + "\n".join(lines) + where


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


def _replace_source_lines(program: torch.export.ExportedProgram) -> None:
    """Replaces the source line of each node, which names a file of the machine that traced the model.

    A node without one would get the stack of each decomposition of it, which takes a third of the time of an export.
    """
    for node in nodes_of(program):
        if node.meta.get("stack_trace"):
            node.meta["stack_trace"] = _NO_SOURCE_LINE


_NO_SOURCE_LINE = "not recorded"


def _turn_gradients_off(program: torch.export.ExportedProgram) -> None:
    """Keeps gradients off where forward turns them on: torch's decompositions fail on weights that need them there."""
    for node in nodes_of(program):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            node.args = (False, *node.args[1:])

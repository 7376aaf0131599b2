"""torch.export in both of its ways, one after the other.

With ``strict=False`` torch.export runs forward, where ``len(x)`` and ``int(x.shape[0])`` are numbers of Python and fix
the length. With ``strict=True`` it reads the bytecode of forward and keeps such lengths; but a length in an f-string
fixes the axis there, and it does not know all of Python. It takes twice the time, and comes second. Every file is
compared with PyTorch.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError
from nnorm_export.exporting.capture_failures import has_conditions, message, unknown_shapes
from nnorm_export.exporting.passes.program import nodes_of
from nnorm_export.exporting.request import Frozen
from nnorm_export.files.formats import AOTI, PT2
from nnorm_export.files.least_batch import least_rows
from nnorm_export.models import arguments
from nnorm_export.models.modules import deepcopy, without_reading_masks
from nnorm_export.models.program_axes import runs
from nnorm_export.names import layer_name
from nnorm_export.process import redirected, without_warnings
from nnorm_export.steps import step

_KEEP_CONDITIONS = (PT2, AOTI)  # of a program, and refuse batches beyond them


@dataclass(frozen=True)
class Way:
    """How torch.export traces.

    Attributes:
        strict: as ``torch.export.export`` takes it.
        dynamic_shapes: as for :func:`nnorm_export.export`.
        is_oblivious: whether operators take it for granted that no length is 0 or 1, as in ``torch.onnx.export``.
    """

    strict: bool
    dynamic_shapes: Any
    is_oblivious: bool = False


def capture(
    frozen: Frozen, example: dict[str, Any], dynamic_shapes: Any, known: Way | None = None
) -> tuple[torch.export.ExportedProgram, Way]:
    """(program, way): the program of ``frozen.module``, and the first way in which torch.export makes one.

    Args:
        known: the only way that is tried, because it made a program of this model before.

    Raises:
        ExportError: torch.export makes no program.
    """
    _refuse_scripted(frozen.module)
    if dynamic_shapes:
        _refuse_dynamic_var_keyword(frozen.module, example)
    # AOTInductor's code reads contiguous tensors; the other formats keep orders such as channels-last.
    order = torch.contiguous_format if frozen.request.target.format.name == AOTI else torch.preserve_format
    example = pytree.tree_map_only(Tensor, partial(_whole, order=order), example)
    ways = [Way(strict, dynamic_shapes) for strict in (False, True)]
    if frozen.dynamic_batch and frozen.request.target.format.name not in _KEEP_CONDITIONS:
        # torch.export proves that each length of a Dim fulfills a condition of forward, and cannot prove n // 2 <= n.
        # For an axis with a name alone it keeps the condition, beyond which the file is compared with PyTorch.
        names = pytree.tree_map(lambda dim: dim and arguments.name_of(dim), dynamic_shapes)
        ways += [Way(strict, names, is_oblivious=True) for strict in (False, True)]
    errors: list[Exception] = []
    for number, way in enumerate(ways) if known is None else [(0, known)]:
        if number > 1 and not (has_conditions(errors[way.strict]) and _takes_few_rows(frozen)):
            continue
        if number > 0:
            step("trace again")
        try:
            return _captured(frozen.module, example, way), way
        except (
            Exception
        ) as error:  # torch.export passes on what the model raises, and has no exception class of its own
            errors.append(error)
        if unknown_shapes(errors[-1]):
            break
    raise ExportError(message(frozen, errors, is_dynamic=bool(dynamic_shapes))) from errors[0]


def _takes_few_rows(frozen: Frozen) -> bool:
    """Whether the model takes the least batch: else a condition that torch.export cannot prove says what it takes."""
    module = deepcopy(frozen.module, {id(tensor): tensor for tensor in frozen.module.parameters()})
    return runs(module, arguments.resize_batch(frozen.example, least_rows(frozen.least_batch)))


def _captured(module: nn.Module, example: dict[str, Any], way: Way) -> torch.export.ExportedProgram:
    # A trace that fails leaves torch's symbolic tensors in the attributes that forward assigns.
    module = deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    args, kwargs = arguments.unbind(module, example)
    said, stderr = io.StringIO(), sys.stderr  # torch prints a graph before it raises

    def pass_on(text: str, module: str) -> None:
        (said if module.partition(".")[0] == "torch" else stderr).write(text)

    # What forward changes besides its result is judged by .mutations.
    quiet = without_warnings(UserWarning, message="While compiling, we found certain side effects")
    with redirected(pass_on, "stdout", "stderr"), without_reading_masks(), _oblivious(way.is_oblivious), quiet:
        program = torch.export.export(
            module, args, kwargs, dynamic_shapes=arguments.for_torch(way.dynamic_shapes) or None, strict=way.strict
        )
    stderr.write(said.getvalue())
    _replace_source_lines(program)
    _turn_gradients_off(program)
    return program


def _whole(tensor: Tensor, order: torch.memory_format) -> Tensor:
    """Returns ``tensor``, or a copy without gaps in memory: torch.export forbids lengths that equal a stride."""
    is_whole = tensor.layout != torch.strided or tensor.is_contiguous()
    return tensor if is_whole else tensor.clone(memory_format=order)


def _oblivious(is_oblivious: bool) -> contextlib.AbstractContextManager[Any]:
    # Older releases of torch lack the option, and keep conditions that the comparison tries.
    if not (is_oblivious and hasattr(_config, "backed_size_oblivious")):
        return contextlib.nullcontext()
    config: Any = _config  # its patch() is added at run time
    patched: contextlib.AbstractContextManager[Any] = config.patch(backed_size_oblivious=True)
    return patched


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

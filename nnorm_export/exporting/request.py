"""What is exported: the request of the user, and the model frozen, with its example and the names of the file."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.errors import ExportError, FreezeError
from nnorm_export.exporting.dry_run import dry_run, least_batch
from nnorm_export.exporting.mutations import Changes
from nnorm_export.exporting.passes.program import nodes_of
from nnorm_export.exporting.targets import DEFAULT_TARGET, TARGETS, Target, refuse_dtype
from nnorm_export.files.staging import check_output, refuse_unencodable
from nnorm_export.files.user_metadata import check_user_metadata
from nnorm_export.freezing import frozen_copy
from nnorm_export.freezing.normal import NORMAL_CLASS_NAMES
from nnorm_export.freezing.weights import weights_sha256
from nnorm_export.models import arguments
from nnorm_export.models.guards import BeyondGuard, Search
from nnorm_export.models.modules import deepcopy
from nnorm_export.models.program_guards import without_guards
from nnorm_export.names import listed
from nnorm_export.operators import FrozenOperator
from nnorm_export.parity.reference.beyond_float16 import large_inputs
from nnorm_export.steps import step

Model = nn.Module | torch.export.ExportedProgram
Passthrough = Iterable[str | type[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of :func:`nnorm_export.export` that all formats share; ``path`` is the file to write."""

    model: Model
    args: Sequence[Any] | Tensor
    path: Path
    target: Target = TARGETS[DEFAULT_TARGET]
    kwargs: Mapping[str, Any] | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_shapes: Any = None
    dtype: str | torch.dtype | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True
    passthrough: Passthrough = ()
    strict: bool = False

    def __post_init__(self) -> None:
        # A tuple, because it is read several times and may be an iterator.
        object.__setattr__(self, "passthrough", tuple(listed(self.passthrough, "passthrough", FreezeError)))
        check_user_metadata(self.metadata)


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A model in eval mode, its normalizations frozen, in the dtype of the file.

    Attributes:
        module: the frozen model.
        model: the model that the file is compared with: the user's, or the module of an exported program.
        program: the exported program, if that is what the user exports.
        example: parameter name of ``forward`` -> example value.
        changes: what a call of ``forward`` changes; None if that is not known, as of an exported program.
        dynamic_batch: whether the batch is dynamic because the user says nothing about shapes.
        records: path of a layer -> :attr:`FrozenOperator.record`.
        weights_sha256: hash of the frozen weights, before anything is folded; the same in every format.
        least_batch: the least batch that the model takes, where the batch is dynamic; empty if it is 1 or not known.
        beyond_guards: inputs for which the trace took something for granted that does not hold; the trace adds them.
        untried_guards: such conditions beyond which the file cannot be compared; the trace adds them.
        lengths: those of the dynamic axes at which the file is right (:mod:`.files.lengths`); the trace adds them.
        large_inputs, large_numbers: the inputs, and the numbers in forward other than masks, that the float16 of the
            file does not have.
    """

    request: Request
    module: nn.Module
    model: nn.Module
    program: torch.export.ExportedProgram | None
    example: dict[str, Any]
    changes: Changes | None
    dynamic_batch: bool
    records: dict[str, dict[str, Any]]
    weights_sha256: str
    least_batch: str = ""
    beyond_guards: list[BeyondGuard] = field(default_factory=list)
    untried_guards: list[str] = field(default_factory=list)
    lengths: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    large_inputs: list[str] = field(default_factory=list)
    large_numbers: list[str] = field(default_factory=list)

    def note_guards(self, result: Search) -> None:
        self.beyond_guards[:], self.untried_guards[:] = result.found, result.untried

    def without_module(self) -> Frozen:
        """The same without the frozen model, whose weights take as much memory as those of the user's."""
        return replace(self, module=nn.Module())

    def names(self, keys: Sequence[str]) -> tuple[list[str], list[str]]:
        """The names of the file's inputs and outputs: the user's, or those of the parameters and of the result.

        Args:
            keys: the keys that lead to each output in the result.

        Raises:
            ExportError: too many or too few names, or a name that occurs twice.
        """
        default = arguments.tensor_names(self.example)
        inputs = _complete(self.request.input_names, default, "input_names")
        outputs = _complete(self.request.output_names, _output_names(keys, default), "output_names")
        if twice := [name for name, count in Counter([*inputs, *outputs]).items() if count > 1]:
            raise ExportError(
                f"two inputs or outputs would be called {twice[0]}; give each its own name with input_names and "
                "output_names"
            )
        return inputs, outputs


def freeze_source(request: Request) -> Frozen:
    """The model of ``request``, frozen.

    Raises:
        FreezeError: a layer cannot be frozen.
        ExportError: a path that cannot be written, an unknown dtype, an exported program of a model that was not
            frozen, or a model that the target does not take.
        InputError: the example does not fit ``forward``, or the model does not run on it.
    """
    check_output(request.path)  # before the work, which may take minutes
    refuse_unencodable(request.path)
    step("freeze")
    model = request.model
    if isinstance(model, torch.export.ExportedProgram):
        frozen = _of_program(request, model)
    else:
        frozen = _of_module(request, model)
    _refuse_model(request.target, frozen)
    return frozen


def _refuse_model(target: Target, frozen: Frozen) -> None:
    """Raises an ExportError if ``target`` does not take the dtypes or the dynamic axes of the model."""
    program = frozen.program
    tensors = [*arguments.tensors_in(frozen.example), *frozen.module.parameters(), *frozen.module.buffers()]
    for name in sorted({arguments.dtype_name(tensor.dtype) or "" for tensor in tensors if tensor.is_floating_point()}):
        if name != "fp32":  # normalizations compute in float32 in a narrower model too
            refuse_dtype(target, name)
    if program is not None and program.range_constraints and not target.has_dynamic_axes:
        raise ExportError(
            f"{target.title} takes fixed shapes, and the exported program has dynamic axes: give the module, or call "
            "torch.export.export without dynamic_shapes"
        )


def _of_module(request: Request, model: nn.Module) -> Frozen:
    if isinstance(model, torch.jit.ScriptModule):
        name = getattr(model, "original_name", type(model).__name__)
        raise ExportError(
            f"the model ({name}) is TorchScript, in which normalizations cannot be found any more; give the Python "
            "module that torch.jit.trace or torch.jit.script made it of"
        )
    dtype = arguments.resolve_dtype(request.dtype)
    # Operators resolve their parameters in float64 and round them to the arithmetic of the layer that they freeze.
    exact = deepcopy(model).to(torch.float64) if dtype == torch.float64 else model
    module, notice = frozen_copy(exact, request.passthrough, strict=request.strict)
    if notice:
        warnings.warn(notice, UserWarning, stacklevel=2)
    example = arguments.bind(module, request.args, request.kwargs)
    if request.dynamic_shapes is None:
        arguments.refuse_empty_batch(example)
    fitting = example if dtype is None else arguments.cast(example, _float_dtype(module))
    changes = dry_run(module, fitting, request.passthrough)
    least = least_batch(module, fitting) if request.dynamic_shapes is None else ""
    lost = large_inputs(example, [dtype] * len(arguments.tensors_in(example)))
    if dtype is not None:
        module, example = module.to(dtype), arguments.cast(example, dtype)
    elif _float_dtype(model) is None and _only_float64(example):
        module = module.to(torch.float64)  # a model without parameters computes in the dtype of its input
    records = {
        path: layer.record
        for path, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, FrozenOperator)
    }
    return Frozen(
        request=request,
        module=module,
        model=model,
        program=None,
        example=example,
        changes=changes,
        dynamic_batch=request.dynamic_shapes is None,
        records=records,
        weights_sha256=weights_sha256(module),
        least_batch=least,
        large_inputs=lost,
    )


def _float_dtype(module: nn.Module) -> torch.dtype | None:
    tensors = (*module.parameters(), *module.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def _only_float64(example: dict[str, Any]) -> bool:
    floating = {tensor.dtype for tensor in arguments.tensors_in(example) if tensor.is_floating_point()}
    return floating == {torch.float64}


def _of_program(request: Request, program: torch.export.ExportedProgram) -> Frozen:
    if request.dtype is not None:
        raise ExportError("dtype: an exported program has a dtype already; give the module to export it in another")
    _refuse_unfrozen(program)
    args, kwargs = program.example_inputs or ((), {})
    module = without_guards(program)
    return Frozen(
        request=request,
        module=module,
        model=module,
        program=program,
        example=arguments.bind(module, args, kwargs),
        changes=None,
        dynamic_batch=False,
        records={},
        weights_sha256=weights_sha256(module),
    )


def _refuse_unfrozen(program: torch.export.ExportedProgram) -> None:
    """Raises an ExportError if a node comes from the training code of a normalization."""
    for node in nodes_of(program):
        for path, cls in (node.meta.get("nn_module_stack") or {}).values():
            name = str(cls).rpartition(".")[2]
            if name in NORMAL_CLASS_NAMES:
                raise ExportError(
                    f"the exported program holds the training code of layer {path} ({name}); export a frozen model: "
                    "torch.export.export(nnorm_export.freeze(model), args)"
                )


def _output_names(keys: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """A name for each output from the ``keys`` that lead to it; a name that is an input's ends in ``_out``."""
    names = [key if key and not key[0].isdigit() else f"output_{key}".rstrip("_") for key in keys]
    names = ["output"] if names == ["output_0"] else names
    return [f"{name}_out" if name in inputs else name for name in names]


def _complete(given: Sequence[str] | None, default: Sequence[str], option: str) -> list[str]:
    if given is None:
        return list(default)
    given = listed(given, option, ExportError)
    if len(given) != len(default):
        raise ExportError(
            f"{option} has {len(given)} names, the model has {len(default)}: {', '.join(default)}; "
            "give one name for each of them, in this order"
        )
    return given

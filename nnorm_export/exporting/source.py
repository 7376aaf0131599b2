"""What is exported: a traced program, the names of its inputs and outputs, and what its layers were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError
from nnorm_export.exporting.trace import exporting_state, trace
from nnorm_export.exporting.whitening import fold_whitening, has_whitening
from nnorm_export.freezing import freeze
from nnorm_export.freezing.normal import NORMAL_CLASS_NAMES
from nnorm_export.models import arguments
from nnorm_export.models.copying import deepcopy
from nnorm_export.operators import FrozenOperator


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A model in eval mode, its normalizations frozen, in the dtype of the file.

    Attributes:
        module: the frozen model.
        model: the user's own, what the file is compared with.
        example: parameter name of ``forward`` -> example value.
        dynamic_batch: whether the batch is dynamic without the user's saying.
        records: path of a layer -> :attr:`FrozenOperator.record`.
    """

    module: nn.Module
    model: nn.Module
    example: dict[str, Any]
    dynamic_batch: bool = False
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_module(
        cls,
        model: nn.Module,
        args: Sequence[Any] | Tensor,
        kwargs: Mapping[str, Any] | None,
        dtype: str | torch.dtype | None,
        passthrough: Iterable[str | type[nn.Module]],
        *,
        dynamic_batch: bool,
    ) -> Frozen:
        torch_dtype = arguments.resolve_dtype(dtype)
        # Operators resolve their parameters in float64, and round them to the arithmetic of the layer that they freeze.
        double = torch_dtype == torch.float64
        module = freeze(deepcopy(model).to(torch.float64) if double else model, passthrough=passthrough)
        example = arguments.bind(module, args, kwargs)
        if torch_dtype is not None:
            module, example = module.to(torch_dtype), arguments.cast(example, torch_dtype)
        records = {
            path: layer.record
            for path, layer in module.named_modules(remove_duplicate=False)
            if isinstance(layer, FrozenOperator)
        }
        return cls(module=module, model=model, example=example, dynamic_batch=dynamic_batch, records=records)

    @property
    def input_names(self) -> list[str]:
        """Names in the file, where the user gives none."""
        return arguments.tensor_names(self.example)

    def output_names_of(self, paths: Sequence[str]) -> list[str]:
        """Names in the file, where the user gives none, from the keys that lead to the outputs."""
        names = [path if path and not path[0].isdigit() else f"output_{path}".rstrip("_") for path in paths]
        names = ["output"] if names == ["output_0"] else names
        return [f"{name}_out" if name in self.input_names else name for name in names]


@dataclass(frozen=True, kw_only=True)
class Source(Frozen):
    """A frozen model on its way into a file by ``torch.export``.

    Attributes:
        program: the frozen model, traced.
        axis_names: (input, axis) -> name of a dynamic axis.
    """

    program: torch.export.ExportedProgram
    axis_names: dict[tuple[int, int], str]

    @classmethod
    def of(
        cls,
        model: nn.Module | torch.export.ExportedProgram,
        args: Sequence[Any] | Tensor,
        kwargs: Mapping[str, Any] | None,
        dynamic_shapes: Any,
        dtype: str | torch.dtype | None,
        passthrough: Iterable[str | type[nn.Module]],
    ) -> Source:
        if isinstance(model, torch.export.ExportedProgram):
            if dtype is not None:
                raise ExportError("an exported program has its dtype built in; give the module to export it in another")
            return cls._of_program(model)
        frozen = Frozen.of_module(model, args, kwargs, dtype, passthrough, dynamic_batch=dynamic_shapes is None)
        return cls._of_frozen(frozen, dynamic_shapes)

    @classmethod
    def _of_program(cls, program: torch.export.ExportedProgram) -> Source:
        _refuse_unfrozen(program)
        args, kwargs = program.example_inputs or ((), {})
        module = program.module()
        # A program has forgotten the names of its axes. If the first axis of the first input is dynamic, it is a batch.
        return cls(
            module=module,
            model=module,
            example=arguments.bind(module, args, kwargs),
            program=program,
            axis_names={(0, 0): arguments.BATCH},
        )

    @classmethod
    def _of_frozen(cls, frozen: Frozen, dynamic_shapes: Any) -> Source:
        traced = frozen.example
        if frozen.dynamic_batch:
            traced, dynamic_shapes = arguments.dynamic_batch(traced)
        with exporting_state():
            program = trace(frozen.module, traced, dynamic_shapes, dynamic_batch=frozen.dynamic_batch)
            if has_whitening(frozen.module):
                fold_whitening(frozen.module, program)
                program = trace(frozen.module, traced, dynamic_shapes, dynamic_batch=frozen.dynamic_batch)
        return cls(**vars(frozen), program=program, axis_names=arguments.axis_names(traced, dynamic_shapes))

    @property
    def output_names(self) -> list[str]:
        """Names in the file, where the user gives none."""
        return self.output_names_of(_output_paths(self.program))


def _output_paths(program: torch.export.ExportedProgram) -> list[str]:
    """The keys that lead to the outputs; None among them is no output of the file."""
    spec = program.call_spec.out_spec
    assert spec is not None
    leaves = program.graph_signature.user_outputs
    paths = arguments.leaf_names(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    tensors = {node.name for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, str) and leaf in tensors:
            found.append(path)
        elif leaf is not None:  # a constant, or a number that the program computes
            raise ExportError(f"the model returns {leaf!r} at output {path or '0'}; return tensors only")
    return found


def _refuse_unfrozen(program: torch.export.ExportedProgram) -> None:
    """Raises where a node comes from the training code of a normalization: a program of a model not frozen before."""
    for node in program.graph.nodes:
        for path, cls in (node.meta.get("nn_module_stack") or {}).values():
            name = str(cls).rpartition(".")[2]
            if name in NORMAL_CLASS_NAMES:
                raise ExportError(
                    f"the exported program holds the training code of {path} ({name}); export a frozen model: "
                    "torch.export.export(nnorm_export.freeze(model), args)"
                )

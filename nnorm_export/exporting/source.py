"""What is exported: a traced program, the names of its inputs and outputs, and what its layers were."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError
from nnorm_export.exporting import arguments
from nnorm_export.exporting.trace import exporting_state, trace
from nnorm_export.freezing import freeze
from nnorm_export.freezing.normal import NORMAL_CLASS_NAMES
from nnorm_export.operators import FrozenOperator


class Source:
    """A model on its way into a file.

    Attributes:
        program: the frozen model, traced.
        model: the user's own, what the file is compared with.
        example: parameter name of ``forward`` -> example value.
        dynamic_batch: whether the batch was made dynamic without the user's saying.
        axis_names: (input, axis) -> name of a dynamic axis.
        records: path of a layer -> :attr:`FrozenOperator.record`.
        input_names, output_names: names in the file, where the user gives none.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        example: dict[str, Any],
        *,
        dynamic_batch: bool = False,
        axis_names: dict[tuple[int, int], str] | None = None,
        records: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.program, self.model, self.example = program, model, example
        self.dynamic_batch = dynamic_batch
        self.axis_names, self.records = axis_names or {}, records or {}
        self.input_names = arguments.tensor_names(example)
        self.output_names = [f"{name}_out" if name in self.input_names else name for name in _output_names(program)]

    @classmethod
    def of_program(cls, program: torch.export.ExportedProgram) -> Source:
        _refuse_unfrozen(program)
        args, kwargs = program.example_inputs or ((), {})
        module = program.module()
        example = arguments.bind(module, args, kwargs)
        # A program has forgotten the names of its axes. If the first axis of the first input is dynamic, it is a batch.
        return cls(program, module, example, axis_names={(0, 0): arguments.BATCH})

    @classmethod
    def of_module(
        cls,
        model: nn.Module,
        args: Sequence[Any] | Tensor,
        kwargs: Mapping[str, Any] | None,
        dynamic_shapes: Any,
        dtype: torch.dtype | None,
        passthrough: Sequence[str | type[nn.Module]],
    ) -> Source:
        # Operators resolve their parameters in float64, and round them to the arithmetic of the layer that they freeze.
        double = dtype == torch.float64
        frozen = freeze(copy.deepcopy(model).to(torch.float64) if double else model, passthrough=passthrough)
        example = arguments.bind(frozen, args, kwargs)
        if dtype is not None:
            frozen, example = frozen.to(dtype), arguments.cast(example, dtype)
        dynamic_batch = dynamic_shapes is None
        traced = example
        if dynamic_batch:
            traced, dynamic_shapes = arguments.dynamic_batch(example)
        with exporting_state():
            program = trace(frozen, traced, dynamic_shapes, dynamic_batch=dynamic_batch)
        return cls(
            program,
            model,
            example,
            dynamic_batch=dynamic_batch,
            axis_names=arguments.axis_names(traced, dynamic_shapes),
            records={
                path: layer.record
                for path, layer in frozen.named_modules(remove_duplicate=False)
                if isinstance(layer, FrozenOperator)
            },
        )


def _output_names(program: torch.export.ExportedProgram) -> list[str]:
    """Names from the keys that lead to the outputs; None among them is no output of the file."""
    spec = program.call_spec.out_spec
    assert spec is not None
    leaves = program.graph_signature.user_outputs
    paths = arguments.leaf_names(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    names = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, str):  # the name of a tensor in the graph; anything else is a constant
            names.append(path if path and not path[0].isdigit() else f"output_{path}".rstrip("_"))
        elif leaf is not None:
            raise ExportError(f"the model returns {leaf!r} at output {path or '0'}; return tensors only")
    return ["output"] if names == ["output_0"] else names


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

"""Writes the normalizations of a program out in ATen's operators.

torch requires decompositions to be functional, and the functions of the operators work in place. Therefore they take
the place of the torch ops in the graph, and torch traces them as the model's own code. ATen's operators are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nnorm_export.errors import ExportError
from nnorm_export.exporting.passes.program import drop_source_lines, functional, nodes_of
from nnorm_export.operators import NORMALIZATIONS
from nnorm_export.operators.spec import TracedOperator
from nnorm_export.steps import step

_OPERATORS = {operator.torch_op: operator for operator in NORMALIZATIONS.values()}
# (operator, the values of its parameters by their names) -> the function that computes the same
Choice = Callable[[TracedOperator, Mapping[str, Tensor | None]], Callable[..., Tensor]]


def for_aten(operator: TracedOperator, parameters: Mapping[str, Tensor | None]) -> Callable[..., Tensor]:
    is_near_zero = operator.has_exponent_near_zero(parameters)
    return operator.near_zero_function if is_near_zero else operator.aten_function


def for_inductor(operator: TracedOperator, _: Mapping[str, Tensor | None]) -> Callable[..., Tensor]:
    return operator.inductor_function


def decomposed(program: torch.export.ExportedProgram, choose: Choice = for_aten) -> torch.export.ExportedProgram:
    """``program`` with each call of a normalization replaced by the operators of the function that ``choose`` returns.

    Raises:
        ExportError: torch cannot decompose the program, or it changes an input in place.
    """
    step("decompose")
    with _replaced(program, choose):
        result = functional(
            program,
            "Export for another target, or for pt2 with operators='kept', which needs no decomposition",
        )
    if changed := list(result.graph_signature.user_inputs_to_mutate.values()):
        raise ExportError(
            f"the model changes its input {changed[0]!r} in place, which a functional program cannot do; let forward "
            "work on a copy (x.clone()), or call its first layer without inplace=True"
        )
    if left := [node for node in nodes_of(result) if node.target in _OPERATORS]:
        raise ExportError(f"torch does not decompose {left[0].target} at this place; export for another target")
    drop_source_lines(result)
    return result


@contextmanager
def _replaced(program: torch.export.ExportedProgram, choose: Choice) -> Iterator[None]:
    calls = [(node, node.target) for node in nodes_of(program) if node.target in _OPERATORS]
    for node, target in calls:
        operator = _OPERATORS[target]
        names = operator.declaration.parameters
        values = [_value(program, argument) for argument in node.args[1 : 1 + len(names)]]
        node.target = choose(operator, dict(zip(names, values, strict=True)))
    try:
        yield
    finally:
        for node, target in calls:
            node.target = target


def _value(program: torch.export.ExportedProgram, argument: Any) -> Tensor | None:
    """The values of a parameter or buffer of the program; None for any other node, such as one within a branch."""
    if not isinstance(argument, torch.fx.Node) or argument.graph is not program.graph:
        return None
    signature = program.graph_signature
    name = (signature.inputs_to_buffers | signature.inputs_to_parameters).get(argument.name, "")
    value = program.state_dict.get(name, program.constants.get(name))
    return value if isinstance(value, Tensor) else None

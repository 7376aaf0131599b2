"""probe(): runs every normalization of a file on inputs and λ made to reach each branch of its formula.

The data that a model sees leaves branches out: exponents that vanish, rows of one value, h = 0. Each normalization runs
alone on inputs that reach them (:mod:`nnorm_export.parity.layer_by_layer.probe_inputs`), frozen norms also with other
λ than their own, and is compared with its formula in PyTorch. The model's code is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.domain import Operator
from nnorm_export.dtypes import Array, is_float
from nnorm_export.errors import ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid
from nnorm_export.files.parts import Part, alone, norms_of, refuse_quantized
from nnorm_export.files.tensors import info_of
from nnorm_export.parity.layer_by_layer.isolation import opened
from nnorm_export.parity.layer_by_layer.probe_inputs import (
    Norm,
    Probe,
    branches_of,
    great_sizes,
    probes_of,
    signed_sizes,
)
from nnorm_export.parity.verdict.allowed_error import common_allowed_error
from nnorm_export.parity.verdict.compare_outputs import compare_output
from nnorm_export.parity.verdict.outcome import OutputParity, worst
from nnorm_export.reports import ComparisonReport
from nnorm_export.steps import step


@dataclass(frozen=True)
class LayerProbe:
    """A normalization on its probes.

    Attributes:
        name: of its node in the file.
        path: of the layer in the model.
        op_type: the operator of the node.
        implementation: ``kernel``, ``body`` or ``plugin``.
        reached, missed: the branches that the probes have reached, and the others.
        parity: the comparison with the formula in PyTorch, the worst over all probes.
    """

    name: str
    path: str
    op_type: str
    implementation: str
    reached: tuple[str, ...]
    missed: tuple[str, ...]
    parity: OutputParity


@dataclass(frozen=True)
class ProbeReport(ComparisonReport):
    """The outcome; true if every normalization computes its formula on every probe.

    Attributes:
        runtime: the runtime that ran the file.
        layers: the normalizations, in the order of the file.
    """

    runtime: str
    layers: list[LayerProbe]

    def __bool__(self) -> bool:
        return all(layer.parity.passed for layer in self.layers)


def probe(path: str | Path, *, runtime: str | None = None) -> ProbeReport:
    """Runs each normalization that is a node of the ONNX file ``path`` on probes of its branches.

    Args:
        path: a file with nodes of the domain ``nnorm``, in the form ``portable`` or ``custom``.
        runtime: see :func:`nnorm_export.load`.

    Raises:
        ModelFileError: not an ONNX file, or one without such nodes, or an optimized one; or a node is in a branch or a
            loop.
    """
    step("run probes")
    file = onnx_file.read(path)
    if file.form == "optimized" or not file.normalizations:
        raise ModelFileError(
            f"{path}: its form is '{file.form}', in which no normalization is a node by itself; probe the file in the "
            "form 'portable'"
        )
    if file.has_normalizations_in_branches:
        raise ModelFileError(
            f"{path}: a normalization is inside a control-flow operator, where it cannot be probed; export the "
            "branches as models of their own"
        )
    refuse_quantized(file)
    refuse_invalid(file)
    proto = onnx_file.read_with_weights(path)
    norms = {part: Norm.of(proto, part) for part in norms_of(proto) if part.is_cut}
    dtype_of = _dtypes(proto)
    pieces = [(part, made) for part, norm in norms.items() for made in probes_of(norm, dtype_of(part.x))]
    results, implementations, name = _run(proto, pieces, runtime)
    layers = []
    for part, norm in norms.items():
        own = [(made, result) for (other, made), result in zip(pieces, results, strict=True) if other is part]
        parity = worst([parity for made, result in own for parity in _compare(part.name, norm.operator, made, result)])
        reached = set().union(*(made.reached for made, _ in own))
        branches = branches_of(norm.operator)
        layers.append(
            LayerProbe(
                part.name,
                part.path,
                part.op_type,
                implementations.get(part.name, ""),
                tuple(branch for branch in branches if branch in reached),
                tuple(branch for branch in branches if branch not in reached),
                parity,
            )
        )
    return ProbeReport(name, layers)


def _compare(name: str, operator: Operator, made: Probe, result: Array) -> Iterator[OutputParity]:
    """Compares elements of each size apart, so that the errors of great ones do not hide those of small ones."""
    arrays = result, made.expected, made.float64
    if not operator.is_frozen:
        # In a row of one value PyTorch computes only the bias, and its error there says nothing about other rows.
        constant = np.array([bool((row == row.flat[0]).all()) for row in made.feed[0]])
        for chosen in filter(np.any, (constant, ~constant)):
            yield _compare_together(name, *(array[chosen] for array in arrays))
        return
    sizes = np.abs(signed_sizes(result.dtype))
    for chosen in (sizes <= 1, *(sizes == great for great in great_sizes(result.dtype))):
        for channel in range(result.shape[1]):
            yield _compare_together(name, *(array[chosen, channel] for array in arrays))


def _compare_together(name: str, result: Array, expected: Array, float64: Array) -> OutputParity:
    return compare_output(name, result, expected, float64, allowed_error=common_allowed_error(expected, float64))


def _run(
    proto: onnx.ModelProto, pieces: list[tuple[Part, Probe]], runtime: str | None
) -> tuple[list[Array], dict[str, str], str]:
    """Runs every probe alone. Returns the results, name -> implementation, and the runtime's name."""
    model = alone(proto, [part for part, _ in pieces], [made.feed for _, made in pieces])
    for number, (_, made) in enumerate(pieces):
        for position, values in made.replaced.items():
            name = model.graph.node[number].input[position] = f"{number}/parameter_{position}"
            model.graph.initializer.append(numpy_helper.from_array(values, name))
    with opened(model, runtime) as runner:
        return runner(*(array for _, made in pieces for array in made.feed)), runner.implementations, runner.runtime


def _dtypes(proto: onnx.ModelProto) -> Callable[[str], np.dtype[Any]]:
    """The dtype of a value by its name; that of the file's first floating-point input if the file does not say it."""
    values = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
    known = {value.name: info.dtype for value in values if is_float((info := info_of(value)).dtype)}
    default = next(iter(known.values()), np.dtype(np.float32))
    return lambda name: known.get(name, default)

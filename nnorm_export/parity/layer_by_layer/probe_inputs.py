"""Inputs that reach every branch of a normalization's formula, and what the formula returns for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from nnorm_export.domain import Operator
from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import ModelFileError
from nnorm_export.files.parts import Part
from nnorm_export.mathematics import estimate_lmbda, resolve_exponents, standardize_over
from nnorm_export.models.arguments import to_tensor
from nnorm_export.operators import NORMALIZATIONS
from nnorm_export.parity.layer_by_layer.isolation import with_epilogue

LMBDAS = (0.0, 1.0, 2.0, 0.5, 1.5, -3.0, 5.0)
DELTA = math.sqrt(1e-5)  # the exponent shift of the reference variant, for those λ
_SMALL = (0.0, -0.0, 2.0**-24, 1e-3, 0.7, 1.0)  # |h|
_EXTENT = 3  # spatial elements of a probe
_NO_SPREAD = "no spread"  # a row of one value
_BRANCHES = ("h > 0", "h < 0", "h = 0", "η₊ = 0", "η₊ ≠ 0", "η₋ = 0", "η₋ ≠ 0")


def branches_of(operator: Operator) -> tuple[str, ...]:
    """The branches of the operator's formula. Frozen statistics have no rows without spread."""
    return _BRANCHES if operator.is_frozen else (*_BRANCHES, _NO_SPREAD)


@dataclass(frozen=True)
class Probe:
    """Inputs of a node.

    Attributes:
        feed: X and the operands of the operator's epilogue.
        expected, float64: the formula of ``feed`` in the file's dtype and in float64.
        reached: the branches that ``feed`` reaches.
        replaced: parameters that replace the node's own, by their position among its inputs.
    """

    feed: list[Array]
    expected: Array
    float64: Array
    reached: set[str]
    replaced: Mapping[int, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Norm:
    """A normalization in a file.

    Attributes:
        parameters: the values of its parameters, by name.
        attributes: the values of its attributes, by name, with the default of those that the node lacks.
    """

    operator: Operator
    parameters: Mapping[str, Array]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, proto: onnx.ModelProto, part: Part) -> Norm:
        """The normalization ``part`` of the file ``proto``.

        Raises:
            ModelFileError: this version does not know its operator, or a parameter is not an initializer.
        """
        node, operator = proto.graph.node[part.nodes[0]], part.operator
        if operator is None:
            raise ModelFileError(
                f"node {part.name} is a {part.op_type}, which this version lacks; upgrade nnorm_export"
            )
        initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        inputs = dict(zip(operator.inputs, node.input, strict=True))
        parameters = {}
        for name in operator.parameters:
            if inputs[name] not in initializers:
                raise ModelFileError(
                    f"node {part.name}: its {name} is not an initializer; probe the file as export() wrote it"
                )
            parameters[name] = numpy_helper.to_array(initializers[inputs[name]])
        attributes: dict[str, Any] = {name: default for name, (_, default) in operator.attributes.items()}
        attributes |= {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        return cls(operator, parameters, attributes)

    def probe(self, x: Array, reached: set[str], replaced: Mapping[str, Array] | None = None) -> Probe:
        """``x`` as a probe, with the formula of the operator, computed by its torch op, and its epilogue."""
        replaced = replaced or {}
        parameters = {name: replaced.get(name, value) for name, value in self.parameters.items()}
        y = self._formula(x, parameters)
        wide = {name: value.astype(np.float64) for name, value in parameters.items()}
        operands, expected, float64 = with_epilogue(self.operator, y, self._formula(x.astype(np.float64), wide))
        assert float64 is not None
        positions = {self.operator.inputs.index(name): value for name, value in replaced.items()}
        return Probe([x, *operands], expected, float64, reached, positions)

    def _formula(self, x: Array, parameters: Mapping[str, Array]) -> Array:
        torch_op = NORMALIZATIONS[self.operator.norm].torch_op
        names = {argument.name for argument in torch_op._schema.arguments}
        constants = {name: value for name, value in self.attributes.items() if name in names}
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in parameters.items()}
        return to_numpy(torch_op(to_tensor(x), **tensors, **constants))


def probes_of(norm: Norm, dtype: np.dtype[Any]) -> Iterator[Probe]:
    """Probes in ``dtype`` of the branches that :func:`branches_of` lists, as far as the norm can reach them."""
    if not norm.operator.is_frozen:
        yield _rows(norm, dtype)
        return
    yield _frozen(norm, {}, dtype)
    # With as many of the other λ as there are channels, until all have been used; and with h = x.
    scale = norm.parameters["scale"]
    cases = torch.tensor(LMBDAS, dtype=torch.float64)
    for first in range(0, len(cases), len(scale)):
        lmbda = cases[(torch.arange(len(scale)) + first) % len(cases)]
        pos, neg = (value.numpy().astype(scale.dtype) for value in resolve_exponents(lmbda, DELTA))
        identity = {"scale": np.ones_like(scale), "shift": np.zeros_like(scale)}
        yield _frozen(norm, {**identity, "exponent_pos": pos, "exponent_neg": neg}, dtype)


def _frozen(norm: Norm, replaced: Mapping[str, Array], dtype: np.dtype[Any]) -> Probe:
    parameters = {**norm.parameters, **replaced}
    scale, shift = parameters["scale"], parameters["shift"]
    x = ((signed_sizes(dtype)[:, None] - shift.astype(np.float64)) / scale).astype(dtype)
    x = np.repeat(x[:, :, None], _EXTENT, axis=2)
    h = x.astype(np.float64) * scale[:, None] + shift[:, None]
    return norm.probe(x, _branches(h, parameters["exponent_pos"], parameters["exponent_neg"]), replaced)


def signed_sizes(dtype: np.dtype[Any]) -> Array:
    """h in the rows of a frozen norm's probe."""
    sizes = np.array([*_SMALL, *great_sizes(dtype)])
    return np.concatenate([sizes, -sizes])


def great_sizes(dtype: np.dtype[Any]) -> tuple[float, ...]:
    """|h| above 1 for which ψ stays finite with the greatest exponents."""
    return (4.0, 6.0) if dtype == np.float16 else (4.0, 30.0)


def _branches(h: Array, pos: Array, neg: Array) -> set[str]:
    reached = {"h > 0": (h > 0).any(), "h < 0": (h < 0).any(), "h = 0": (h == 0).any()}
    for name, exponent in (("η₊", pos), ("η₋", neg)):
        reached[f"{name} = 0"], reached[f"{name} ≠ 0"] = (exponent == 0).any(), (exponent != 0).any()
    return {branch for branch, is_reached in reached.items() if is_reached}


def _rows(norm: Norm, dtype: np.dtype[Any]) -> Probe:
    epsilon, delta = float(norm.attributes["epsilon"]), float(norm.attributes["delta"])
    shape = norm.parameters["weight"].shape
    is_per_channel = norm.operator.is_per_channel
    groups = int(norm.attributes["num_groups"]) if is_per_channel else 1
    extent = [_EXTENT] if is_per_channel else []
    length = math.prod((*shape, *extent)) // groups
    rows = np.stack(list(_row_values(length, epsilon, delta)))
    x = np.repeat(rows[:, None], groups, axis=1).reshape(-1, *shape, *extent).astype(dtype)
    sets = torch.from_numpy(x.astype(np.float64)).reshape(-1, length)
    h = standardize_over(sets, [1], epsilon)
    exponents = resolve_exponents(estimate_lmbda(h, [1], delta), delta)
    reached = _branches(h.numpy(), *(value.numpy() for value in exponents))
    if bool((sets.var(1, correction=0) == 0).any()):
        reached.add(_NO_SPREAD)
    return norm.probe(x, reached)


def _row_values(length: int, epsilon: float, delta: float) -> Iterator[Array]:
    """Rows of ``length``: of one value, normal, skewed, with an outlier, and those whose λ̂ is 0 or 2."""
    quantiles = math.sqrt(2) * torch.erfinv(2 * (torch.arange(length, dtype=torch.float64) + 0.5) / length - 1)
    normal = quantiles.numpy()
    yield np.zeros(length)
    yield np.full(length, 3.75)
    yield normal
    yield 1e-3 * normal
    outlier = normal.copy()
    outlier[-1] = 30.0
    yield outlier
    for sign in (1.0, -1.0):
        yield sign * np.exp(2 * normal)
        if (row := _with_lmbda_zero(quantiles, epsilon, delta)) is not None:
            yield sign * row
    if length % 2:
        yield normal - normal[length // 2]  # one value is the mean


def _with_lmbda_zero(quantiles: Tensor, epsilon: float, delta: float) -> Array | None:
    """exp(t·q) with t such that λ̂ = 0, by bisection; None if every t gives another λ̂."""

    def lmbda(t: float) -> float:
        h = standardize_over(torch.exp(t * quantiles)[None], [1], epsilon)
        return float(estimate_lmbda(h, [1], delta))

    grid = [step / 8 for step in range(1, 49)]
    last = next((t for t in grid if lmbda(t) < 0), None)
    if last is None:
        return None
    low, high = last - 1 / 8, last
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if lmbda(middle) < 0 else (middle, high)
    return torch.exp(high * quantiles).numpy()

"""probe(): every branch of every normalization in a file, hit by inputs and λ made for it, and what was not.

Data that a model sees leaves branches out: exponents that vanish, rows without spread, h = 0. Each normalization is run
alone on inputs that reach them, batch norms with other λ than their own too, and compared with its formula in PyTorch.
It takes the file alone.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from nnorm_export.domain import OPERATORS
from nnorm_export.errors import ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.parts import Part, alone, parts_of
from nnorm_export.mathematics import estimate_lmbda, resolve_exponents, standardize_over
from nnorm_export.models.arrays import to_numpy, to_tensor
from nnorm_export.operators.batch_normal_norm import batch_normal_norm
from nnorm_export.operators.group_normal_norm import group_normal_norm
from nnorm_export.operators.layer_normal_norm import layer_normal_norm
from nnorm_export.parity.judgement import Array, OutputParity, judge, worst
from nnorm_export.runtimes import load

LMBDAS = (0.0, 1.0, 2.0, 0.5, 1.5, -3.0, 5.0)
DELTA = math.sqrt(1e-5)  # the exponent shift of the reference form, for those λ
_SMALL = (0.0, -0.0, 2.0**-24, 1e-3, 0.7, 1.0)  # |h|
_EXTENT = 3  # pixels of a probe
_BATCH_BRANCHES = ("h > 0", "h < 0", "h = 0", "η₊ = 0", "η₊ ≠ 0", "η₋ = 0", "η₋ ≠ 0")
_ROW_BRANCHES = (*_BATCH_BRANCHES, "no spread")


@dataclass(frozen=True)
class LayerProbe:
    """A normalization on its probes.

    Attributes:
        reached: branches that the probes have reached; ``missed`` those that they have not.
        parity: with the formula in PyTorch, the worst over all probes.
    """

    name: str
    path: str
    op_type: str
    implementation: str
    reached: tuple[str, ...]
    missed: tuple[str, ...]
    parity: OutputParity


@dataclass(frozen=True)
class ProbeReport:
    """The outcome; true when every normalization computes its formula on every probe."""

    runtime: str
    layers: list[LayerProbe]

    def __bool__(self) -> bool:
        return all(layer.parity.passed for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        return {"passed": bool(self), **asdict(self)}


@dataclass(frozen=True)
class _Probe:
    """An input of a node, with what the formula makes of it and the branches that it reaches.

    ``replaced`` are parameters that take the place of the node's own: position among its inputs -> value.
    """

    feed: list[Array]
    expected: Array
    truth: Array
    reached: set[str]
    replaced: dict[int, Array] = field(default_factory=dict)


def probe(path: str | Path, *, runtime: str | None = None) -> ProbeReport:
    """Runs each normalization that is a node of the ONNX file ``path`` on probes of its branches.

    Args:
        path: a file with nodes of the domain ``nnorm``: in the forms ``portable`` and ``custom``.
        runtime: see :func:`nnorm_export.load`.

    Raises:
        ModelFileError: not an ONNX file, or one without such nodes, or an optimised one.
    """
    file = onnx_file.read(path)
    if file.form == "optimized" or not file.normalizations:
        raise ModelFileError(f"{path}: its form is '{file.form}', in which no normalization is a node by itself")
    proto = onnx.load(path)
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    dtype = _dtype(proto)
    pieces: list[tuple[Part, _Probe]] = []
    for part in parts_of(proto, ()):
        if part.is_cut:
            node = proto.graph.node[part.nodes[0]]
            parameters = [numpy_helper.to_array(constants[name]) for name in node.input[1:] if name in constants]
            pieces += [(part, made) for made in _probes(node, parameters, dtype)]
    results, implementations, name = _run(proto, pieces, runtime)
    layers = []
    for part in dict.fromkeys(part for part, _ in pieces):
        mine = [(made, result) for (other, made), result in zip(pieces, results, strict=True) if other is part]
        parity = worst([parity for made, result in mine for parity in _judged(part, made, result)])
        reached = set().union(*(made.reached for made, _ in mine))
        branches = _BATCH_BRANCHES if part.op_type.startswith("Batch") else _ROW_BRANCHES
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


def _judged(part: Part, made: _Probe, result: Array) -> Iterator[OutputParity]:
    """Apart where sizes differ, so that the errors of great values do not hide those of small ones."""
    if not part.op_type.startswith("Batch"):
        # Rows without spread give the bias; together, or PyTorch's luck on a single row would be the yardstick.
        constant = np.array([bool((row == row.flat[0]).all()) for row in made.feed[0]])
        for chosen in (constant, ~constant):
            yield judge(part.name, *(array[chosen] for array in (result, made.expected, made.truth)))
        return
    sizes = np.tile(np.abs(_sizes(result.dtype)), 2)
    for chosen in (sizes <= 1, *(sizes == great for great in _great(result.dtype))):
        for channel in range(result.shape[1]):
            one = (array[chosen, channel] for array in (result, made.expected, made.truth))
            yield judge(part.name, *one)


def _run(
    proto: onnx.ModelProto, pieces: list[tuple[Part, _Probe]], runtime: str | None
) -> tuple[list[Array], dict[str, str], str]:
    model = alone(proto, [part for part, _ in pieces], [made.feed for _, made in pieces])
    for number, (_, made) in enumerate(pieces):
        node = model.graph.node[number]
        for position, values in made.replaced.items():
            node.input[position] = f"{number}/parameter_{position}"
            model.graph.initializer.append(numpy_helper.from_array(values, node.input[position]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probes.onnx"
        onnx.save_model(model, file)
        runner = load(file, runtime)
        return runner(*(array for _, made in pieces for array in made.feed)), runner.implementations, runner.runtime


def _dtype(proto: onnx.ModelProto) -> np.dtype[Any]:
    """Of the activations: that of the file's first floating-point input."""
    kinds = {
        onnx.TensorProto.FLOAT: np.float32,
        onnx.TensorProto.FLOAT16: np.float16,
        onnx.TensorProto.DOUBLE: np.float64,
        onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    }
    found = (kinds.get(value.type.tensor_type.elem_type) for value in proto.graph.input)
    return np.dtype(next((kind for kind in found if kind is not None), np.float32))


def _probes(node: onnx.NodeProto, parameters: list[Array], dtype: np.dtype[Any]) -> Iterator[_Probe]:
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type.startswith("Batch"):
        yield _batch(node.op_type, parameters, {}, dtype)
        # As many of the other λ as there are channels, and as often as it takes to have had them all; and h = x.
        channels, arithmetic = parameters[0].shape, parameters[0].dtype
        cases = torch.tensor(LMBDAS, dtype=torch.float64)
        for first in range(0, len(cases), channels[0]):
            lmbda = cases[(torch.arange(channels[0]) + first) % len(cases)]
            pos, neg = (value.numpy().astype(arithmetic) for value in resolve_exponents(lmbda, DELTA))
            identity = {1: np.ones(channels, arithmetic), 2: np.zeros(channels, arithmetic)}
            yield _batch(node.op_type, parameters, {**identity, 3: pos, 4: neg}, dtype)
    else:
        yield _rows(node.op_type, parameters, attributes, dtype)


def _batch(op_type: str, own: list[Array], replaced: dict[int, Array], dtype: np.dtype[Any]) -> _Probe:
    parameters = [replaced.get(position, value) for position, value in enumerate(own, start=1)]
    scale, shift, pos, neg, *_ = parameters
    sizes = _sizes(dtype)
    h = np.array([*sizes, *(-value for value in sizes)])[:, None]
    x = ((h - shift.astype(np.float64)) / scale).astype(dtype)
    x = np.repeat(x[:, :, None], _EXTENT, axis=2)
    wide = [torch.from_numpy(value.astype(np.float64)) for value in parameters]
    narrow = [torch.from_numpy(np.array(value)) for value in parameters]
    expected = to_numpy(batch_normal_norm(to_tensor(x), *narrow))
    truth = batch_normal_norm(torch.from_numpy(x.astype(np.float64)), *wide).numpy()
    inside = x.astype(np.float64) * scale[:, None] + shift[:, None]
    feed = [x]
    if op_type.endswith("AddRelu"):
        feed.append(np.maximum(-2 * expected, 0).astype(dtype))
        expected, truth = expected + feed[1], truth + feed[1].astype(np.float64)
    if op_type.endswith("Relu"):
        expected, truth = np.maximum(expected, 0), np.maximum(truth, 0)
    return _Probe(feed, expected, truth, _branches(inside, pos, neg), replaced)


def _great(dtype: np.dtype[Any]) -> tuple[float, ...]:
    """|h| above 1, as far as ψ stays finite with the greatest exponents."""
    return (4.0, 6.0) if dtype == np.float16 else (4.0, 30.0)


def _sizes(dtype: np.dtype[Any]) -> tuple[float, ...]:
    return (*_SMALL, *_great(dtype))


def _branches(h: Array, pos: Array, neg: Array) -> set[str]:
    reached = {"h > 0": (h > 0).any(), "h < 0": (h < 0).any(), "h = 0": (h == 0).any()}
    for name, exponent in (("η₊", pos), ("η₋", neg)):
        reached[f"{name} = 0"], reached[f"{name} ≠ 0"] = (exponent == 0).any(), (exponent != 0).any()
    return {branch for branch, is_reached in reached.items() if is_reached}


def _rows(op_type: str, parameters: list[Array], attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> _Probe:
    weight = parameters[0]
    defaults = {name: default for name, (_, default) in OPERATORS[op_type].attributes.items()}
    epsilon, delta = (float(attributes.get(name, defaults[name])) for name in ("epsilon", "delta"))
    groups = int(attributes.get("num_groups", 1))
    length = weight.size if op_type.startswith("Layer") else weight.size // groups * _EXTENT
    rows = np.stack(list(_row_values(length, epsilon, delta)))
    is_layer = op_type.startswith("Layer")
    shape = (-1, *weight.shape) if is_layer else (-1, weight.size, _EXTENT)
    x = (rows if is_layer else np.repeat(rows[:, None], groups, axis=1)).reshape(shape).astype(dtype)

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Array:
        if is_layer:
            return to_numpy(layer_normal_norm(x, weight, bias, epsilon, delta))
        return to_numpy(group_normal_norm(x, weight, bias, groups, epsilon, delta))

    narrow = [torch.from_numpy(np.array(value)) for value in parameters]
    expected = compute(to_tensor(x), *narrow)
    truth = compute(torch.from_numpy(x.astype(np.float64)), *(value.double() for value in narrow))
    sets = torch.from_numpy(x.astype(np.float64)).reshape(-1, length)
    h = standardize_over(sets, [1], epsilon)
    exponents = resolve_exponents(estimate_lmbda(h, [1], delta), delta)
    reached = _branches(h.numpy(), *(value.numpy() for value in exponents))
    if bool((sets.var(1, correction=0) == 0).any()):
        reached.add("no spread")
    return _Probe([x], expected, truth, reached)


def _row_values(length: int, epsilon: float, delta: float) -> Iterator[Array]:
    """Rows of ``length``: without spread, ordinary, skewed, with an outlier, and those whose λ̂ is 0 or 2."""
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
        yield normal - normal[length // 2]  # a value at the mean


def _with_lmbda_zero(quantiles: Tensor, epsilon: float, delta: float) -> Array | None:
    """exp(t·q) with t such that λ̂ = 0, by bisection; None where no t gives that."""

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

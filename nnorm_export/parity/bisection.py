"""bisect(): at which layer does a runtime leave PyTorch, and is it that layer's own doing?

Every normalization is looked at twice. Inside the whole file its input shows the error that it inherits. Alone, fed
with the input that PyTorch gave it, it shows its own. The first layer whose own error is too great is the culprit;
where all layers are sound and an input is not, the fault lies before it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.parts import MODULE, Part, alone, nodes_of, parts_of, with_outputs
from nnorm_export.models.arguments import tensors_in
from nnorm_export.models.arrays import to_numpy
from nnorm_export.parity.comparison import Passthrough, PyTorchModel, Tap, as_taken, bound, dtype_of
from nnorm_export.parity.judgement import Array, OutputParity, judge
from nnorm_export.runtimes import load


@dataclass(frozen=True)
class LayerParity:
    """A layer in the runtime against PyTorch.

    Attributes:
        path: of the layer in the model; ``call`` counts from 1 where it is called more than once.
        op_type: of its node; ``(module)`` for a layer that is no normalization.
        implementation: ``kernel``, ``body`` or ``plugin``, or empty where it is no node of ours.
        inherited: the layer's input in the whole file.
        own: the layer's output, alone, on PyTorch's input; None where it cannot be cut out of the file.
    """

    path: str
    call: int
    op_type: str
    implementation: str
    inherited: OutputParity
    own: OutputParity | None

    @property
    def name(self) -> str:
        return f"{self.path or '(the model itself)'}{f', call {self.call}' if self.call > 1 else ''}"


@dataclass(frozen=True)
class Bisection:
    """The outcome; true when nothing differs.

    Attributes:
        runtime: what ran the file.
        layers: in the order in which they run.
        outputs: of the whole file.
        notes: layers that were not looked at, and why.
    """

    runtime: str
    layers: list[LayerParity]
    outputs: list[OutputParity]
    notes: list[str]

    def __bool__(self) -> bool:
        compared = [*(layer.inherited for layer in self.layers), *self.outputs]
        return self.culprit is None and all(parity.passed for parity in compared)

    @property
    def culprit(self) -> LayerParity | None:
        """The first layer whose own error is too great."""
        return next((layer for layer in self.layers if layer.own is not None and not layer.own.passed), None)

    @property
    def verdict(self) -> str:
        """In words: where the runtime leaves PyTorch."""
        if (culprit := self.culprit) is not None:
            what = f"layer {culprit.name} ({culprit.op_type})"
            return f"{what} computes something else, on PyTorch's own input: {culprit.own}"
        before = "the input of the model"
        for layer in self.layers:
            if not layer.inherited.passed:
                where = f"between {before} and layer {layer.name}"
                return f"every layer is sound alone; {self.runtime} leaves PyTorch {where}: {layer.inherited}"
            before = f"layer {layer.name}"
        wrong = ", ".join(str(output) for output in self.outputs if not output.passed)
        return f"every layer is sound; the fault lies after {before}: {wrong}" if wrong else "nothing differs"

    def to_json(self) -> dict[str, Any]:
        return {"passed": bool(self), "verdict": self.verdict, **asdict(self)}


def bisect(
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    runtime: str | None = None,
    layers: Iterable[str] = (),
    passthrough: Passthrough = (),
) -> Bisection:
    """Compares the ONNX file ``path`` with ``model`` layer by layer.

    Args:
        path: an ONNX file with nodes of the domain ``nnorm``: in the forms ``portable`` and ``custom``.
        model, inputs, runtime, passthrough: as for :func:`nnorm_export.verify`.
        layers: paths of modules to look at besides the normalizations. Each must return one tensor.

    Raises:
        ModelFileError: not an ONNX file, or none with such nodes and without ``layers``.
        InputError: a path in ``layers`` is none of the model's, or nothing of it is left in the file.
    """
    path = Path(path)
    file = onnx_file.read(path)
    if file.form == "optimized":
        raise ModelFileError(
            f"{path}: it is optimised, its layers are merged; bisect the portable file it was made from"
        )
    others = list(layers)
    modules = dict(model.named_modules(remove_duplicate=False))
    if unknown := [name for name in others if name not in modules]:
        raise InputError(f"the model has no layer {unknown[0]!r}; named_modules() lists what it has")
    proto = onnx.load(path)
    parts = parts_of(proto, others)
    if gone := [name for name in others if name not in {part.path for part in parts}]:
        raise InputError(
            f"nothing of layer {gone[0]} is left in {path}: it is folded into another, or does nothing there"
        )
    if not parts:
        raise ModelFileError(
            f"{path}: it has no normalization that is a node (its form is '{file.form}'), and no layers were named; "
            "export the form 'portable', or name layers"
        )
    _refuse_folded(proto, parts, modules)
    runner = load(path, runtime)
    reference = PyTorchModel(model, dtype_of(runner), passthrough)
    example = as_taken(runner, bound(model, inputs))
    feed = [to_numpy(tensor) for tensor in tensors_in(example)]
    paths = {part.path for part in parts}
    expected, seen = reference.run_with_taps(example, paths)
    truth, exact = reference.run_with_taps_in_float64(example, paths)
    quartets = zip(runner.outputs, runner(*feed), expected, truth or itertools.repeat(None), strict=False)
    outputs = [judge(info.name, actual, wanted, true) for info, actual, wanted, true in quartets]
    parts, notes = _matched(parts, seen, modules)
    with tempfile.TemporaryDirectory() as folder:
        inside = _values(with_outputs(proto, [part.x for part in parts]), Path(folder) / "inside.onnx", runtime, feed)
        cut = [(part, seen[part.path][part.call - 1]) for part in parts if part.is_cut]
        own, implementations = _own(proto, cut, reference, Path(folder) / "alone.onnx", runtime)
    found, ranks = [], _ranks(proto)
    for part in parts:
        x = _with_rank(seen[part.path][part.call - 1].x, ranks.get(part.x))
        true_x = _with_rank(exact[part.path][part.call - 1].x, x.ndim) if truth is not None else None
        inherited = judge(part.name, inside.get(part.x, x), x, true_x)
        implementation = implementations.get(part.name, "")
        found.append(LayerParity(part.path, part.call, part.op_type, implementation, inherited, own.get(part.name)))
    return Bisection(runner.runtime, found, outputs, notes)


def _matched(
    parts: Sequence[Part], seen: Mapping[str, Sequence[Tap]], modules: Mapping[str, nn.Module]
) -> tuple[list[Part], list[str]]:
    """The parts, each with the number of its layer's call in PyTorch, and notes on those that cannot be told apart.

    A layer under several names is one layer, whose calls PyTorch counts together.
    """
    if missing := [part.path for part in parts if not seen[part.path]]:
        raise InputError(
            f"layer {missing[0] or '(the model itself)'} is never called in PyTorch; an exported program has no layers "
            "to look into: give the module that it was made of"
        )
    counts = Counter(id(modules[part.path]) for part in parts)
    matched, notes = [], []
    calls: Counter[int] = Counter()
    for part in parts:
        layer, called = id(modules[part.path]), len(seen[part.path])
        calls[layer] += 1
        if counts[layer] == called and (part.op_type != MODULE or called == 1):
            matched.append(replace(part, call=calls[layer]))
        else:
            notes.append(
                f"layer {part.path} is not looked at: it is called {called} times, and not all are in the file"
            )
    return matched, list(dict.fromkeys(notes))


def _refuse_folded(proto: onnx.ModelProto, parts: Sequence[Part], modules: Mapping[str, nn.Module]) -> None:
    """A layer that the exporter has folded another into does not compute what the module does."""
    decorrelated = [path for path, layer in modules.items() if hasattr(layer, "running_whitening_matrix")]
    folded = [path for path in decorrelated if not nodes_of(proto, path)]
    for part in parts:
        layer = modules[part.path]
        if part.op_type == MODULE and isinstance(layer, _BatchNorm):
            raise InputError(f"layer {part.path} is folded into the layer before it in this file; name what follows it")
        if part.op_type == MODULE and folded and isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            raise InputError(
                f"layer {part.path} may have {folded[0]} folded into it in this file; name what follows it"
            )


def _values(proto: onnx.ModelProto, path: Path, runtime: str | None, feed: list[Array]) -> dict[str, Array]:
    if not proto.graph.output:  # all parts read the model's own inputs
        return {}
    onnx.save_model(proto, path)
    runner = load(path, runtime)
    return {info.name: value for info, value in zip(runner.outputs, runner(*feed), strict=True)}


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    values = (*proto.graph.input, *proto.graph.value_info)
    return {value.name: len(value.type.tensor_type.shape.dim) for value in values}


def _with_rank(array: Array, rank: int | None) -> Array:
    """An instance norm without a batch gets one in the file."""
    return array[None] if rank == array.ndim + 1 else array


def _own(
    proto: onnx.ModelProto,
    parts: Sequence[tuple[Part, Tap]],
    reference: PyTorchModel,
    path: Path,
    runtime: str | None,
) -> tuple[dict[str, OutputParity], dict[str, str]]:
    """Each part alone on PyTorch's input: name -> comparison, and what ran them."""
    if not parts:
        return {}, {}
    feeds, wanted = [], []
    ranks = _ranks(proto)
    for part, tap in parts:
        truth = reference.layer_in_float64(part.path, tap.x)
        rank = ranks.get(part.x)
        x, y = _with_rank(tap.x, rank), _with_rank(tap.y, rank)
        truth = None if truth is None else _with_rank(truth, rank)
        feed = [x]
        if part.residual is not None:
            # One that turns y into about |y|, of which the ReLU behind the sum takes nothing away.
            feed.append(np.maximum(-2 * y, 0).astype(y.dtype))
            y, truth = y + feed[1], None if truth is None else truth + feed[1].astype(np.float64)
        if part.has_relu:
            y, truth = np.maximum(y, 0), None if truth is None else np.maximum(truth, 0)
        feeds.append(feed)
        wanted.append((y, truth))
    onnx.save_model(alone(proto, [part for part, _ in parts], feeds), path)
    runner = load(path, runtime)
    results = runner(*(array for feed in feeds for array in feed))
    compared = zip(parts, results, wanted, strict=True)
    own = {part.name: judge(part.name, actual, y, truth) for (part, _), actual, (y, truth) in compared}
    return own, runner.implementations

"""bisect(): the first layer whose result in a runtime differs from PyTorch's, by its own error or an inherited one.

Every normalization is compared twice. In the whole file, its input shows the error that it inherits. Alone, on the
input that PyTorch gave it, its output shows its own error. The first layer whose own error is too great is the culprit;
if every layer is right alone and an input is not, the fault lies before that input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor, nn

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import InputError, ModelFileError, first_line
from nnorm_export.files import onnx_file
from nnorm_export.files.ignored_inputs import about_ignored_inputs, ignored_of
from nnorm_export.files.parts import MODULE, Part, alone, parts_of, refuse_quantized, with_outputs
from nnorm_export.models.ambient import neutral
from nnorm_export.models.arguments import tensors_in
from nnorm_export.models.modules import named_layers, require_module
from nnorm_export.names import layer_name, listed
from nnorm_export.parity.as_computed import as_computed
from nnorm_export.parity.layer_by_layer.between import Folded, layers_of, nodes_between
from nnorm_export.parity.layer_by_layer.bisection import Bisection, LayerParity
from nnorm_export.parity.layer_by_layer.constants import differing_constants
from nnorm_export.parity.layer_by_layer.isolation import opened, with_epilogue
from nnorm_export.parity.reference.changed_inputs import change_of_input
from nnorm_export.parity.reference.changed_integers import other_integers
from nnorm_export.parity.reference.changed_masks import other_masks
from nnorm_export.parity.reference.file_inputs import as_taken, dtype_of, inputs_beyond_float16
from nnorm_export.parity.reference.pytorch_model import LayerCall, Passthrough, PyTorchModel, bound
from nnorm_export.parity.reference.weights import frozen_state, other_weights
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison
from nnorm_export.parity.verdict.criteria import Criterion, PerOutput
from nnorm_export.parity.verdict.dependence import require_dependence
from nnorm_export.parity.verdict.outcome import (
    ON_CHANGED_INPUTS,
    OutputParity,
    are_finite,
    errors_on_changed_inputs,
    on_changed_inputs,
)
from nnorm_export.parity.verdict.where import Mask, Where
from nnorm_export.runtimes import Runner, load


@neutral()
def bisect(
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    runtime: str | None = None,
    layers: Iterable[str] = (),
    where: PerOutput[Mask] = None,
    passthrough: Passthrough = (),
) -> Bisection:
    """Compares the ONNX file ``path`` with ``model`` layer by layer.

    >>> report = nnorm_export.bisect("model.onnx", model, images)
    >>> [layer.path for layer in report.layers if not layer.own.passed]
    []

    Args:
        path: an ONNX file with nodes of the domain ``nnorm``, in the form ``portable`` or ``custom``.
        model, inputs, runtime, passthrough: as for :func:`nnorm_export.verify`.
        layers: paths of modules to compare besides the normalizations. Each must return one tensor.
        where: as for :func:`nnorm_export.verify`. What enters a layer is compared where the first mask counts too, if
            its first axes have the mask's lengths.

    Raises:
        ModelFileError: not an ONNX file, an optimized one, or one without such nodes if ``layers`` is empty.
        InputError: a path in ``layers`` is not a module of the model, or none of its nodes is left in the file.
    """
    require_module("bisect", model)
    path = Path(path)
    file = onnx_file.read(path)
    if file.form == "optimized":
        raise ModelFileError(
            f"{path}: it is optimized, its layers are merged; bisect the portable file that it was made from"
        )
    refuse_quantized(file)
    others = listed(layers, "layers", InputError)
    modules = dict(named_layers(model))
    if unknown := [name for name in others if name not in modules]:
        raise InputError(f"the model has no layer {unknown[0]!r}; take a path that model.named_modules() lists")
    proto = onnx_file.read_with_weights(path)
    parts = _parts(file, proto, others, model)
    folded = Folded.of(proto, modules)
    folded.refuse(parts)
    runner = as_computed(load(path, runtime))
    reference = PyTorchModel(model, dtype_of(runner, model), passthrough, [info.name for info in runner.outputs])
    masks = Where.of(where)
    masks.check(runner.inputs, runner.outputs)
    subject = _Subject(path, type(model).__name__, runner, runtime, reference, proto, parts, folded, masks)
    example = as_taken(runner, bound(model, inputs))
    compared = subject.compare(example)
    result, expected, given = compared.result, compared.case.expected, compared.case
    changed, _ = change_of_input(reference, example, expected)
    changes = [] if changed is None else [changed]
    if result:
        changes += other_masks(reference, example, expected) + other_integers(reference, example, expected)
    for inputs_of_change, _ in changes if result else []:
        with errors_on_changed_inputs():
            other = subject.compare(inputs_of_change)
            if not other.is_stable or all(output.passed for output in other.result.outputs):
                continue
            compared = subject.narrowed(inputs_of_change, other)
        note = f"nothing differs on the given inputs; all this was found {ON_CHANGED_INPUTS}"
        result = compared.result
        result = replace(result, outputs=on_changed_inputs(result.outputs), notes=[*result.notes, note])
        break
    else:
        compared = subject.narrowed(example, compared)
        result = compared.result
    depends = given.dependence(None if changed is None else changed[1])
    result = replace(result, outputs=require_dependence(result.outputs, depends))
    if result:
        return result
    if ignored := about_ignored_inputs(ignored_of(proto.graph)):
        result = replace(result, notes=[*result.notes, ignored])
    numbers = reference.beyond_float16(example).names(masks=not are_finite(result.outputs))
    lost = [*inputs_beyond_float16(runner, bound(model, inputs)), *numbers]
    foreign_weights = other_weights(str(path), runner, model, passthrough)
    constants = subject.differing_constants(compared, model, passthrough)
    return replace(result, other_weights=foreign_weights, beyond_float16=lost, constants=constants)


def _parts(file: onnx_file.ModelFile, proto: onnx.ModelProto, others: list[str], model: nn.Module) -> list[Part]:
    """The normalizations and the layers ``others``, or the error that bisect() raises."""
    path, modules = file.path, dict(named_layers(model))
    parts = parts_of(proto, others)
    if gone := [name for name in others if name not in {part.path for part in parts}]:
        raise InputError(
            f"nothing of layer {gone[0]} is left in {path}: it is folded into another layer, or does nothing in eval "
            "mode; name a layer beside it"
        )
    if not parts and file.has_normalizations_in_branches:
        raise ModelFileError(
            f"{path}: its normalizations are inside control-flow operators, whose values cannot be compared; name "
            "layers outside them, or export the branches as models of their own"
        )
    if not parts:
        raise ModelFileError(
            f"{path}: it has no normalization that is a node (its form is '{file.form}'), and no layers were named; "
            "export the form 'portable', or name layers"
        )
    if foreign := [part.path for part in parts if part.path not in modules]:
        raise InputError(
            f"{type(model).__name__} has no layer {layer_name(foreign[0])}, which {path} has: the file was made from "
            "another model, or from the module of this exported program. Give the one that it was made from"
        )
    return parts


@dataclass(frozen=True)
class _Compared:
    """A comparison of ``parts``, with that of the outputs, and whether PyTorch's are stable."""

    result: Bisection
    parts: list[Part]
    case: Case
    is_stable: bool

    def noted(self, notes: Sequence[str]) -> _Compared:
        return replace(self, result=replace(self.result, notes=[*self.result.notes, *notes]))


@dataclass(frozen=True)
class _Subject:
    """What is compared: ``parts`` of the file and the layers of the model, whose name is ``name``."""

    path: Path
    name: str
    runner: Runner
    runtime: str | None
    reference: PyTorchModel
    proto: onnx.ModelProto
    parts: Sequence[Part]
    folded: Folded
    where: Where

    def narrowed(self, example: Mapping[str, Any], compared: _Compared) -> _Compared:
        """``compared``, with the layers between the last right value and the first wrong one, if no layer is wrong."""
        paths, notes = layers_of(self.proto, self._between(compared), self.folded)
        compared = compared.noted(notes)
        paths = self.reference.of_one_tensor(example, [path for path in paths if path not in self._paths])
        others = [part for part in parts_of(self.proto, paths) if part.path in paths]
        if not others:
            return compared
        parts = sorted([*self.parts, *others], key=lambda part: max(part.nodes))
        try:
            return replace(self, parts=parts).compare(example).noted(notes)
        except Exception as error:  # bisect chose the layer itself: if it cannot run alone, a note says why
            return compared.noted(
                [f"{', '.join(part.path for part in others)} could not be run alone: {first_line(error)}"]
            )

    def _between(self, compared: _Compared) -> list[int]:
        """The nodes between the last right value and the first wrong one; none if a layer is wrong by itself."""
        result = compared.result
        if result or result.culprit is not None or result.not_compared is not None:
            return []
        right: list[str] = []  # values that were compared, or that a sound layer computes from them
        for part, layer in zip(compared.parts, result.layers, strict=True):
            if not layer.inherited.passed:
                return nodes_between(self.proto, [part.x], right)
            # The result of a sound layer may be wrong because of what its epilogue adds.
            right += [part.x, part.y] if layer.own is not None and not any(part.operands) else [part.x]
        wrong = [output.name for output in result.outputs if not output.passed]
        return nodes_between(self.proto, wrong, right)

    @property
    def _paths(self) -> set[str]:
        return {part.path for part in self.parts}

    def differing_constants(self, compared: _Compared, model: nn.Module, passthrough: Passthrough) -> list[str]:
        """The constants that differ from the model's, of the layer that is wrong, or of the nodes between."""
        culprit = compared.result.culprit
        layers = zip(compared.parts, compared.result.layers, strict=True)
        nodes = next((part.nodes for part, layer in layers if layer is culprit), ()) or self._between(compared)
        state = frozen_state(model, self.reference.dtype, passthrough) if nodes else {}
        return differing_constants(self.proto, nodes, state, self.folded)

    def compare(self, example: Mapping[str, Any]) -> _Compared:
        runner, reference = self.runner, self.reference
        feed = [to_numpy(tensor) for tensor in tensors_in(example)]
        paths = self._paths
        expected, calls = reference.run_with_hooks(example, paths)
        perturbed = reference.perturbed_runs_with_hooks(example, expected, paths)
        float64, calls_in_float64 = reference.run_with_hooks_in_float64(example, paths)
        counted = self.where.of_run(runner.inputs, feed, runner.outputs, expected)
        case = Case(feed, expected, runner(*feed), counted=counted)
        case = case.with_runs(float64, [outputs for outputs, _ in perturbed])
        within = next((counts for counts in counted or () if counts is not None), None)
        names = [info.name for info in runner.outputs]
        comparison = Comparison(str(self.path), self.name, names, [Criterion()] * len(names), reference.computed_in)
        outputs = comparison.compare_outputs(case.with_allowed_error())
        parts, notes = _matched(self.parts, calls, self.folded.modules)
        inside = _values(with_outputs(self.proto, [part.x for part in parts]), self.runtime, feed)
        cut = [(part, calls[part.path][part.call - 1]) for part in parts if part.is_cut]
        own, implementations = _own(self.proto, cut, reference, self.runtime)
        found, ranks = [], _ranks(self.proto)
        for part in parts:
            x = _with_rank(calls[part.path][part.call - 1].x, ranks.get(part.x))
            x_in_float64 = None
            if case.float64 is not None:
                x_in_float64 = _with_rank(calls_in_float64[part.path][part.call - 1].x, x.ndim)
            runs = [_with_rank(of_run[part.path][part.call - 1].x, x.ndim) for _, of_run in perturbed]
            actual = inside.get(part.x, x)
            inherited = _compare_tensor(part, actual, x, x_in_float64, runs, reference.computed_in, within)
            implementation = implementations.get(part.name, "")
            found.append(LayerParity(part.path, part.call, part.op_type, implementation, inherited, own.get(part.name)))
        is_stable = case.is_stable(reference.computed_in)
        return _Compared(Bisection(runner.runtime, found, outputs, notes), parts, case, is_stable)


def _matched(
    parts: Sequence[Part], calls: Mapping[str, Sequence[LayerCall]], modules: Mapping[str, nn.Module]
) -> tuple[list[Part], list[str]]:
    """Returns the parts, each with the number of its layer's call in PyTorch, and notes on parts without such a number.

    A layer under several names is one layer: PyTorch counts its calls together.
    """
    if missing := [part.path for part in parts if not calls[part.path]]:
        raise InputError(
            f"layer {layer_name(missing[0])} is never called in PyTorch; an exported program has no "
            "layers: give the module that it was exported from"
        )
    counts = Counter(id(modules[part.path]) for part in parts)
    matched, notes = [], []
    found: Counter[int] = Counter()
    for part in parts:
        layer, called = id(modules[part.path]), len(calls[part.path])
        found[layer] += 1
        if counts[layer] == called and (part.op_type != MODULE or called == 1):
            matched.append(replace(part, call=found[layer]))
        else:
            notes.append(
                f"layer {part.path} is not compared: it is called {called} times, and not all calls are in the file"
            )
    return matched, list(dict.fromkeys(notes))


def _values(proto: onnx.ModelProto, runtime: str | None, feed: list[Array]) -> dict[str, Array]:
    """The outputs of ``proto`` by name."""
    if not proto.graph.output:  # all parts read the model's own inputs
        return {}
    with opened(proto, runtime) as runner:
        results = as_computed(runner)(*feed)
        return {info.name: value for info, value in zip(runner.outputs, results, strict=True)}


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    values = (*proto.graph.input, *proto.graph.value_info)
    return {value.name: len(value.type.tensor_type.shape.dim) for value in values}


def _with_rank(array: Array, rank: int | None) -> Array:
    """Adds a batch axis if the file has one and PyTorch has not: an instance norm of an unbatched input."""
    return array[None] if rank == array.ndim + 1 else array


def _compare_tensor(
    part: Part,
    actual: Array,
    expected: Array,
    float64: Array | None,
    perturbed: Sequence[Array],
    computed_in: str,
    counted: Array | None = None,
) -> OutputParity:
    """Compares the input or output of ``part`` with PyTorch's."""
    runs = [[run] for run in perturbed]
    case = Case([], [expected], [actual], counted=None if counted is None else [counted])
    case = case.with_runs(None if float64 is None else [float64], runs)
    comparison = Comparison("the file", "PyTorch", [part.name], [Criterion()], computed_in)
    return comparison.compare_outputs(case.with_allowed_error())[0]


def _own(
    proto: onnx.ModelProto, parts: Sequence[tuple[Part, LayerCall]], reference: PyTorchModel, runtime: str | None
) -> tuple[dict[str, OutputParity], dict[str, str]]:
    """Runs each part alone on PyTorch's input. Returns name -> comparison, and name -> implementation."""
    if not parts:
        return {}, {}
    feeds, wanted = [], []
    ranks = _ranks(proto)
    # All perturbed runs before the first float64 result: of a large model there is one copy at a time.
    perturbed = [reference.perturbed_runs_of_layer(part.path, call) for part, call in parts]
    for (part, call), of_part in zip(parts, perturbed, strict=True):
        rank = ranks.get(part.x)
        x, y = _with_rank(call.x, rank), _with_rank(call.y, rank)
        wide = reference.layer_in_float64(part.path, call.x)
        float64 = None if wide is None else _with_rank(wide, rank)
        operands: list[Array] = []
        runs = [_with_rank(run, rank) for run in of_part]
        if part.operator is not None:
            operands, y, float64 = with_epilogue(part.operator, y, float64)
            runs = [part.operator.apply_epilogue(run, *operands) for run in runs]
        feeds.append([x, *operands])
        wanted.append((y, float64, runs))
    results = [y for y, _, _ in wanted]
    with opened(alone(proto, [part for part, _ in parts], feeds, results), runtime) as runner:
        results = runner(*(array for feed in feeds for array in feed))
        compared = zip(parts, results, wanted, strict=True)
        own = {
            part.name: _compare_tensor(part, actual, *of_part, reference.computed_in)
            for (part, _), actual, of_part in compared
        }
        return own, runner.implementations

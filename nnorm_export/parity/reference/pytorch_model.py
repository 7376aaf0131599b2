"""The user's model, run in the dtype of a file and in float64, and the calls of its layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.dtypes import Array, is_float, to_numpy
from nnorm_export.errors import InputError, NnormExportError
from nnorm_export.float16_range import about_float16
from nnorm_export.freezing import frozen_copy
from nnorm_export.models.arguments import bind, cast, tensor_names, tensors_in, to_tensor, unbind
from nnorm_export.models.modules import eval_copy, unwrapped, without_fused_attention
from nnorm_export.parity.reference.beyond_float16 import BeyondFloat16, used_by
from nnorm_export.parity.reference.perturbation import flip_last_bits, random_last_bits, with_absolute_sigmoids
from nnorm_export.parity.verdict.allowed_error import distance, machine_epsilon, narrower, scale_about
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.parity.verdict.outcome import NONDETERMINISTIC
from nnorm_export.process import release_memory
from nnorm_export.steps import counted

_BYTES_OF_A_LARGE_MODEL = 2**24
# Runs with random last bits. The rows of an output have similar sensitivities, so that many rows need fewer runs.
RUNS_OF_MANY_ROWS, RUNS_OF_FEW_ROWS = 3, 7
_MANY_ROWS = 4
_ELEMENTS_FOR_ANOTHER_RUN = 2**15  # among so many, three runs are all near float64 in some by chance
HALVES = (torch.float16, torch.bfloat16)
Passthrough = Iterable[str | type[nn.Module]]
_T = TypeVar("_T")


def bound(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """Returns ``inputs``, as :func:`nnorm_export.verify` takes them, by the names of ``forward``'s parameters."""
    return bind(model, (), inputs) if isinstance(inputs, Mapping) else bind(model, inputs, None)


def observe(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    paths: Iterable[str],
    passthrough: Passthrough = (),
) -> dict[str, list[LayerCall]]:
    """Returns the input and output of each layer in ``paths`` on ``inputs`` in float32, call by call.

    Raises:
        InputError: the inputs do not fit the model, or a layer takes or returns something other than one tensor.
    """
    reference = PyTorchModel(model, torch.float32, passthrough)
    return reference.run_with_hooks(cast(bound(model, inputs), torch.float32), paths)[1]


class LayerCall(NamedTuple):
    """The input and output of one call of a layer."""

    x: Array
    y: Array


class PyTorchModel:
    """The user's model, which can be run in the file's dtype and in float64.

    In half precision the frozen model runs in its place, because training-time code promotes half inputs to float32.
    :meth:`defect_of_freezing` then checks in float32 that the frozen model computes what the user's model computes.

    Args:
        model: the user's model, which is copied.
        dtype: the file's floating-point dtype; None if it has none.
        passthrough: as for :func:`nnorm_export.freeze`.
        outputs: the names of the file's outputs. A model that returns a dict of these names is compared by them.

    Attributes:
        computed_in: the narrowest floating-point dtype that the perturbed runs computed in, ``dtype`` or that of an
            autocast region in the model; empty for no dtype.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None, passthrough: Passthrough, outputs: Sequence[str] = ()
    ) -> None:
        self.dtype = dtype
        self.computed_in = "" if dtype is None else str(dtype).removeprefix("torch.")
        self._outputs = tuple(outputs)
        self._model = model
        self._passthrough = tuple(passthrough)
        self._copies: dict[str, nn.Module] = {}
        self._is_large = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) > _BYTES_OF_A_LARGE_MODEL

    @property
    def _original(self) -> nn.Module:
        return self._copy("original", lambda: eval_copy(self._model))

    @property
    def _single(self) -> nn.Module:
        return self._copy("single", lambda: eval_copy(self._model).float())

    @property
    def _in_dtype(self) -> nn.Module:
        def make() -> nn.Module:
            is_half = self.dtype in HALVES
            module = frozen_copy(self._model, self._passthrough)[0] if is_half else eval_copy(self._model)
            # A model of several dtypes is unchanged if the file's dtype is one of them.
            if self.dtype is not None and self.dtype not in {p.dtype for p in module.parameters()}:
                module.to(self.dtype)
            return module

        return self._copy("in_dtype", make)

    @property
    def _double(self) -> nn.Module | None:
        """None for a float64 file: PyTorch computes nothing more exactly, so it has no budget."""
        if self.dtype == torch.float64:
            return None
        return self._copy("double", lambda: eval_copy(self._model).to(torch.float64))

    def _copy(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """The copy ``name``, made when it is needed; of a large model there is one copy at a time."""
        if name not in self._copies:
            if self._is_large:
                copies = [weakref.ref(copy) for copy in self._copies.values()]
                self._copies.clear()
                release_memory(collect=any(copy() is not None for copy in copies))
            self._copies[name] = make()
        return self._copies[name]

    def run(self, example: Mapping[str, Any]) -> list[Array]:
        """Returns the outputs in the file's dtype; those in float64 are cast to float32 unless it is float64.

        Raises:
            InputError: the model does not run on the example.
        """
        outputs = self._run_in_words(self._in_dtype, example)
        if self.dtype == torch.float64:
            return outputs
        # A model that computes in a narrower dtype does not become exact when it casts its result to float64.
        return [array.astype(np.float32) if array.dtype == np.float64 else array for array in outputs]

    @property
    def is_in_own_dtype(self) -> bool:
        """Whether :meth:`run` runs the user's model as it is."""
        own = {tensor.dtype for tensor in self._model.parameters() if tensor.is_floating_point()}
        return not own or (self.dtype in own and self.dtype not in HALVES)

    def run_in_own_dtype(self, example: Mapping[str, Any]) -> list[Array]:
        """Returns the outputs of the user's model as it is, in its own dtype.

        Raises:
            InputError: the model does not run on the example.
        """
        if self.is_in_own_dtype:
            return self.run(example)
        own = next(tensor.dtype for tensor in self._model.parameters() if tensor.is_floating_point())
        return self._run_in_words(self._original, cast(example, own))

    def run_in_float64(self, example: Mapping[str, Any]) -> list[Array] | None:
        """Returns the outputs in float64; None for a float64 file, or if the model does not run in float64."""
        model = self._double
        try:
            return None if model is None else self._run(model, cast(example, torch.float64))
        except NnormExportError:
            raise
        except Exception:  # the user's code may raise anything in float64: it casts to float32, or asserts a dtype
            return None

    def run_with_hooks(
        self, example: Mapping[str, Any], paths: Iterable[str]
    ) -> tuple[list[Array], dict[str, list[LayerCall]]]:
        """Returns the outputs, as :meth:`run`, and the input and output of each layer in ``paths``, call by call.

        Raises:
            InputError: a layer takes or returns something other than one tensor.
        """
        with _hooks(self._in_dtype, paths) as calls:
            return self.run(example), calls

    def of_one_tensor(self, example: Mapping[str, Any], paths: Iterable[str]) -> list[str]:
        """Those of the layers ``paths`` that are called once, with one tensor, and return one."""
        calls: dict[str, list[bool]] = {path: [] for path in paths}

        def hook(path: str) -> Callable[..., None]:
            return lambda _, args, kwargs, output: calls[path].append(
                len(args) + len(kwargs) == 1 and all(isinstance(x, Tensor) for x in (*args, *kwargs.values(), output))
            )

        layers = {path: self._in_dtype.get_submodule(path) for path in calls}
        handles = [layer.register_forward_hook(hook(path), with_kwargs=True) for path, layer in layers.items()]
        try:
            if calls:
                self.run(example)
        finally:
            for handle in handles:
                handle.remove()
        return [path for path, found in calls.items() if found == [True]]

    def run_with_hooks_in_float64(
        self, example: Mapping[str, Any], paths: Iterable[str]
    ) -> tuple[list[Array] | None, dict[str, list[LayerCall]]]:
        model = self._double
        if model is None:
            return None, {}
        with _hooks(model, paths) as calls:
            return self.run_in_float64(example), calls

    def layer_in_float64(self, path: str, x: Array) -> Array | None:
        """Returns what the layer computes from ``x`` in float64; None for a float64 file."""
        model = self._double
        if model is None:
            return None
        wide = torch.from_numpy(x.astype(np.float64)) if is_float(x.dtype) else to_tensor(x)
        with torch.no_grad(), without_fused_attention():
            return to_numpy(model.get_submodule(path)(wide))

    def perturbed_runs(
        self, example: Mapping[str, Any], result: Sequence[Array], seeds: range | None = None
    ) -> list[list[Array]]:
        """Returns the outputs for inputs and weights with random last bits, a few times.

        Args:
            example, result: inputs, and what :meth:`run` returned for them.
            seeds: those of the runs; by default as many as ``result`` needs.
        """
        return [outputs for outputs, _ in self.perturbed_runs_with_hooks(example, result, (), seeds)]

    def perturbed_runs_with_hooks(
        self, example: Mapping[str, Any], result: Sequence[Array], paths: Iterable[str], seeds: range | None = None
    ) -> list[tuple[list[Array], dict[str, list[LayerCall]]]]:
        """As :meth:`perturbed_runs`, with the input and output of each layer in ``paths``."""
        shapes = [array.shape for array in result]
        found = []
        for seed in counted("PyTorch with random last bits", seeds or seeds_for(result)):
            try:
                (outputs, calls), dtypes = _perturbed(self._in_dtype, seed, self.run_with_hooks, example, paths)
            except InputError:  # the model refuses such inputs, above 1 for example
                continue
            self.computed_in = reduce(narrower, dtypes, self.computed_in or "float64")
            if [array.shape for array in outputs] == shapes:
                found.append((outputs, calls))
        return found

    def perturbed_runs_of_layer(self, path: str, call: LayerCall) -> list[Array]:
        """Returns what the layer computes from the input of ``call`` with random last bits, a few times."""
        layer, found = self._in_dtype.get_submodule(path), []
        for seed in seeds_for([call.y]):
            x = to_tensor(call.x)
            flip_last_bits([x], seed)
            with torch.no_grad(), without_fused_attention(), random_last_bits(layer, seed):
                found.append(to_numpy(with_absolute_sigmoids(seed, layer, x)[0]))
        return found

    def beyond_float16(self, example: Mapping[str, Any]) -> BeyondFloat16:
        """The weights, and the numbers in forward, that float16 does not have; none of a file in another dtype."""
        if self.dtype != torch.float16:
            return BeyondFloat16({}, [], [], set())
        model = self._in_dtype
        return used_by(unwrapped(self._model), model, lambda: self._run(model, example))

    def nondeterminism(self, example: Mapping[str, Any], result: Sequence[Array]) -> str:
        """Says that PyTorch does not return ``result`` again; empty if it does."""
        again = self.run(example)
        is_same = len(again) == len(result) and all(map(_is_same, result, again))
        return "" if is_same else NONDETERMINISTIC

    def defect_of_freezing(self, example: Mapping[str, Any], float64: Sequence[Array] | None) -> str:
        """Says where the frozen model, which runs for half precision, computes something else in float32.

        Args:
            example, float64: inputs, and what :meth:`run_in_float64` returned for them.
        """
        if self.dtype not in HALVES:
            return ""
        single = cast(example, torch.float32)
        model = self._single
        # Frozen in float32 too: a half model rounds what freezing computes of its weights, weight_norm's product too.
        frozen = self._run(frozen_copy(model, self._passthrough)[0], single)
        original = self._run(model, single)
        run = partial(self._run, model)
        perturbed = [_perturbed(model, seed, run, single)[0] for seed in seeds_for(original)]
        case = Case([], original, frozen).with_runs(float64, perturbed).with_allowed_error()
        names = [str(number) for number in range(len(frozen))]
        comparison = Comparison("the frozen model", "PyTorch", names, [Criterion()] * len(names))
        for parity in comparison.compare_outputs(case):
            if not parity.passed:
                return f"in float32 the frozen model does not compute what the model computes: output {parity}"
        return ""

    def _run_in_words(self, model: nn.Module, example: Mapping[str, Any]) -> list[Array]:
        """As :meth:`_run`; what the user's forward raises becomes an InputError."""
        try:
            return self._run(model, example)
        except (NnormExportError, OSError):  # an OSError says itself which file is missing
            raise
        except Exception as error:  # the user's forward runs here and may raise any exception; the message shows it
            name = type(self._model).__name__
            if "without overflow" in str(error) and (causes := self.beyond_float16(example).names(masks=True)):
                raise InputError(f"{name} does not run in float16. {about_float16(causes)}: {error}") from error
            raise InputError(
                f"{name} does not run on these inputs; give others, as its forward takes them: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _run(self, model: nn.Module, example: Mapping[str, Any]) -> list[Array]:
        """Returns the tensors that ``model`` returns. It gets copies of its inputs, because it may change them."""
        args, kwargs = unbind(model, _copied(example))
        with torch.no_grad(), without_fused_attention():
            returned = model(*args, **kwargs)
        arrays, names = [to_numpy(tensor) for tensor in tensors_in(returned)], tensor_names(returned)
        if sorted(names) != sorted(self._outputs):
            return arrays
        return [arrays[names.index(name)] for name in self._outputs]


def _copied(example: Mapping[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value, dict(example)
    )
    return copies


def _perturbed(
    model: nn.Module, seed: int, run: Callable[..., _T], example: Mapping[str, Any], *args: Any
) -> tuple[_T, set[str]]:
    """What ``run`` returns with random last bits in inputs and weights, and the dtypes that it computes in."""
    moved = _copied(example)
    flip_last_bits(tensors_in(moved), seed)
    with random_last_bits(model, seed):
        return with_absolute_sigmoids(seed, run, moved, *args)


@contextmanager
def _hooks(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[LayerCall]]]:
    """Inside the block, the calls of the layers in ``paths`` are recorded, by path."""
    calls: dict[str, list[LayerCall]] = {path: [] for path in paths}

    def record(path: str, given: tuple[Any, ...], output: Any) -> None:
        if not (given and isinstance(given[0], Tensor) and isinstance(output, Tensor)):
            raise InputError(
                f"layer {path} takes or returns something other than one tensor; name the layers inside it"
            )
        calls[path].append(LayerCall(to_numpy(given[0].clone()), to_numpy(output.clone())))

    def hook(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: record(path, (*args, *kwargs.values()), output)

    handles = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in calls]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def seeds_for(result: Sequence[Array]) -> range:
    """The seeds of the runs with random last bits that ``result`` needs."""
    has_many_rows = all(array.ndim > 0 and len(array) >= _MANY_ROWS for array in result)
    has_many_elements = any(array.size >= _ELEMENTS_FOR_ANOTHER_RUN for array in result)
    return range(1, 1 + (RUNS_OF_MANY_ROWS + has_many_elements if has_many_rows else RUNS_OF_FEW_ROWS))


_ROUNDINGS_OF_A_SUM = 16  # threads may add in another order


def _is_same(result: Array, again: Array) -> bool:
    """Whether two results on the same inputs differ by no more than sums in another order may differ."""
    if result.shape != again.shape or not is_float(result.dtype):
        return bool(np.array_equal(result, again))
    a, b = result.astype(np.float64), again.astype(np.float64)
    sizes = np.where(np.isfinite(a), np.abs(a), 0.0)
    allowed = min(_ROUNDINGS_OF_A_SUM * machine_epsilon(result.dtype.name), 1e-2) * np.maximum(
        sizes, scale_about(sizes)
    )
    return bool((distance(a, b) <= allowed).all())

"""Does a file compute what PyTorch computes? Runs both on the same inputs; ``judgement`` decides."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import InputError, NnormExportError
from nnorm_export.files.onnx_file import read
from nnorm_export.freezing import freeze
from nnorm_export.models.arguments import bind, cast, tensors_in, unbind
from nnorm_export.models.arrays import to_numpy
from nnorm_export.models.attention import without_fused_attention
from nnorm_export.models.copying import deepcopy
from nnorm_export.parity import certificates
from nnorm_export.parity.judgement import (
    Array,
    Criterion,
    OutputParity,
    ParityReport,
    criterion_text,
    is_float,
    judge,
    worst,
)
from nnorm_export.runtimes import DEFAULT_RUNTIME, Runner, load

HALVES = (torch.float16, torch.bfloat16)
Passthrough = Iterable[str | type[nn.Module]]
_Compared = tuple[Mapping[str, Any], list[Array], list[Array] | None]  # inputs, PyTorch's outputs, those in float64


def verify(
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    runtime: str | None = None,
    criterion: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    certificate: str | Path | None = None,
    passthrough: Passthrough = (),
) -> ParityReport:
    """Compares the file ``path`` with ``model`` on ``inputs``.

    Args:
        path: a file of any format that this package writes.
        model: the trained model; it is left untouched, and run in eval mode.
        inputs: what ``model`` takes, as a tuple, a dict of keyword inputs, or one tensor; left untouched too.
        runtime: see :func:`nnorm_export.load`.
        criterion: ``budget``, the default, or ``allclose``, at torch.testing's tolerances for the dtype unless others
            are given.
        rtol, atol: tolerances in place of the error budget; the one not given is 0.
        certificate: a folder for the certificate of a file that passes, for :func:`nnorm_export.replay`.
        passthrough: as for :func:`nnorm_export.freeze`, which half-precision files are compared through.

    Raises:
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
        InputError: the inputs do not fit the model or the file.
    """
    chosen = Criterion.of(criterion, rtol, atol)
    runner = load(path, runtime)
    report, (example, expected, truth) = _compare(runner, model, [bound(model, inputs)], chosen, passthrough)
    if certificate is not None and report:
        feed = [to_numpy(tensor) for tensor in tensors_in(example)]
        arrays = {"inputs": feed, "outputs": expected, "truth": truth}
        certificates.write(Path(certificate), Path(path), runner, report, arrays, chosen)
    return report


def bound(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """Inputs as :func:`verify` takes them, by the names of ``forward``'s parameters."""
    return bind(model, (), inputs) if isinstance(inputs, Mapping) else bind(model, inputs, None)


def observe(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    paths: Iterable[str],
    passthrough: Passthrough = (),
) -> dict[str, list[Tap]]:
    """What each layer in ``paths`` takes and gives on ``inputs`` in float32, call by call.

    Raises:
        InputError: the inputs do not fit the model, or a layer takes or gives something else than a tensor.
    """
    reference = PyTorchModel(model, torch.float32, passthrough)
    return reference.run_with_taps(cast(bound(model, inputs), torch.float32), paths)[1]


def compare_with_pytorch(
    path: Path,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    *,
    passthrough: Passthrough = (),
    runtime: str | None = None,
) -> ParityReport:
    """As :func:`verify`, over several sets of bound inputs; the worst of them is reported."""
    return _compare(load(path, runtime or runtime_for(path)), model, examples, Criterion(), passthrough)[0]


def runtime_for(path: Path) -> str:
    """Of an ONNX file: ONNX Runtime where it is installed, else the reference evaluator that comes with onnx.

    bfloat16 and float64 go to the reference evaluator too: ONNX Runtime's CPU provider has no convolutions for them.
    """
    has_onnxruntime = importlib.util.find_spec("onnxruntime") is not None
    unsupported = read(path).holds(onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    return DEFAULT_RUNTIME if has_onnxruntime and not unsupported else "reference"


def _compare(
    runner: Runner,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    criterion: Criterion,
    passthrough: Passthrough,
) -> tuple[ParityReport, _Compared]:
    """The report over ``examples``, at least one, and what was compared in the first of them."""
    pytorch = PyTorchModel(model, dtype_of(runner), passthrough)
    compared: list[list[OutputParity]] = []
    first: list[_Compared] = []
    for example in (as_taken(runner, example) for example in examples):
        actual = runner(*[to_numpy(tensor) for tensor in tensors_in(example)])
        expected, truth = pytorch.run(example), pytorch.run_in_float64(example)
        first = first or [(example, expected, truth)]
        if len(actual) != len(expected):
            raise NnormExportError(f"the file has {len(actual)} outputs, the model {len(expected)}")
        truths: Sequence[Array | None] = truth or [None] * len(actual)
        quartets = zip(runner.outputs, actual, expected, truths, strict=True)
        compared.append([judge(info.name, a, e, t, criterion) for info, a, e, t in quartets])
    outputs = [worst(parts) for parts in zip(*compared, strict=True)]
    if defect := pytorch.defect(*first[0]):
        outputs = [output.failed(defect) for output in outputs]
    text = criterion_text(outputs, criterion, is_double=pytorch.dtype == torch.float64)
    return ParityReport(runner.runtime, text, outputs, runner.implementations), first[0]


class Tap(NamedTuple):
    """What a layer took and gave in one call."""

    x: Array
    y: Array


class PyTorchModel:
    """The user's model, to be run in the file's dtype and in float64.

    Half precision is run through the frozen model, because training-time code promotes half inputs; that the frozen
    model computes what the user's does is then checked at full precision (:meth:`defect`).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, passthrough: Passthrough) -> None:
        self.dtype = dtype
        self._original = _eval_copy(model)
        self._frozen = freeze(model, passthrough=passthrough) if dtype in HALVES else None
        self._in_dtype = _eval_copy(self._original if self._frozen is None else self._frozen)
        # A model of several dtypes is left as it is where the file's is among them.
        if dtype is not None and dtype not in {p.dtype for p in self._in_dtype.parameters()}:
            self._in_dtype.to(dtype)
        # Nothing is truer than float64, so a float64 file has no budget.
        self._double = None if dtype == torch.float64 else _eval_copy(model).to(torch.float64)

    def run(self, example: Mapping[str, Any]) -> list[Array]:
        """Raises InputError where the model does not run on the example."""
        try:
            return _run(self._in_dtype, example)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{type(self._original).__name__} does not run on these inputs: {error}") from error

    def run_in_float64(self, example: Mapping[str, Any]) -> list[Array] | None:
        try:
            return None if self._double is None else _run(self._double, cast(example, torch.float64))
        except RuntimeError:  # a model with float32 written into its code
            return None

    def run_with_taps(
        self, example: Mapping[str, Any], paths: Iterable[str]
    ) -> tuple[list[Array], dict[str, list[Tap]]]:
        """:meth:`run`, and what each layer in ``paths`` took and gave, call by call.

        Raises:
            InputError: a layer takes or gives something else than a tensor.
        """
        with _taps(self._in_dtype, paths) as taps:
            return self.run(example), taps

    def run_with_taps_in_float64(
        self, example: Mapping[str, Any], paths: Iterable[str]
    ) -> tuple[list[Array] | None, dict[str, list[Tap]]]:
        if self._double is None:
            return None, {}
        with _taps(self._double, paths) as taps:
            return self.run_in_float64(example), taps

    def layer_in_float64(self, path: str, x: Array) -> Array | None:
        """What the layer makes of ``x``, in float64."""
        if self._double is None:
            return None
        wide = torch.from_numpy(x.astype(np.float64))
        with torch.no_grad(), without_fused_attention():
            return to_numpy(self._double.get_submodule(path)(wide))

    def defect(self, example: Mapping[str, Any], result: list[Array], truth: list[Array] | None) -> str:
        """What makes a comparison with this model, which gave ``result``, worthless; or nothing."""
        if any(not np.allclose(a, b, rtol=1e-2, equal_nan=True) for a, b in _floats(result, self.run(example))):
            return "PyTorch gives another result each time: F.dropout without training=self.training, for example"
        if self._frozen is None:
            return ""
        single = cast(example, torch.float32)
        frozen, original = (_run(model.float(), single) for model in (self._frozen, self._original))
        truths: Sequence[Array | None] = truth or [None] * len(frozen)
        for number, (f, o, t) in enumerate(zip(frozen, original, truths, strict=True)):
            parity = judge(str(number), f, o, t)
            if not parity.passed:
                return f"in float32 already, the frozen model does not compute what the model does: output {parity}"
        return ""


@contextmanager
def _taps(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[Tap]]]:
    taps: dict[str, list[Tap]] = {path: [] for path in paths}

    def keep(path: str, given: tuple[Any, ...], output: Any) -> None:
        if not (given and isinstance(given[0], Tensor) and isinstance(output, Tensor)):
            raise InputError(f"layer {path} takes or gives something else than one tensor; name the layers in it")
        taps[path].append(Tap(to_numpy(given[0].clone()), to_numpy(output.clone())))

    def hook(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: keep(path, (*args, *kwargs.values()), output)

    handles = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in taps]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def _eval_copy(model: nn.Module) -> nn.Module:
    duplicate = deepcopy(model)
    # The module of an exported program has no modes to switch, and says so with an exception.
    return duplicate if isinstance(duplicate, torch.fx.GraphModule) else duplicate.eval()


def dtype_of(runner: Runner) -> torch.dtype | None:
    floats = [info.dtype for info in (*runner.outputs, *runner.inputs) if is_float(info.dtype)]
    return getattr(torch, floats[0].name) if floats else None


def as_taken(runner: Runner, example: Mapping[str, Any]) -> dict[str, Any]:
    """Bound inputs, the floating-point tensors among them in the dtype that the file takes them in."""
    kinds = iter(info.dtype for info in runner.inputs)

    def as_taken(value: Any) -> Any:
        kind = next(kinds, None) if isinstance(value, Tensor) else None
        if kind is None or not (is_float(kind) and value.is_floating_point()):
            return value
        return value.to(getattr(torch, kind.name))

    taken: dict[str, Any] = pytree.tree_map(as_taken, dict(example))
    return taken


def _run(model: nn.Module, example: Mapping[str, Any]) -> list[Array]:
    """The tensors among what ``model`` returns; it gets copies of its inputs, which it may change in place."""
    copies = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, dict(example))
    args, kwargs = unbind(model, copies)
    with torch.no_grad(), without_fused_attention():
        return [to_numpy(tensor) for tensor in tensors_in(model(*args, **kwargs))]


def _floats(left: list[Array], right: list[Array]) -> list[tuple[Array, Array]]:
    pairs = zip(left, right, strict=True)
    return [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if is_float(a.dtype)]

"""The user's model, run in the dtype of a file and in float64, and what its layers take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import InputError, NnormExportError
from nnorm_export.freezing import freeze
from nnorm_export.models.arguments import bind, cast, in_order, tensors_in, to_numpy, unbind
from nnorm_export.models.modules import eval_copy, without_fused_attention
from nnorm_export.parity.judgement import Array, is_float, judge
from nnorm_export.runtimes import Runner

HALVES = (torch.float16, torch.bfloat16)
Passthrough = Iterable[str | type[nn.Module]]


def bound(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """Returns ``inputs``, as :func:`nnorm_export.verify` takes them, by the names of ``forward``'s parameters."""
    return bind(model, (), inputs) if isinstance(inputs, Mapping) else bind(model, inputs, None)


def observe(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    paths: Iterable[str],
    passthrough: Passthrough = (),
) -> dict[str, list[Tap]]:
    """Returns the input and output of each layer in ``paths`` on ``inputs`` in float32, call by call.

    Raises:
        InputError: the inputs do not fit the model, or a layer takes or returns something other than one tensor.
    """
    reference = PyTorchModel(model, torch.float32, passthrough)
    return reference.run_with_taps(cast(bound(model, inputs), torch.float32), paths)[1]


class Tap(NamedTuple):
    """The input and output of a layer in one call."""

    x: Array
    y: Array


class PyTorchModel:
    """The user's model, which can be run in the file's dtype and in float64.

    In half precision the frozen model runs in its place, because training-time code promotes half inputs to float32.
    :meth:`defect` then checks in float32 that the frozen model computes what the user's model computes.

    Args:
        model: the user's model, which is copied.
        dtype: the file's floating-point dtype; None if it has none.
        passthrough: as for :func:`nnorm_export.freeze`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, passthrough: Passthrough) -> None:
        self.dtype = dtype
        self._original = eval_copy(model)
        self._frozen = freeze(model, passthrough=passthrough) if dtype in HALVES else None
        self._in_dtype = eval_copy(self._original if self._frozen is None else self._frozen)
        # A model of several dtypes is unchanged if the file's dtype is one of them.
        if dtype is not None and dtype not in {p.dtype for p in self._in_dtype.parameters()}:
            self._in_dtype.to(dtype)
        # PyTorch computes nothing more exactly than float64, so a float64 file has no budget.
        self._double = None if dtype == torch.float64 else eval_copy(model).to(torch.float64)

    def run(self, example: Mapping[str, Any]) -> list[Array]:
        """Returns the outputs in the file's dtype.

        Raises:
            InputError: the model does not run on the example.
        """
        try:
            return _run(self._in_dtype, example)
        except (NnormExportError, OSError):  # an OSError says itself which file is missing
            raise
        except Exception as error:  # the user's code may raise anything
            name = type(self._original).__name__
            raise InputError(
                f"{name} does not run on these inputs; give others, as its forward takes them: "
                f"{type(error).__name__}: {error}"
            ) from error

    def run_in_float64(self, example: Mapping[str, Any]) -> list[Array] | None:
        """Returns the outputs in float64; None for a float64 file, or if the model does not run in float64."""
        try:
            return None if self._double is None else _run(self._double, cast(example, torch.float64))
        except NnormExportError:
            raise
        except Exception:  # the user's code may raise anything in float64: it casts to float32, or asserts a dtype
            return None

    def run_with_taps(
        self, example: Mapping[str, Any], paths: Iterable[str]
    ) -> tuple[list[Array], dict[str, list[Tap]]]:
        """Returns the outputs, as :meth:`run`, and the input and output of each layer in ``paths``, call by call.

        Raises:
            InputError: a layer takes or returns something other than one tensor.
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
        """Returns what the layer computes from ``x`` in float64; None for a float64 file."""
        if self._double is None:
            return None
        wide = torch.from_numpy(x.astype(np.float64))
        with torch.no_grad(), without_fused_attention():
            return to_numpy(self._double.get_submodule(path)(wide))

    def defect(self, example: Mapping[str, Any], result: Sequence[Array], truth: Sequence[Array] | None) -> str:
        """Returns why a comparison with this model is meaningless, empty if it is not.

        Args:
            example, result, truth: inputs, and what :meth:`run` and :meth:`run_in_float64` returned for them.
        """
        if any(not np.allclose(a, b, rtol=1e-2, equal_nan=True) for a, b in _floats(result, self.run(example))):
            return "PyTorch returns another result each time; look for F.dropout without training=self.training"
        if self._frozen is None:
            return ""
        single = cast(example, torch.float32)
        frozen, original = (_run(model.float(), single) for model in (self._frozen, self._original))
        truths: Sequence[Array | None] = truth or [None] * len(frozen)
        for number, (f, o, t) in enumerate(zip(frozen, original, truths, strict=True)):
            parity = judge(str(number), f, o, t)
            if not parity.passed:
                return f"in float32 the frozen model does not compute what the model computes: output {parity}"
        return ""


@contextmanager
def _taps(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[Tap]]]:
    taps: dict[str, list[Tap]] = {path: [] for path in paths}

    def keep(path: str, given: tuple[Any, ...], output: Any) -> None:
        if not (given and isinstance(given[0], Tensor) and isinstance(output, Tensor)):
            raise InputError(
                f"layer {path} takes or returns something other than one tensor; name the layers inside it"
            )
        taps[path].append(Tap(to_numpy(given[0].clone()), to_numpy(output.clone())))

    def hook(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs, output: keep(path, (*args, *kwargs.values()), output)

    handles = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in taps]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def dtype_of(runner: Runner) -> torch.dtype | None:
    """The dtype of the first floating-point output or input; None if there is none."""
    floats = [info.dtype for info in (*runner.outputs, *runner.inputs) if is_float(info.dtype)]
    return getattr(torch, floats[0].name) if floats else None


def as_taken(runner: Runner, example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bound inputs in the file's order, their floating-point tensors cast to the dtypes that the file takes."""
    example = in_order(dict(example), [info.name for info in runner.inputs])
    dtypes = iter(info.dtype for info in runner.inputs)

    def converted(value: Any) -> Any:
        dtype = next(dtypes, None) if isinstance(value, Tensor) else None
        if dtype is None or not (is_float(dtype) and value.is_floating_point()):
            return value
        return value.to(getattr(torch, dtype.name))

    taken: dict[str, Any] = pytree.tree_map(converted, dict(example))
    return taken


def _run(model: nn.Module, example: Mapping[str, Any]) -> list[Array]:
    """Returns the tensors that ``model`` returns. It gets copies of its inputs, because it may change them in place."""
    copies = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, dict(example))
    args, kwargs = unbind(model, copies)
    with torch.no_grad(), without_fused_attention():
        return [to_numpy(tensor) for tensor in tensors_in(model(*args, **kwargs))]


def _floats(left: Sequence[Array], right: Sequence[Array]) -> list[tuple[Array, Array]]:
    pairs = zip(left, right, strict=True)
    return [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if is_float(a.dtype)]

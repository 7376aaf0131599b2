"""Does a file compute what PyTorch computes? Metrics per output, judged by an error budget.

The truth is the user's own model run in float64. PyTorch's own float32 (or float16, bfloat16) error against it is the
yardstick of what the dtype can do on this model and these inputs: a runtime passes if its error is at most
:data:`BUDGET` times that. With explicit tolerances the criterion is |file − PyTorch| ≤ atol + rtol·|PyTorch|.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export.attention import without_fused_attention
from nnorm_export.errors import NnormExportError
from nnorm_export.exporting.arguments import bind, cast, unbind
from nnorm_export.freezing import freeze
from nnorm_export.runtimes import DEFAULT_RUNTIME, Runner, load
from nnorm_export.runtimes.base import Array

BUDGET = 10.0

# PyTorch's own table (torch.testing.assert_close): rtol, atol.
TOLERANCES = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
}


@dataclass(frozen=True)
class OutputParity:
    """One output of the file against PyTorch.

    Attributes:
        max_abs_diff: max |file − PyTorch|.
        max_rel_diff: max |file − PyTorch| / |PyTorch|, over elements that are not 0.
        budget_share: the file's error against float64, in parts of what it may be; passes up to 1. None where the
            model cannot be run in float64.
        top1_agreement: share of rows with the same greatest entry, for a two-dimensional floating-point output.
        rows: how many rows were compared.
    """

    name: str
    passed: bool
    max_abs_diff: float
    max_rel_diff: float
    budget_share: float | None
    top1_agreement: float | None
    rows: int
    dtype: str


@dataclass(frozen=True)
class ParityReport:
    """The outcome of a comparison; true when it passes.

    Attributes:
        runtime: what ran the file, ``onnxruntime`` for example.
        criterion: ``budget`` or ``allclose``, with its numbers.
        implementations: node -> ``kernel``, ``body`` or ``plugin``.
    """

    runtime: str
    criterion: str
    outputs: list[OutputParity]
    implementations: dict[str, str]

    def __bool__(self) -> bool:
        return all(output.passed for output in self.outputs)

    def __str__(self) -> str:
        lines = []
        for output in self.outputs:
            share = "" if output.budget_share is None else f", {output.budget_share:.0%} of the error budget"
            top1 = "" if output.top1_agreement is None else f", top-1 agreement {output.top1_agreement:.2%}"
            lines.append(
                f"{'equal' if output.passed else 'DIFFERENT'} in {self.runtime}: {output.name} max abs "
                f"{output.max_abs_diff:.2e}, max rel {output.max_rel_diff:.2e}{share}{top1}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {"passed": bool(self), **asdict(self)}


def verify(
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    runtime: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    passthrough: Iterable[str | type[nn.Module]] = (),
) -> ParityReport:
    """Compares the file ``path`` with ``model`` on ``inputs``.

    Args:
        path: a file that :func:`nnorm_export.export` wrote.
        model: the trained model; it is left untouched, and run in eval mode.
        inputs: what ``model`` takes, as a tuple, a dict of keyword inputs, or one tensor.
        runtime: see :func:`nnorm_export.load`.
        rtol, atol: tolerances in place of the error budget; the one not given is 0.
        passthrough: as for :func:`nnorm_export.freeze`, which half-precision files are compared through.

    Raises:
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
        InputError: the inputs do not fit the file.
    """
    runner = load(path, runtime)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, None)
    return _compare(runner, model, [bind(model, args, kwargs)], rtol, atol, passthrough)


def compare_with_pytorch(
    path: Path,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    *,
    passthrough: Iterable[str | type[nn.Module]] = (),
) -> ParityReport:
    """As :func:`verify`, over several sets of bound inputs; the worst of them is reported."""
    return _compare(load(path, runtime_for(examples)), model, examples, None, None, passthrough)


def runtime_for(examples: Sequence[Mapping[str, Any]]) -> str:
    """ONNX Runtime where it is installed, else the reference evaluator that comes with onnx.

    bfloat16 and float64 go to the reference evaluator too: ONNX Runtime's CPU provider has no convolutions for them.
    """
    leaves = pytree.tree_leaves([dict(example) for example in examples])
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
    has_onnxruntime = importlib.util.find_spec("onnxruntime") is not None
    return "reference" if not has_onnxruntime or dtypes & {torch.bfloat16, torch.float64} else DEFAULT_RUNTIME


def _compare(
    runner: Runner,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    rtol: float | None,
    atol: float | None,
    passthrough: Iterable[str | type[nn.Module]],
) -> ParityReport:
    floats = [info.dtype for info in (*runner.inputs, *runner.outputs) if _is_float(info.dtype)]
    dtype = getattr(torch, floats[0].name) if floats else None
    pytorch = _eval_copy(model, dtype, passthrough)
    double = (
        _eval_copy(model, torch.float64, passthrough) if dtype != torch.float64 else None
    )  # nothing truer than float64
    collected: list[list[OutputParity]] = []
    for example in examples:
        in_dtype = _cast(example, dtype)
        actual = runner(*[_to_numpy(leaf) for leaf in pytree.tree_leaves(in_dtype) if isinstance(leaf, Tensor)])
        expected = _run(pytorch, in_dtype)
        truth = _run_if_possible(double, _cast(example, torch.float64))
        if len(actual) != len(expected):
            raise NnormExportError(f"the file has {len(actual)} outputs, the model {len(expected)}")
        truths: Sequence[Array | None] = truth or [None] * len(actual)
        quartets = zip(runner.outputs, actual, expected, truths, strict=True)
        collected.append([_judge(info.name, a, e, t, rtol, atol) for info, a, e, t in quartets])
    outputs = [_worst(parts) for parts in zip(*collected, strict=True)]
    explicit = rtol is not None or atol is not None
    if explicit:
        criterion = f"allclose, rtol {rtol or 0:g}, atol {atol or 0:g}"
    elif all(output.budget_share is not None for output in outputs):
        criterion = f"budget: at most {BUDGET:g} times PyTorch's own error against float64"
    else:
        reason = "the file is in float64" if dtype == torch.float64 else "the model does not run in float64"
        criterion = f"allclose at {BUDGET:g} times torch.testing's tolerances, because {reason}"
    return ParityReport(runner.runtime, criterion, outputs, runner.implementations)


def _eval_copy(model: nn.Module, dtype: torch.dtype | None, passthrough: Iterable[str | type[nn.Module]]) -> nn.Module:
    """A copy to run in ``dtype``: the user's own code, but for half precision, which training-time code promotes."""
    if dtype in (torch.float16, torch.bfloat16):
        return freeze(model, passthrough=passthrough).to(dtype)
    duplicate = copy.deepcopy(model).to(dtype) if dtype is not None else copy.deepcopy(model)
    # The module of an exported program has no modes to switch, and says so with an exception.
    return duplicate if isinstance(duplicate, torch.fx.GraphModule) else duplicate.eval()


def _cast(example: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Bound inputs as tensors, the floating-point ones in ``dtype``."""

    def to_tensor(value: Any) -> Any:
        return torch.as_tensor(value) if isinstance(value, np.ndarray) else value

    tensors: dict[str, Any] = cast(pytree.tree_map(to_tensor, dict(example)), dtype)
    return tensors


def _run(model: nn.Module, example: Mapping[str, Any]) -> list[Array]:
    args, kwargs = unbind(model, example)
    with torch.no_grad(), without_fused_attention():
        result = model(*args, **kwargs)
    return [_to_numpy(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _run_if_possible(model: nn.Module | None, example: Mapping[str, Any]) -> list[Array] | None:
    try:
        return None if model is None else _run(model, example)
    except RuntimeError:  # a model with float32 written into its code cannot run in float64
        return None


def _to_numpy(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in TOLERANCES


def _judge(
    name: str, actual: Array, expected: Array, truth: Array | None, rtol: float | None, atol: float | None
) -> OutputParity:
    if actual.shape != expected.shape:
        raise NnormExportError(f"output {name} has shape {list(actual.shape)}, PyTorch's {list(expected.shape)}")
    rows = actual.shape[0] if actual.ndim else 1
    dtype = actual.dtype.name
    if not _is_float(actual.dtype):
        equal = bool((actual == expected).all())
        differing = float((actual != expected).sum())
        return OutputParity(name, equal, differing, differing, None, None, rows, dtype)
    wide, expected_wide = actual.astype(np.float64), expected.astype(np.float64)
    difference = _distance(wide, expected_wide)
    nonzero = np.isfinite(expected_wide) & (expected_wide != 0)
    share = None if truth is None else _budget_share(wide, expected_wide, truth, actual.dtype)
    if rtol is not None or atol is not None:
        passed = bool((difference <= (atol or 0.0) + (rtol or 0.0) * np.abs(expected_wide)).all())
    elif share is not None:
        passed = share <= 1.0
    else:
        dtype_rtol, dtype_atol = (BUDGET * tolerance for tolerance in TOLERANCES[dtype])
        passed = bool((difference <= dtype_atol + dtype_rtol * np.abs(expected_wide)).all())
    return OutputParity(
        name,
        passed,
        float(difference.max(initial=0.0)),
        float((difference[nonzero] / np.abs(expected_wide[nonzero])).max(initial=0.0)),
        share,
        _top1_agreement(wide, expected_wide),
        rows,
        dtype,
    )


def _budget_share(actual: Array, expected: Array, truth: Array, dtype: np.dtype[Any]) -> float:
    """error of the file / (BUDGET · error of PyTorch), the latter at least one rounding of the greatest entry."""
    finite = np.abs(truth[np.isfinite(truth)])
    rounding = float(torch.finfo(getattr(torch, dtype.name)).eps) * float(finite.max(initial=0.0))
    yardstick = max(float(_distance(expected, truth).max(initial=0.0)), rounding)
    error = float(_distance(actual, truth).max(initial=0.0))
    if error == 0.0:
        return 0.0
    return error / (BUDGET * yardstick) if yardstick > 0.0 else float("inf")


def _distance(a: Array, b: Array) -> Array:
    """|a − b|; 0 where both are NaN or the same infinity, infinite where one is NaN and the other is not."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    result: Array = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
    return result


def _top1_agreement(actual: Array, expected: Array) -> float | None:
    if actual.ndim != 2 or actual.shape[1] < 2 or actual.shape[0] == 0:
        return None
    return float((actual.argmax(1) == expected.argmax(1)).mean())


def _worst(parts: Sequence[OutputParity]) -> OutputParity:
    """One line for an output that was compared on several inputs."""
    shares = [part.budget_share for part in parts if part.budget_share is not None]
    agreements = [(part.top1_agreement, part.rows) for part in parts if part.top1_agreement is not None]
    rows = sum(part.rows for part in parts)
    return OutputParity(
        name=parts[0].name,
        passed=all(part.passed for part in parts),
        max_abs_diff=max(part.max_abs_diff for part in parts),
        max_rel_diff=max(part.max_rel_diff for part in parts),
        budget_share=max(shares) if len(shares) == len(parts) else None,
        top1_agreement=sum(a * n for a, n in agreements) / sum(n for _, n in agreements) if agreements else None,
        rows=rows,
        dtype=parts[0].dtype,
    )

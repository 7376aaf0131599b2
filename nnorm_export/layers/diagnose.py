"""diagnose(): is λ̂ of every layer sound on given batches, and what does ψ do to their distributions?"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.errors import InputError
from nnorm_export.layers.batch import _BatchNormalNorm
from nnorm_export.layers.group import GroupNormalNorm, _InstanceNormalNorm
from nnorm_export.layers.layer import LayerNormalNorm
from nnorm_export.layers.likelihood import exact_lmbda, skewness_and_kurtosis
from nnorm_export.layers.warm_start import _run
from nnorm_export.mathematics import curvature_at_one, gaussianize, standardize_over
from nnorm_export.models.modules import modes_kept
from nnorm_export.reports import Report

_CHUNK = 2**21  # values that are measured at a time; about twenty arrays of this many float64
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_FEW = 16  # the λ̂ of so many normal values has a standard deviation of 0.36
_FAR = (-1.0, 3.0)  # one of the exponents λ and 2 − λ is above 3 outside

_Kind = _BatchNormalNorm | LayerNormalNorm | GroupNormalNorm | _InstanceNormalNorm
_COLUMNS = (
    "layer",
    "class",
    "sets × values",
    "L″ ≤ 0",
    "λ̂ (min, quartiles, max)",
    "exact λ",
    "|skewness|",
    "|kurtosis|",
)


@dataclass(frozen=True)
class LayerDiagnosis(Report):
    """What one layer did with the batches; shares are of all its sample sets: channels, rows or groups.

    Attributes:
        path, layer: its path in the model, and the name of its class.
        sets, values: the number of sample sets in all batches, and of the values of the smallest.
        not_finite: the share of sets with a value or a variance that is not finite. Like sets of equal values, they
            count in no other number.
        equal: the share of sets whose values are all equal.
        other_variance: the share of sets whose h has a variance below ½ or above 3/2, where L′ and L″ take it for 1:
            σ² is below ε, or ``standardize=False`` got an input on another scale.
        no_curvature, no_damped_curvature: the shares of sets with L″ ≤ 0 and with L″ + δ ≤ 0 (NN eq. 5–15), where the
            Newton step leads away from the minimum.
        at_a_bound: the share of sets whose λ̂ is at a bound of ``lmbda_range`` or, in the paper's form, at 1 ± 16.
        lmbda: least, quartiles and greatest of λ̂, the layer's one step. Empty if no set counts.
        exact: the same of the λ that minimizes L (:mod:`nnorm_export.layers.likelihood`), which has no δ.
        skewness, kurtosis: the medians of |g₁| and of |g₂|, the sample skewness and excess kurtosis (Joanes and Gill
            1998), of h and of ψ(h; λ̂). Both are 0 for a normal distribution. Empty if no set counts.
        advice: what is degenerate, and what to do.
    """

    path: str
    layer: str
    sets: int
    values: int
    not_finite: float
    equal: float
    other_variance: float
    no_curvature: float
    no_damped_curvature: float
    at_a_bound: float
    lmbda: tuple[float, ...]
    exact: tuple[float, ...]
    skewness: tuple[float, ...]
    kurtosis: tuple[float, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis(Report):
    """The layers in the order of the model; ``str`` is a table, and a line for each advice.

    Attributes:
        layers: the layers that ran.
        not_run: the paths of the layers that no batch reached.
    """

    layers: tuple[LayerDiagnosis, ...]
    not_run: tuple[str, ...]

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_cells(layer) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"{layer.path or layer.layer}: {text}" for layer in self.layers for text in layer.advice]
        return "\n".join([*lines, *(f"{path}: no batch reached it" for path in self.not_run)])

    def to_csv(self, path: str | Path) -> None:
        """Write a line for each layer, with the numbers of :class:`LayerDiagnosis`."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = [(field.name, _PARTS.get(field.name)) for field in fields(LayerDiagnosis)]
            writer.writerow([f"{name}_{part}" if part else name for name, parts in columns for part in parts or ("",)])
            for layer in self.layers:
                writer.writerow([cell for name, parts in columns for cell in _csv_cells(getattr(layer, name), parts)])


_SPREAD = ("least", "quartile_1", "median", "quartile_3", "greatest")
_PARTS = {"lmbda": _SPREAD, "exact": _SPREAD, "skewness": ("before", "after"), "kurtosis": ("before", "after")}


def _csv_cells(value: Any, parts: tuple[str, ...] | None) -> tuple[Any, ...]:
    if parts is not None:
        return value or ("",) * len(parts)
    return ("; ".join(value),) if isinstance(value, tuple) else (value,)


def _cells(layer: LayerDiagnosis) -> tuple[str, ...]:
    spreads = (" ".join(f"{value:.2f}" for value in values) or "–" for values in (layer.lmbda, layer.exact))
    changes = (" → ".join(f"{value:.2f}" for value in values) or "–" for values in (layer.skewness, layer.kurtosis))
    size = f"{layer.sets} × {layer.values}"
    return (layer.path, layer.layer, size, f"{layer.no_curvature:.1%}", *spreads, *changes)


def diagnose(model: nn.Module, batches: Iterable[Any]) -> Diagnosis:
    """Measure λ̂ of every normality normalization of ``model`` on ``batches``, and how normal ψ makes the values.

    The normality layers compute with the statistics of each batch, as in training but without noise; the rest of the
    model is in eval mode. In float64, each sample set of each batch gets its λ̂, L″ and the λ of the greatest
    likelihood, which takes about ten times a forward pass. The model, its buffers and the states of torch's random
    number generators are as before afterwards.

    Args:
        model: with :class:`~nnorm_export.layers.NormalNorm` layers.
        batches: as for :func:`~nnorm_export.layers.estimate_statistics`: training batches, of the size that training
            uses, on the model's device.

    Raises:
        ValueError: ``batches`` is a tensor or empty, or the model has no normality normalization.
    """
    if isinstance(batches, Tensor):
        raise InputError("diagnose takes batches, got a tensor; write [tensor] for one batch")
    layers: dict[str, _Kind] = {path: layer for path, layer in model.named_modules() if isinstance(layer, _Kind)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no normality normalization; convert_normal_norm puts them in")
    measured: dict[str, list[_Sets]] = {path: [] for path in layers}
    ran_any = False
    with _with_batch_statistics(model, layers, measured), torch.no_grad():
        for batch in batches:
            _run(model, batch)
            ran_any = True
    if not ran_any:
        raise ValueError("batches is empty; give a few, for example itertools.islice(loader, 4)")
    ran = {path: calls for path, calls in measured.items() if calls}
    return Diagnosis(
        tuple(_summary(path, layers[path], calls) for path, calls in ran.items()),
        tuple(path for path in layers if path not in ran),
    )


@contextmanager
def _with_batch_statistics(
    model: nn.Module, layers: dict[str, _Kind], measured: dict[str, list[_Sets]]
) -> Iterator[None]:
    """Only ``layers`` are in training mode, without noise; ``measured`` gets what each call of them has."""
    settings = [
        (layer, name, getattr(layer, name)) for layer in layers.values() for name in _OFF if hasattr(layer, name)
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    hooks = []
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(sorted(devices, key=str)), modes_kept(model):
        try:
            model.eval()
            for path, layer in layers.items():
                layer.train()
                hooks.append(layer.register_forward_pre_hook(_measuring(measured[path]), with_kwargs=True))
            for layer, name, _ in settings:
                setattr(layer, name, _OFF[name])
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer, name, value in settings:
                setattr(layer, name, value)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


_OFF = {"noise_train": 0.0, "track_running_stats": False}


@dataclass(frozen=True)
class _Sets:
    """Of each sample set of a call: whether it is finite and its values differ. The rest is of those that count."""

    values: int
    finite: Tensor
    differs: Tensor
    variance: Tensor  # of h
    curvature: Tensor
    lmbda: Tensor
    at_a_bound: Tensor
    exact: Tensor
    before: tuple[Tensor, Tensor]  # skewness and kurtosis
    after: tuple[Tensor, Tensor]


def _measuring(measured: list[_Sets]) -> Any:
    def hook(layer: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if not x.is_nested and x.numel() > 0:  # a LayerNormalNorm calls itself for each sample of a nested tensor
            # MPS has no float64.
            sets = _sample_sets(layer, x.detach().to("cpu") if x.device.type == "mps" else x.detach())
            for chunk in torch.split(sets, max(1, _CHUNK // sets.shape[1])):
                measured.append(_measure(layer, chunk.double()))

    return hook


def _sample_sets(layer: _Kind, x: Tensor) -> Tensor:
    """x as [sets, values]: what the layer has one λ̂ for."""
    if isinstance(layer, _BatchNormalNorm):
        return x.transpose(0, 1).flatten(1)
    if isinstance(layer, GroupNormalNorm):
        return x.reshape(x.shape[0] * layer.num_groups, -1)
    axes = len(layer.normalized_shape) if isinstance(layer, LayerNormalNorm) else layer._spatial_ndim
    flat = x.flatten(-axes)
    return flat.reshape(-1, flat.shape[-1])


def _measure(layer: _Kind, x: Tensor) -> _Sets:
    variance = x.var(1, correction=0)
    finite = variance.isfinite()
    differs = (x.amin(1) != x.amax(1)) & (variance > torch.finfo(x.dtype).tiny)
    x = x[finite & differs]
    h = standardize_over(x, [1], layer.eps) if getattr(layer, "standardize", True) else x
    step = (layer.order, layer.alpha) if isinstance(layer, _BatchNormalNorm) else (2, 1.0)
    bounds = layer._lmbda_bounds()
    psi, lmbda = gaussianize(h, [1], layer.delta, *step, bounds)
    lmbda = lmbda.flatten()
    return _Sets(
        values=x.shape[1],
        finite=finite,
        differs=differs,
        variance=h.var(1, correction=0),
        curvature=curvature_at_one(h, [1]).flatten(),
        lmbda=lmbda,
        at_a_bound=(lmbda == bounds[0]) | (lmbda == bounds[1]) if bounds else torch.zeros_like(lmbda, dtype=torch.bool),
        exact=exact_lmbda(h),
        before=skewness_and_kurtosis(h),
        after=skewness_and_kurtosis(psi),
    )


def _summary(path: str, layer: _Kind, calls: list[_Sets]) -> LayerDiagnosis:
    names = ("finite", "differs", "variance", "curvature", "lmbda", "at_a_bound", "exact")
    finite, differs, variance, curvature, lmbda, at_a_bound, exact = (
        torch.cat([getattr(call, name) for call in calls]) for name in names
    )
    sets = finite.numel()

    def share(chosen: Tensor) -> float:
        return int(chosen.sum()) / sets

    facts: dict[str, Any] = {
        "path": path,
        "layer": type(layer).__name__,
        "sets": sets,
        "values": min(call.values for call in calls),
        "not_finite": share(~finite),
        "equal": share(finite & ~differs),
        "other_variance": share((variance - 1.0).abs() > 0.5),
        "no_curvature": share(curvature <= 0.0),
        "no_damped_curvature": share(curvature + layer.delta <= 0.0),
        "at_a_bound": share(at_a_bound),
        "lmbda": _spread(lmbda),
        "exact": _spread(exact),
        "skewness": _medians([(call.before[0], call.after[0]) for call in calls]),
        "kurtosis": _medians([(call.before[1], call.after[1]) for call in calls]),
    }
    return LayerDiagnosis(**facts, advice=tuple(_advice(layer, facts)))


def _spread(values: Tensor) -> tuple[float, ...]:
    ordered = values.sort().values  # torch.quantile takes 2²⁴ elements at the most
    return tuple(float(ordered[round(q * (ordered.numel() - 1))]) for q in _QUANTILES) if ordered.numel() else ()


def _medians(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, ...]:
    before, after = (torch.cat(each).abs() for each in zip(*pairs, strict=True))
    return (float(before.median()), float(after.median())) if before.numel() else ()


def _advice(layer: _Kind, facts: dict[str, Any]) -> Iterator[str]:
    """A line for each number that is out of order, with the remedy."""
    is_batch = isinstance(layer, _BatchNormalNorm)
    bound = "set lmbda_range=(-1, 3)" if is_batch else "look for outliers in its input"
    if facts["not_finite"]:
        yield f"{facts['not_finite']:.1%} of the sets are not finite; the input overflows before this layer"
    if facts["equal"]:
        yield (
            f"the values of {facts['equal']:.1%} of the sets are equal, and the output is the bias; look for dead "
            "units or constant inputs before this layer"
        )
    if facts["other_variance"] and getattr(layer, "standardize", True):
        damped = "" if layer.delta else ', or use variant="reference", which damps λ̂'
        yield (
            f"σ² is below ε = {layer.eps:g} in {facts['other_variance']:.1%} of the sets, and λ̂ is not that of their "
            f"shape; enlarge the input, lower eps{damped}"
        )
    elif facts["other_variance"]:
        yield (
            f"the variance of {facts['other_variance']:.1%} of the sets is not near 1, as λ̂ needs it with "
            "standardize=False; standardize the input before"
        )
    if facts["no_damped_curvature"]:
        yield (
            f"L″ + δ ≤ 0 in {facts['no_damped_curvature']:.1%} of the sets, where λ̂ steps away from the best λ; {bound}"
        )
    if facts["at_a_bound"]:
        yield f"λ̂ of {facts['at_a_bound']:.1%} of the sets is at a bound of its range; look for outliers in the input"
    elif facts["lmbda"] and (facts["lmbda"][0] < _FAR[0] or facts["lmbda"][-1] > _FAR[1]):
        least, greatest = facts["lmbda"][0], facts["lmbda"][-1]
        yield f"λ̂ goes from {least:.2f} to {greatest:.2f}, and ψ raises values to powers beyond 3; {bound}"
    if facts["values"] < _FEW:
        larger = "batches" if is_batch else "groups or rows"
        yield f"λ̂ is estimated from {facts['values']} values and is mostly chance; use larger {larger}"

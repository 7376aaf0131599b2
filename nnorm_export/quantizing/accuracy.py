"""How accurate the outputs of a quantized file are: signal-to-noise ratios, and rows with the same greatest entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.files.tensors import TensorInfo


@dataclass(frozen=True)
class OutputAccuracy:
    """An output of a quantized file compared with the reference on some samples.

    Attributes:
        name: of the output.
        sqnr: the signal-to-quantization-noise ratio in decibels, 10·log₁₀(Σ y² / Σ (y − ŷ)²) over all elements, where y
            is the reference; infinite if both are equal, NaN if the file returns NaN.
        top1_agreement: the share of rows whose greatest entry is at the same place; None for an output that is not a
            matrix of floating-point numbers.
        rows: the number of rows, or of samples.
        compared: False if its shape differs from that of the reference, because it depends on the data.
    """

    name: str
    sqnr: float
    top1_agreement: float | None
    rows: int
    compared: bool = True

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.name} not compared, because its shape depends on the data"
        top1 = "" if self.top1_agreement is None else f", top-1 agreement {self.top1_agreement:.2%}"
        return f"{self.name} SQNR {self.sqnr:.1f} dB{top1}"


@dataclass(frozen=True)
class _Sums:
    signal: float = 0.0
    noise: float = 0.0
    equal: int = 0
    ranked: int = 0
    rows: int = 0
    compared: bool = True

    def with_batch(self, actual: Array, expected: Array) -> _Sums:
        if actual.shape != expected.shape:
            return replace(self, compared=False)
        y, difference = expected.astype(np.float64), actual.astype(np.float64) - expected.astype(np.float64)
        added = replace(
            self,
            signal=self.signal + float(np.square(y).sum()),
            noise=self.noise + float(np.square(difference).sum()),
            rows=self.rows + (len(expected) if expected.ndim else 1),
        )
        if expected.ndim != 2 or expected.shape[1] < 2 or not is_float(expected.dtype):
            return added
        equal = int((actual.argmax(1) == expected.argmax(1)).sum())
        return replace(added, equal=self.equal + equal, ranked=self.ranked + len(expected))

    @property
    def sqnr(self) -> float:
        if self.noise == 0.0:
            return math.inf
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if ratio != 0.0 else -math.inf


def accuracy_of(
    infos: Sequence[TensorInfo], actual: Sequence[Sequence[Array]], expected: Sequence[Sequence[Array]]
) -> list[OutputAccuracy]:
    """Compares the outputs ``infos`` over batches: each of ``actual`` and ``expected`` has the outputs in order."""
    sums = [_Sums() for _ in infos]
    for batch in zip(actual, expected, strict=True):
        sums = [each.with_batch(a, b) for each, a, b in zip(sums, *batch, strict=True)]
    return [
        OutputAccuracy(
            info.name, each.sqnr, each.equal / each.ranked if each.ranked else None, each.rows, each.compared
        )
        for info, each in zip(infos, sums, strict=True)
    ]


def sqnr(actual: Array, expected: Array) -> float:
    """The signal-to-quantization-noise ratio of ``actual`` in decibels; see :class:`OutputAccuracy`."""
    return _Sums().with_batch(actual, expected).sqnr


def sqnr_of(outputs: Sequence[OutputAccuracy]) -> float:
    """The least of the outputs that are compared; NaN if one is NaN."""
    return float(np.min([output.sqnr for output in outputs if output.compared], initial=math.inf))


def shortfalls(outputs: Sequence[OutputAccuracy], min_agreement: float | None, min_sqnr: float | None) -> list[str]:
    """The outputs that miss a threshold, in words. NaN misses each."""
    found: list[str] = []
    for output in outputs:
        if not output.compared:
            continue
        if min_sqnr is not None and not output.sqnr >= min_sqnr:
            found.append(
                f"output {output.name} has an SQNR of {output.sqnr:.1f} dB, at least {min_sqnr:g} are asked for"
            )
        top1 = output.top1_agreement
        if min_agreement is not None and top1 is not None and not top1 >= min_agreement:
            found.append(
                f"output {output.name} agrees in {top1:.2%} of its rows, at least {min_agreement:.2%} are asked for"
            )
    return found

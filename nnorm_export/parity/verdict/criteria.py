"""What decides over an output: the error budget, or tolerances; for every element, or for a statistic of all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import NnormExportError
from nnorm_export.metrics.asked import METRIC
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES

CRITERIA = ("budget", "allclose", METRIC)
_TORCH_TOLERANCES = " at torch.testing's tolerances"
_MEASURED = {"budget": "budget, which is measured", METRIC: "criterion metric, by which they decide nothing"}
STATISTICS = ("max", "mean", "median")  # and p0 to p100, percentiles

_T = TypeVar("_T")
PerOutput: TypeAlias = _T | Mapping[str, _T] | None  # for all outputs, or by their names; "" stands for those not named


@dataclass(frozen=True)
class Criterion:
    """What decides: the error budget, or |file − PyTorch| ≤ atol + rtol·|PyTorch|.

    Attributes:
        rtol, atol: tolerances of ``allclose``; None takes those of torch.testing for the output's dtype.
        statistic: of the elements' errors, each divided by what it may be; it must be at most 1. ``max`` asks for every
            element, ``mean``, ``median`` and the percentiles ``p0`` to ``p100`` let some be greater.
        is_named: whether the user gave it for this output by name. Integers and booleans have no other.
    """

    kind: Literal["budget", "allclose"] = "budget"
    rtol: float | None = None
    atol: float | None = None
    statistic: str = "max"
    is_named: bool = False

    @classmethod
    def of(cls, kind: str | None, rtol: float | None, atol: float | None, statistic: str | None = None) -> Criterion:
        """Returns the criterion that a user asks for. Tolerances imply ``allclose``; if one is given, the other is 0.

        Raises:
            NnormExportError: an unknown kind or statistic, a negative tolerance, or tolerances for the budget.
        """
        if kind not in (None, *CRITERIA):
            raise NnormExportError(f"unknown criterion {kind!r}; choose {', '.join(CRITERIA)}")
        statistic = "max" if statistic is None else statistic
        if statistic not in STATISTICS and (not isinstance(statistic, str) or _percentile(statistic) is None):
            raise NnormExportError(
                f"unknown statistic {statistic!r}; choose {', '.join(STATISTICS)}, or a percentile, p99 for example"
            )
        if wrong := [value for value in (rtol, atol) if value is not None and not isinstance(value, Real)]:
            raise NnormExportError(f"a tolerance is {wrong[0]!r}, which is not a number; give a number such as 1e-3")
        rtol, atol = (None if value is None else _as_float(value) for value in (rtol, atol))
        if bad := [value for value in (rtol, atol) if value is not None and not 0 <= value < np.inf]:
            raise NnormExportError(f"a tolerance is {bad[0]}; give finite numbers of at least 0")
        if rtol is None and atol is None:
            return cls("allclose" if kind == "allclose" else "budget", statistic=statistic)
        if kind is not None and kind != "allclose":
            raise NnormExportError(
                f"rtol and atol go with the criterion allclose; leave them out for the {_MEASURED[kind]}"
            )
        return cls("allclose", rtol or 0.0, atol or 0.0, statistic)

    def tolerances(self, dtype: str) -> tuple[float, float]:
        """(rtol, atol) for an output of ``dtype``."""
        if self.rtol is None or self.atol is None:
            return FLOAT_TYPES[dtype].rtol, FLOAT_TYPES[dtype].atol
        return self.rtol, self.atol

    def of_elements(self, shares: Array) -> float:
        """The statistic of ``shares``, each element's error divided by what it may be."""
        percentile = {"max": 100.0, "median": 50.0}.get(self.statistic, _percentile(self.statistic))
        if percentile is None:
            return float(shares.mean())
        return float(np.percentile(shares, percentile, method="higher"))  # no interpolation: shares may be infinite

    def __str__(self) -> str:
        tolerances = f", rtol {self.rtol:g}, atol {self.atol:g}" if self.rtol is not None else ""
        return f"allclose{tolerances or _TORCH_TOLERANCES}{self.of_what}"

    @property
    def of_what(self) -> str:
        return "" if self.statistic == "max" else f", {self.statistic} of the elements"


@dataclass(frozen=True)
class Criteria:
    """The criterion of each output.

    Attributes:
        default: for the outputs that are not named.
        named: for the others, by name.
    """

    default: Criterion
    named: Mapping[str, Criterion]

    @classmethod
    def of(
        cls,
        kind: str | None = None,
        rtol: PerOutput[float] = None,
        atol: PerOutput[float] = None,
        statistic: PerOutput[str] = None,
    ) -> Criteria:
        """Returns the criteria that a user asks for; see :meth:`Criterion.of`."""
        given = (_by_name(rtol), _by_name(atol), _by_name(statistic))
        names = dict.fromkeys(name for values in given for name in values if name)

        def criterion(name: str) -> Criterion:
            rtol, atol, statistic = (values.get(name, values.get("")) for values in given)
            return Criterion.of(kind, rtol, atol, statistic)  # type: ignore[arg-type]

        return cls(criterion(""), {name: replace(criterion(name), is_named=True) for name in names})

    def for_outputs(self, names: Sequence[str]) -> list[Criterion]:
        """The criterion of each output in ``names``.

        Raises:
            NnormExportError: a criterion names another output.
        """
        if unknown := [name for name in self.named if name not in names]:
            raise NnormExportError(f"the file has no output {unknown[0]!r}; its outputs are {', '.join(names)}")
        return [self.named.get(name, self.default) for name in names]


def _by_name(values: PerOutput[_T]) -> Mapping[str, _T]:
    if values is None:
        return {}
    return values if isinstance(values, Mapping) else {"": values}


def _as_float(value: float) -> float:
    """``value`` as a float; infinite if it is greater than any."""
    try:
        return float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf


def _percentile(statistic: str) -> float | None:
    """``p99.9`` -> 99.9; None for another word."""
    match = re.fullmatch(r"p(\d{1,3}(?:\.\d+)?)", statistic)
    return float(match[1]) if match and float(match[1]) <= 100 else None

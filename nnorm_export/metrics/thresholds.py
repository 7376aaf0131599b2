"""What a metric must reach: ``at_least`` and ``within``, as the user writes them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from nnorm_export.errors import InputError


def loss_allowed(within: Any, metric: str, *, is_share: bool | None) -> float | None:
    """``within`` as a number: 0.003, or the text ``"0.3%"`` of a metric that is a share.

    Args:
        is_share: whether the values of ``metric`` are shares; None if that is not known.

    Raises:
        InputError: it is not a number of at least 0, or a percentage of something that is not a share.
    """
    number = _number(within, "within", "0.003, or '0.3%' of a metric that is a share")
    if number is None:
        return None
    if is_percentage(within) and is_share is False:
        raise InputError(
            f"within is {within!r}, and {metric} is not a share, from 0 to 1; give a number in the unit of the metric"
        )
    if number < 0:
        raise InputError(f"within is {within!r}; give the greatest loss, a number of at least 0")
    return number


def bound(at_least: Any, metric: str, *, is_share: bool | None, called: str = "at_least") -> float | None:
    """``at_least``, which messages call ``called``, as a number; a percentage as for :func:`loss_allowed`."""
    number = _number(at_least, called, "0.9, or '90%' of a metric that is a share")
    if is_percentage(at_least) and is_share is False:
        raise InputError(
            f"{called} is {at_least!r}, and {metric} is not a share, from 0 to 1; give a number in the unit of the "
            "metric"
        )
    return number


def in_words(at_least: float | None, within: float | None, *, lower_is_better: bool) -> str:
    """The thresholds in words; empty without one."""
    value = [] if at_least is None else [f"{'at most' if lower_is_better else 'at least'} {at_least:g}"]
    return " and ".join([*value, *([] if within is None else [f"a loss of at most {within:g}"])])


def is_percentage(value: Any) -> bool:
    return isinstance(value, str) and value.strip().endswith("%")


def _number(value: Any, name: str, examples: str) -> float | None:
    if value is None:
        return None
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        text = value.strip()
        try:
            number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} is {value!r}; give a number, {examples}")
    return number

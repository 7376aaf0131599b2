"""The gate that the arguments of a comparison ask for, and the criterion ``metric``, by which it alone decides."""

from __future__ import annotations

from typing import Any

from nnorm_export.errors import InputError
from nnorm_export.metrics.functions import Metric
from nnorm_export.metrics.gate import Gate

METRIC = "metric"  # the criterion


def gate_of(
    metric: Metric | None,
    reference: Any = None,
    *,
    at_least: float | str | None = None,
    within: float | str | None = None,
    lower_is_better: bool | None = None,
    confident: bool = False,
    criterion: str | None = None,
    least: str = "at_least",
) -> Gate | None:
    """The gate of these arguments, :meth:`.Gate.of`; None without a metric.

    Args:
        criterion: of a comparison; ``metric`` lets the metric alone decide.
        least: what the caller calls ``at_least``.

    Raises:
        InputError: as :meth:`.Gate.of`; or an argument needs a metric and there is none; or the metric alone should
            decide, without a threshold.
    """
    if metric is None:
        given = {
            "reference": reference,
            least: at_least,
            "within": within,
            "lower_is_better": lower_is_better,
            "confident": confident or None,
        }
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{wrong[0]} goes with a metric; name one, metric='top1' for example, or leave it out")
        if criterion == METRIC:
            raise InputError("the criterion metric needs a metric; name one, metric='top1' for example")
        return None
    if criterion == METRIC and at_least is None and within is None:
        raise InputError("the criterion metric needs a threshold: at_least, or within, the greatest loss")
    return Gate.of(
        metric,
        reference,
        at_least=at_least,
        within=within,
        lower_is_better=lower_is_better,
        confident=confident,
        least=least,
    )

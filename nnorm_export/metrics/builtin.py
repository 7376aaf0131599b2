"""The built-in metrics by name, with what a gate asks of them.

========  =========================================================  ================  =======
name      formula                                                    better            a share
========  =========================================================  ================  =======
top1      :func:`nnorm_export.metrics.classes.top1`                  higher            yes
top5      :func:`nnorm_export.metrics.classes.top5`                  higher            yes
f1        :func:`nnorm_export.metrics.classes.f1`                    higher            yes
mean_iou  :func:`nnorm_export.metrics.classes.mean_iou`              higher            yes
rmse      :func:`nnorm_export.metrics.numbers.rmse`                  lower             no
r2        :func:`nnorm_export.metrics.numbers.r2`                    higher            no
wer       :func:`nnorm_export.metrics.words.wer`                     lower             yes
========  =========================================================  ================  =======
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnorm_export.metrics.classes import f1, mean_iou, top1, top5
from nnorm_export.metrics.numbers import r2, rmse
from nnorm_export.metrics.statistics import Statistics
from nnorm_export.metrics.words import wer


@dataclass(frozen=True)
class Builtin:
    """A built-in metric.

    Attributes:
        statistics: what it keeps of the samples, from (outputs, labels).
        lower_is_better: whether the lower of two values is the better one.
        is_share: whether the value is a share, from 0 to 1, so that 0.3 % of it is 0.003.
    """

    name: str
    statistics: Callable[[Any, Any], Statistics]
    lower_is_better: bool
    is_share: bool

    def __call__(self, outputs: Any, labels: Any) -> float:
        """The metric of all samples.

        Raises:
            InputError: outputs or labels do not fit the metric.
        """
        return self.statistics(outputs, labels).value


BUILTINS = {
    metric.name: metric
    for metric in (
        Builtin("top1", top1, lower_is_better=False, is_share=True),
        Builtin("top5", top5, lower_is_better=False, is_share=True),
        Builtin("f1", f1, lower_is_better=False, is_share=True),
        Builtin("mean_iou", mean_iou, lower_is_better=False, is_share=True),
        Builtin("rmse", rmse, lower_is_better=True, is_share=False),
        Builtin("r2", r2, lower_is_better=False, is_share=False),
        Builtin("wer", wer, lower_is_better=True, is_share=True),
    )
}


def builtin_of(name: str) -> Builtin | None:
    """The metric of this name, in which dashes and underscores do not count: ``top-1``, ``mean-iou``; None for others.

    >>> builtin_of("top-1").name
    'top1'
    """
    plain = name.lower().replace("-", "").replace("_", "")
    return next((metric for each, metric in BUILTINS.items() if each.replace("_", "") == plain), None)

"""A metric of the user: a function, or ``package.module:function``, and the number that it returns."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from nnorm_export.dtypes import as_array
from nnorm_export.errors import InputError, reported_as
from nnorm_export.metrics.builtin import BUILTINS, Builtin, builtin_of
from nnorm_export.pytorch_missing import is_tensor
from nnorm_export.user_code import look_up

Metric = str | Callable[..., Any]


def metric_of(metric: Metric) -> Builtin | Callable[..., Any]:
    """The built-in metric of a name, or the function.

    Raises:
        InputError: the name is unknown, or it is not a function.
        NnormExportError: the module cannot be imported, or does not have the function.
    """
    if not isinstance(metric, str):
        if not callable(metric):
            raise InputError(f"metric is a {type(metric).__name__}; give a name ({', '.join(BUILTINS)}) or a function")
        return metric
    if ":" not in metric:
        found = builtin_of(metric)
        if found is None:
            raise InputError(
                f"unknown metric {metric!r}; choose one of {', '.join(BUILTINS)}, or name a function of your own, "
                "package.module:function"
            )
        return found
    function: Callable[..., Any] = look_up(metric, "a metric", "metrics:accuracy")
    if not callable(function):
        raise InputError(f"{metric} is a {type(function).__name__}; name a function f(outputs, labels)")
    return function


def name_of(metric: Metric) -> str:
    """What messages call ``metric``."""
    if isinstance(metric, str):
        found = None if ":" in metric else builtin_of(metric)
        return metric if found is None else found.name
    return getattr(metric, "__name__", type(metric).__name__)


def number_from(function: Callable[..., Any], name: str, of: str, *arguments: Any) -> float:
    """The number that the metric ``name``, a function of the user, returns for ``arguments``, those ``of`` a model.

    Raises:
        InputError: the function raises an exception, or returns something other than a number.
    """
    with reported_as(InputError, f"the metric {name} failed on {of}", "Correct the function, or give what it takes"):
        result = function(*arguments)
    if isinstance(result, Real) and not isinstance(result, bool):
        return float(result)
    if is_tensor(result) or hasattr(result, "dtype"):
        array = as_array(result)
        if array.size == 1 and array.dtype.kind in "fiuV":  # V is bfloat16
            return float(array.reshape(()))
        raise InputError(
            f"the metric {name} returned an array of shape {list(array.shape)} and dtype {array.dtype}; return one "
            "number, the mean for example"
        )
    raise InputError(f"the metric {name} returned {_described(result)}; return one number")


def _described(result: Any) -> str:
    return "nothing (None)" if result is None else f"a {type(result).__name__}"

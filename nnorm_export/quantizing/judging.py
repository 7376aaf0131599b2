"""A metric of the user on a quantized file and on the reference that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, as_array, is_float
from nnorm_export.errors import InputError, reported_as
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.metrics.gate import Gate, MetricReport
from nnorm_export.quantizing.reference import Reference
from nnorm_export.runtimes import Runner

Model = Callable[..., list[Array]]


def judged(gate: Gate, runner: Runner, actual: Sequence[Sequence[Array]], reference: Reference) -> MetricReport:
    """The metric of the quantized file.

    Args:
        runner: of the quantized file.
        actual: its outputs on the inputs of ``reference``, batch by batch.

    Raises:
        InputError: the labels do not fit the data, or the metric fails.
    """
    if gate.takes_loader:
        models = (taking(model, runner.inputs) for model in (runner, reference.opened()))
        return gate.judge_calls(*models, reference_name=reference.source)
    found, true = (concatenated(batches, reference.data) for batches in (actual, reference.expected))
    return gate.judge(found, true, reference_name=reference.source)


def taking(model: Model, infos: Sequence[TensorInfo]) -> Model:
    """``model``, called with floating-point arrays in the dtypes of ``infos``, its inputs: a loader may have others."""
    dtypes = {info.name: info.dtype for info in infos}

    def cast(value: Any, dtype: np.dtype[Any] | None) -> Any:
        array = as_array(value)
        return array.astype(dtype) if dtype is not None and is_float(dtype) and is_float(array.dtype) else array

    def call(*arrays: Any, **named: Any) -> list[Array]:
        by_position = [*map(cast, arrays, dtypes.values()), *arrays[len(dtypes) :]]  # more are refused by the model
        return model(*by_position, **{name: cast(value, dtypes.get(name)) for name, value in named.items()})

    return call


def concatenated(batches: Sequence[Sequence[Array]], data: str) -> list[Array]:
    """The outputs of all ``batches`` of the ``data`` data.

    Raises:
        InputError: they do not fit together.
    """
    remedy = "Give a metric that takes a model and a loader"
    with reported_as(InputError, f"the outputs on the batches of the {data} data do not fit together", remedy):
        return [np.concatenate(parts) for parts in zip(*batches, strict=True)]

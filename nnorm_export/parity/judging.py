"""A metric of the user on the file and on the model in PyTorch, in the model's own dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.metrics.gate import Gate, MetricReport
from nnorm_export.models.arguments import bind, tensors_in
from nnorm_export.parity.certificates.metrics import is_replayable
from nnorm_export.parity.reference.file_inputs import as_taken
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.parity.verdict.case import Case
from nnorm_export.runtimes import Runner

BY_BODIES = "by its bodies, which run where the kernels are not installed"


class Judge:
    """A gate with what it judges by: the model in PyTorch, and its outputs on the given inputs.

    Attributes:
        original: the model's outputs in its own dtype; empty for the loader form.
    """

    def __init__(self, gate: Gate, model: nn.Module, pytorch: PyTorchModel, example: Mapping[str, Any]) -> None:
        self._gate, self._model, self._pytorch = gate, model, pytorch
        self.original = [] if gate.takes_loader else pytorch.run_in_own_dtype(example)

    @property
    def labels_and_output(self) -> tuple[Array, Array] | None:
        """What a certificate keeps, so that the metric can be computed again; None if it cannot."""
        labels = self._gate.labels
        return (labels, self.original[0]) if isinstance(labels, np.ndarray) and is_replayable(self._gate) else None

    def of_file(self, runner: Runner, case: Case) -> MetricReport:
        """The metric of the file that ``runner`` runs; ``case`` has its outputs on the given inputs."""
        if self._gate.takes_loader:
            return self._gate.judge_calls(self._file(runner), self._original)
        return self._gate.judge(case.actual, self.original)

    def of_bodies(self, report: MetricReport, bodies: Runner, case: Case) -> MetricReport:
        """``report`` if the file fails, or passes by its ``bodies`` too; else what fails by these."""
        if not report:
            return report
        found = self.of_file(bodies, case if self._gate.takes_loader else replace(case, actual=bodies(*case.inputs)))
        return found if found else replace(found, reason=f"{BY_BODIES}: {found.reason}")

    def _file(self, runner: Runner) -> Any:
        def call(*args: Any, **kwargs: Any) -> list[Array]:
            example = as_taken(runner, self._bound(args, kwargs))
            return runner(*(to_numpy(tensor) for tensor in tensors_in(example)))

        return call

    def _original(self, *args: Any, **kwargs: Any) -> list[Array]:
        return self._pytorch.run_in_own_dtype(self._bound(args, kwargs))

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return bind(self._model, args, kwargs)

"""The outputs that a quantized file is compared with: those of the float32 file, or of PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.files.tensors import outputs_of
from nnorm_export.parity.verdict.dependence import constant_over_rows
from nnorm_export.quantizing.accuracy import OutputAccuracy, accuracy_of
from nnorm_export.quantizing.calibration import Progress, no_progress
from nnorm_export.quantizing.calibration_data import Feed
from nnorm_export.runtimes import Runner, load

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.reference.pytorch_model import Passthrough


@dataclass(frozen=True)
class Reference:
    """The inputs that files are compared on, batch by batch, and the outputs that are expected.

    Attributes:
        source: where the outputs come from: ``the float32 file`` or ``PyTorch``.
        data: which inputs they are: ``test`` or ``calibration``.
        opened: opens what computes the outputs of other inputs.
    """

    source: str
    data: str
    feeds: Sequence[Feed]
    expected: Sequence[Sequence[Array]]
    opened: Callable[[], Callable[..., list[Array]]]

    def first(self, batches: int) -> Reference:
        return replace(self, feeds=self.feeds[:batches], expected=self.expected[:batches])

    def compare(self, runner: Runner) -> list[OutputAccuracy]:
        """Compares the outputs of ``runner``; see :meth:`accuracy`."""
        return self.accuracy(runner, self.run(runner))

    def run(self, runner: Runner, progress: Progress = no_progress) -> list[list[Array]]:
        """The outputs of ``runner``, batch by batch."""
        actual = []
        for done, feed in enumerate(self.feeds):
            progress("comparing", done / len(self.feeds))
            actual.append(runner(**feed))
        return actual

    def accuracy(self, runner: Runner, actual: Sequence[Sequence[Array]]) -> list[OutputAccuracy]:
        """Compares ``actual``, what :meth:`run` returned for ``runner``.

        Raises:
            InputError: no output has the shape that is expected.
        """
        outputs = accuracy_of(runner.outputs, actual, self.expected)
        if not any(output.compared for output in outputs):
            raise InputError(
                "no output can be compared with the reference, because their shapes differ; give other data, or let "
                "the file return what these outputs are computed from"
            )
        return outputs


def refuse_constant(reference: Reference) -> None:
    """Raises an InputError if no output differs from sample to sample: then any file is as near to the reference."""
    outputs = []
    for batches in zip(*reference.expected, strict=True):
        rows = [batch if batch.ndim else batch[None] for batch in batches]
        if len({batch.shape[1:] for batch in rows}) > 1:
            return
        outputs.append(np.concatenate(rows))
    if all(len(output) > 1 for output in outputs) and constant_over_rows(outputs):
        raise InputError(
            f"the outputs of {reference.source} are the same for all {reference.data} samples, so that the comparison "
            "shows nothing about the layers before them. Give other samples, or train the model: a head whose weights "
            "are 0 returns its bias. In Python, min_sqnr=None writes the file nevertheless"
        )


def reference_of(
    file: ModelFile, data: str, feeds: Sequence[Feed], model: nn.Module | None, passthrough: Passthrough
) -> Reference:
    """The outputs of ``model`` on ``feeds``, or of ``file`` if it is None.

    Raises:
        InputError: ``model`` returns other outputs than ``file``.
    """
    if model is None:
        runner = load(file.path, "onnxruntime")
        expected = [runner(**feed) for feed in feeds]
        return Reference("the float32 file", data, feeds, expected, lambda: load(file.path, "onnxruntime"))
    # It needs PyTorch, which may be missing where only a file is quantized.
    in_float32 = importlib.import_module("nnorm_export.parity.reference.in_float32")
    results = in_float32.outputs_in_float32(model, [list(feed.values()) for feed in feeds], passthrough)
    infos = outputs_of(file.proto)
    if len(results[0]) != len(infos):
        raise InputError(
            f"{type(model).__name__} returns {len(results[0])} tensors, {file.path} returns {len(infos)} "
            f"({', '.join(info.name for info in infos)}): give the model that the file was made from"
        )
    for info, found in zip(infos, results[0], strict=True):
        if not info.fits(found.shape):
            raise InputError(
                f"{type(model).__name__} returns {info.name} of shape {list(found.shape)}, {file.path} returns "
                f"{info}: give the model that the file was made from"
            )
    return Reference("PyTorch", data, feeds, results, lambda: in_float32.callable_in_float32(model, passthrough))

"""What quantize() did: the layers in int8 and in float, and the accuracy of the outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nnorm_export.metrics.gate import MetricReport
from nnorm_export.names import DOMAIN
from nnorm_export.quantizing.accuracy import OutputAccuracy
from nnorm_export.quantizing.activations import JOINED
from nnorm_export.quantizing.qdq import NORMS
from nnorm_export.reports import Report

if TYPE_CHECKING:
    from nnorm_export.quantizing.measure import Calibrated


@dataclass(frozen=True)
class QuantizedLayer:
    """A convolution, product or norm of a quantized file.

    Attributes:
        path: the layer's path in the model; the node's name if the file does not have the path. ``keep`` takes it.
        op_types: the operators of its nodes in the file, joined by commas.
        kept: why it computes in float; empty if it computes in int8.
        gain: the decibels by which the least SQNR of the outputs rises if this layer alone stays float, with the norm
            that reads it; None if layers were not ranked, and for a norm: its table is exact, what costs accuracy is
            the rounding of the tensors around it.
        sqnr: the SQNR of its output in decibels, with the errors of the layers before it; None if it was not measured,
            or if its output is not a tensor of its own in the file.
    """

    path: str
    op_types: str
    kept: str
    gain: float | None = None
    sqnr: float | None = None


@dataclass(frozen=True)
class QuantizeReport(Report):
    """A quantized file.

    Attributes:
        path: the file; its external data, if any, lies beside it; see :mod:`nnorm_export.files.external_data`.
        size, float_size: the sizes in bytes of the file and of the one that it was made from, with external data.
        method, activation, weights, reduce_range: as given to :func:`nnorm_export.quantize`, or its defaults.
        samples: the number of samples that the file was calibrated on.
        layers: its convolutions, products and norms: by ``gain``, the greatest first, if they were ranked, else in the
            order of the graph.
        reference: what the outputs were compared with.
        compared: the data that they were compared on: ``test`` or ``calibration``.
        outputs: the outputs, compared.
        implementations: node name -> ``kernel`` or ``body``, for every normalization that is a node.
        notices: sentences that a user should read besides the numbers.
        metric: the metric of the user on the same data, or over a loader; None without one.
    """

    path: Path
    size: int
    float_size: int
    method: str
    activation: str
    weights: str
    reduce_range: bool
    samples: int
    layers: list[QuantizedLayer]
    reference: str
    compared: str
    outputs: list[OutputAccuracy]
    implementations: dict[str, str]
    notices: list[str]
    metric: MetricReport | None = None

    @property
    def quantized(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if not layer.kept]

    def __str__(self) -> str:
        outputs = "; ".join(map(str, (*self.outputs, *([] if self.metric is None else [self.metric]))))
        return (
            f"{self.path}: {len(self.quantized)} of {len(self.layers)} layers in int8, calibrated on {self.samples} "
            f"samples; against {self.reference} on the {self.compared} data: {outputs}"
        )


def layers_found(
    calibrated: Calibrated, tables: set[str], gains: dict[str, float], ratios: dict[str, float]
) -> list[QuantizedLayer]:
    """What became of the layers of ``calibrated``, and of the norms that are never in int8.

    Args:
        tables: the names of the norms that are tables.
        gains, ratios: path of a layer -> :attr:`QuantizedLayer.gain` and :attr:`QuantizedLayer.sqnr`.
    """
    graph, floats = calibrated.graph, calibrated.floats
    nodes = {node.name: node for node in graph.proto.graph.node}
    found = []
    for path, names in graph.layers.items():
        types = Counter(_op_type(nodes[name].op_type, is_table=name in tables) for name in names)
        why = next((floats[name] for name in names if name in floats), "")
        if not why and any(nodes[name].domain == DOMAIN and name not in tables for name in names):
            why = calibrated.request.why_float
        found.append(QuantizedLayer(path, ", ".join(types), why, gains.get(path), ratios.get(path)))
    statistics = [
        QuantizedLayer(name, node.op_type, "it computes statistics from its input", sqnr=ratios.get(name))
        for name, node in nodes.items()
        if node.domain == DOMAIN and node.op_type not in NORMS
    ]
    if gains:
        found.sort(key=lambda layer: -np.inf if layer.gain is None else layer.gain, reverse=True)
    return [*found, *statistics]


def _op_type(op_type: str, *, is_table: bool) -> str:
    """The operator in the file of a node that has ``op_type`` while the graph is quantized."""
    if is_table:
        return NORMS[op_type]
    return JOINED[op_type].norm if op_type in JOINED else op_type

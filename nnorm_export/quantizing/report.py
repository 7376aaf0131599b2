"""What quantize() did: the layers in int8 and in float, and how far the outputs are from the reference."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nnorm_export.quantizing.agreement import OutputAgreement


@dataclass(frozen=True)
class QuantizedLayer:
    """A convolution, product or norm of a quantised file.

    Attributes:
        path: the layer's path in the model; the node's name if the file does not have the path. ``keep`` takes it.
        op_types: the operators of its nodes in the file, joined by commas.
        kept: why it computes in float; empty if it computes in int8.
        gain: the decibels by which the least SQNR of the outputs rises if this layer alone stays float, with the norm
            that reads it; None if layers were not ranked, and for a norm: its table is exact, what costs accuracy is
            the rounding of the tensors around it.
        sqnr: the SQNR of its output in decibels, with the errors of the layers before it; None if it was not measured,
            or if its output is no tensor of its own in the file.
    """

    path: str
    op_types: str
    kept: str
    gain: float | None = None
    sqnr: float | None = None


@dataclass(frozen=True)
class QuantizeReport:
    """A quantised file.

    Attributes:
        path: the file; its external data, if any, lies beside it; see :mod:`nnorm_export.files.external_data`.
        size, float_size: the sizes in bytes of the file and of the one that it was made from, with external data.
        method, activation, weights: as given to :func:`nnorm_export.quantize`.
        samples: the number of samples that the file was calibrated on.
        layers: its convolutions, products and norms: by ``gain``, the greatest first, if they were ranked, else in the
            order of the graph.
        reference: what the outputs were compared with.
        compared: the data that they were compared on: ``test`` or ``calibration``.
        outputs: the outputs, compared.
        implementations: node name -> ``kernel`` or ``body``, for every normalization that is a node.
        notices: sentences that a user should read besides the numbers.
    """

    path: Path
    size: int
    float_size: int
    method: str
    activation: str
    weights: str
    samples: int
    layers: list[QuantizedLayer]
    reference: str
    compared: str
    outputs: list[OutputAgreement]
    implementations: dict[str, str]
    notices: list[str]

    def to_json(self) -> dict[str, Any]:
        lists = {name: [asdict(each) for each in getattr(self, name)] for name in ("layers", "outputs")}
        return {**vars(self), "path": str(self.path), **lists}

    @property
    def quantized(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if not layer.kept]

    def __str__(self) -> str:
        outputs = "; ".join(map(str, self.outputs))
        return (
            f"{self.path}: {len(self.quantized)} of {len(self.layers)} layers in int8, calibrated on {self.samples} "
            f"samples; against {self.reference} on the {self.compared} data: {outputs}"
        )

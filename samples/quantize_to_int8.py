"""Quantizes the residual network to int8 by ONNX Runtime's static quantization, its normalizations left whole.

python samples/quantize_to_int8.py [--epochs N] [--output FOLDER]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import digits
import numpy as np
import train_and_export_resnet
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import Tensor

import nnorm_export

CALIBRATION_IMAGES = 512
# Only convolutions and matrix products are faster in int8. A normalization stays one node and computes in float32.
QUANTIZED = ["Conv", "Gemm", "MatMul"]


class Calibration(CalibrationDataReader):  # type: ignore[misc] - ONNX Runtime has no types
    """Images of the training set, from which ONNX Runtime determines the range of every value that it quantizes."""

    def __init__(self, images: Tensor) -> None:
        self._batches: Iterator[Tensor] = iter(images[:CALIBRATION_IMAGES].split(digits.BATCH_SIZE))

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"images": batch.numpy()}


@dataclass(frozen=True)
class Quantized:
    """The file, its accuracy on the validation set, the float32 file's, and what ran its normalizations."""

    path: Path
    float32_accuracy: float
    int8_accuracy: float
    ran_by: Counter[str]

    def __str__(self) -> str:
        ran = ", ".join(f"{count} by {what}" for what, count in self.ran_by.items())
        return (
            f"{self.path}: accuracy {self.int8_accuracy:.2%}, in float32 {self.float32_accuracy:.2%}; "
            f"normalizations still whole: {ran}"
        )


def quantize(output: Path, epochs: int = train_and_export_resnet.EPOCHS) -> Quantized:
    outcome = train_and_export_resnet.train_and_export(output, epochs)
    data = digits.Digits.load()
    path = output / "resnet.int8.onnx"
    quantize_static(
        outcome.report.path,
        path,
        Calibration(data.train_images),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=QUANTIZED,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )
    # The file is still portable: kernels run its normalizations if they are installed, otherwise bodies.
    runner = nnorm_export.load(path)
    served = digits.serve(runner, data.validation_images)
    accuracy = float((served == data.validation_labels.numpy()).mean())
    return Quantized(path, outcome.onnxruntime_accuracy, accuracy, Counter(runner.implementations.values()))


if __name__ == "__main__":
    options = digits.arguments(
        "Train a residual network, export it, quantize it.", epochs=train_and_export_resnet.EPOCHS
    )
    print(quantize(options.output, options.epochs))

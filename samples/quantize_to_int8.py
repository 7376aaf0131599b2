"""Quantizes the residual network, with its normalizations, to int8, calibrated on images of the training set.

python samples/quantize_to_int8.py [--epochs N] [--output FOLDER]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import digits
import train_and_export_resnet

import nnorm_export

CALIBRATION_IMAGES = 512


@dataclass(frozen=True)
class Quantized:
    """The report of quantize(), the accuracies in float32 and int8 on the validation set, and the implementations."""

    report: nnorm_export.QuantizeReport
    float32_accuracy: float
    int8_accuracy: float
    ran_by: dict[str, int]

    def __str__(self) -> str:
        ran = ", ".join(f"{count} by {what}" for what, count in self.ran_by.items())
        return (
            f"{self.report}\n"
            f"{self.report.path}: accuracy {self.int8_accuracy:.2%}, in float32 {self.float32_accuracy:.2%}; "
            f"normalizations as tables: {ran}"
        )


def quantize(output: Path, epochs: int = train_and_export_resnet.EPOCHS) -> Quantized:
    outcome = train_and_export_resnet.train_and_export(output, epochs)
    data = digits.Digits.load()
    report = nnorm_export.quantize(
        outcome.report.path,
        data.train_images[:CALIBRATION_IMAGES],
        output / "resnet.int8.onnx",
        test=data.validation_images,
        min_agreement=0.98,
    )
    # The file is still portable: if kernels are installed, they run its normalizations, otherwise bodies do.
    runner = nnorm_export.load(report.path)
    served = digits.serve(runner, data.validation_images)
    accuracy = float((served == data.validation_labels.numpy()).mean())
    return Quantized(report, outcome.onnxruntime_accuracy, accuracy, runner.counts)


if __name__ == "__main__":
    options = digits.arguments(
        "Train a residual network, export it, quantize it.", epochs=train_and_export_resnet.EPOCHS
    )
    print(quantize(options.output, options.epochs))

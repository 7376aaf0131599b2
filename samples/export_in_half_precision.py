"""Exports the vision transformer in float16 and bfloat16, with normalizations in float32, and measures the accuracy.

python samples/export_in_half_precision.py [--epochs N] [--output FOLDER]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import digits
import train_and_export_vit

import nnorm_export


@dataclass(frozen=True)
class Half:
    """A file, its runtime, and its accuracy on the validation set beside the accuracy of the float32 file."""

    path: Path
    dtype: str
    runtime: str
    accuracy: float
    float32_accuracy: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.path.stat().st_size / 1000:.0f} kB, accuracy {self.accuracy:.2%} in {self.dtype} "
            f"({self.runtime}), {self.float32_accuracy:.2%} in float32"
        )


def export_in_half_precision(output: Path, epochs: int = train_and_export_vit.EPOCHS) -> list[Half]:
    outcome = train_and_export_vit.train_and_export(output, epochs)
    data = digits.Digits.load()
    images = data.validation_images

    # First, whether real data lead to values in a normalization that float16 cannot represent.
    for risk in nnorm_export.float16_risks(outcome.model, (images,)):
        digits.announce(f"{risk.path}: {'; '.join(risk.unsafe + risk.sums)}")

    written = []
    # ONNX Runtime has no bfloat16 on processors, so onnx's evaluator runs this file, slowly. GPUs have both types.
    for dtype, runtime in (("fp16", "onnxruntime"), ("bf16", "reference")):
        path = output / f"vit.{dtype}.onnx"
        # Weights and activations are in half precision; a normalization computes in float32 and rounds once.
        nnorm_export.export(outcome.model, (images[:8],), path, dtype=dtype)
        # The inputs of the file are in half precision too, as ``runner.inputs`` says.
        runner = nnorm_export.load(path, runtime)
        served = digits.serve(runner, images)
        accuracy = float((served == data.validation_labels.numpy()).mean())
        written.append(Half(path, dtype, runtime, accuracy, outcome.onnxruntime_accuracy))
    return written


if __name__ == "__main__":
    options = digits.arguments(
        "Train a vision transformer, export it in half precision.", epochs=train_and_export_vit.EPOCHS
    )
    print(*export_in_half_precision(options.output, options.epochs), sep="\n")

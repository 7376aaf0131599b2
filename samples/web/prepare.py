"""Trains the residual network on handwritten digits, and writes the files for the page here and for samples/node.

    python samples/web/prepare.py [--epochs N] [--output samples/web/data]

The output is ``resnet.onnx``, a portable file, and ``digits.json``: images of the validation set, their labels, and the
classes that the model predicts in PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import digits  # noqa: E402  (the samples are programs side by side, not a package)
import train_and_export_resnet  # noqa: E402

IMAGES = 120


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual network and write the data of samples/web.")
    parser.add_argument("--epochs", type=int, default=train_and_export_resnet.EPOCHS)
    parser.add_argument("--output", type=Path, default=HERE / "data", help="folder of the files (default %(default)s)")
    options = parser.parse_args()
    outcome = train_and_export_resnet.train_and_export(options.output, options.epochs)
    data = digits.Digits.load()
    images, labels = data.validation_images[:IMAGES], data.validation_labels[:IMAGES]
    content = {
        "images": images.flatten(1).tolist(),
        "labels": labels.tolist(),
        "pytorch": digits.predict(outcome.model, images).tolist(),
    }
    (options.output / "digits.json").write_text(json.dumps(content))
    print(outcome)


if __name__ == "__main__":
    main()

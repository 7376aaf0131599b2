"""Serves a file with OpenCV's module dnn, which needs nothing of nnorm_export.

The file has the shapes of the example that it was exported with, so the images come in batches of that size.

    nnorm-export export … --input 1,3,32,32 --target opencv -o model.onnx
    python samples/runtimes/serve_opencv.py model.onnx images.npy -o logits.npy --batch 1
"""

from __future__ import annotations

import argparse

import cv2
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX file without functions and without dynamic axes")
    parser.add_argument("images", help="a .npy file of float32 images, a multiple of the batch")
    parser.add_argument("-o", "--output", default="logits.npy", help="the file to write")
    parser.add_argument("--batch", type=int, default=1, help="the batch that the file was exported with")
    arguments = parser.parse_args()

    network = cv2.dnn.readNetFromONNX(arguments.model)
    images = np.load(arguments.images)
    if len(images) % arguments.batch:
        raise SystemExit(f"{len(images)} images are not a multiple of the batch, {arguments.batch}")
    logits = []
    for first in range(0, len(images), arguments.batch):
        network.setInput(images[first : first + arguments.batch])
        logits.append(network.forward().copy())  # OpenCV uses the memory again
    np.save(arguments.output, np.concatenate(logits))
    print(f"{len(images)} rows in {arguments.output}, by OpenCV {cv2.__version__}")


if __name__ == "__main__":
    main()

"""Serves a file with OpenCV's module dnn, without nnorm_export.

The shapes of the file are those of the example of the export, so the images are served in batches of this size. OpenCV
computes wrong results for other shapes without an error, so the shape is given again and checked.

    nnorm-export export … --input 1,3,32,32 --target opencv -o model.onnx
    python samples/runtimes/serve_opencv.py model.onnx images.npy -o logits.npy --input 1,3,32,32
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
    parser.add_argument("--input", required=True, help="the shape that the file was exported with: 1,3,32,32")
    arguments = parser.parse_args()

    network = cv2.dnn.readNetFromONNX(arguments.model)
    images = np.load(arguments.images)
    batch, *shape = map(int, arguments.input.split(","))
    if images.dtype != np.float32 or list(images.shape[1:]) != shape:
        raise SystemExit(f"the file takes float32{[batch, *shape]}, and these are {images.dtype}{list(images.shape)}")
    if len(images) % batch:
        raise SystemExit(f"{len(images)} images are not a multiple of the batch, {batch}")
    logits = []
    for first in range(0, len(images), batch):
        network.setInput(images[first : first + batch])
        logits.append(network.forward().copy())  # OpenCV reuses the memory
    np.save(arguments.output, np.concatenate(logits))
    print(f"{len(images)} rows in {arguments.output}, by OpenCV {cv2.__version__}")


if __name__ == "__main__":
    main()

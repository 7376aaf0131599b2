"""Serves a file without PyTorch: this process imports NumPy, ONNX Runtime and nnorm_export alone.

python samples/serve_without_pytorch.py MODEL.onnx IMAGES.npz [--threads N]

IMAGES.npz holds ``images``, the input of the network, and ``labels``, the right classes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import nnorm_export

BATCH_SIZE = 64
PASSES = 20  # over the digits, because one pass takes only milliseconds


def serve(path: Path, archive: Path, threads: int) -> str:
    with np.load(archive) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    batches = [images[first : first + BATCH_SIZE] for first in range(0, len(images), BATCH_SIZE)]

    runner = nnorm_export.load(path, intra_op_num_threads=threads)
    classes = np.concatenate([runner(batch)[0].argmax(1) for batch in batches])

    start = time.perf_counter()
    for _ in range(PASSES):
        for batch in batches:
            runner(batch)
    rate = PASSES * len(images) / (time.perf_counter() - start)

    # "kernel", or "body" if no kernels are installed: the same formula in ONNX's own operators, which is slower.
    ran = ", ".join(f"{count} by {what}" for what, count in runner.counts.items())
    return (
        f"{path}: {(classes == labels).mean():.2%} of {len(images)} images right, {rate:,.0f} images/s, "
        f"threads {threads}, normalizations {ran}; PyTorch {'imported' if 'torch' in sys.modules else 'not imported'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a file without PyTorch.")
    parser.add_argument("model", type=Path, help="an ONNX file that nnorm_export wrote")
    parser.add_argument("images", type=Path, help="a .npz file with images and labels")
    parser.add_argument("--threads", type=int, default=1, help="of the session (default %(default)s)")
    options = parser.parse_args()
    print(serve(options.model, options.images, options.threads))

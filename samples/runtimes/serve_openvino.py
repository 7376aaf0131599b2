"""Serves a file with OpenVINO, without nnorm_export. These commands write the file:

nnorm-export export … --target openvino -o model.onnx     or, from an existing file:
nnorm-export convert portable.onnx --form primitives -o model.onnx
python samples/runtimes/serve_openvino.py model.onnx images.npy -o logits.npy
"""

from __future__ import annotations

import argparse

import numpy as np
import openvino


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX file without functions")
    parser.add_argument("images", help="a .npy file of one batch of inputs")
    parser.add_argument("-o", "--output", default="logits.npy", help="the file to write")
    parser.add_argument("--device", default="CPU")
    arguments = parser.parse_args()

    # Without this hint OpenVINO may compute in bfloat16 or float16 on some processors and on GPUs.
    model = openvino.compile_model(arguments.model, arguments.device, {"INFERENCE_PRECISION_HINT": "f32"})
    logits = model(np.load(arguments.images))[0]
    np.save(arguments.output, logits)
    print(f"{len(logits)} rows in {arguments.output}, by OpenVINO {openvino.__version__}")


if __name__ == "__main__":
    main()

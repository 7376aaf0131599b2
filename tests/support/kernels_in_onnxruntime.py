"""Runs every case of a folder in the ONNX Runtime of this interpreter: kernels_in_onnxruntime.py LIBRARY FOLDER.

A case is NAME.onnx with NAME.npz: its inputs, and ``expected`` and ``bound``. Nodes without a body can only be run by
the library; with - for the library all are run by bodies. Prints JSON: the version, the number of cases, what failed,
whether this ONNX Runtime has a CUDA provider, and whether the CUDA library came to be loaded. Imports ONNX Runtime and
NumPy only, for environments that have nothing else.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

library, folder = sys.argv[1], Path(sys.argv[2])
failures = []
cases = sorted(folder.glob("*.onnx"))
for case in cases:
    feeds = dict(np.load(case.with_suffix(".npz")))
    expected, bound = feeds.pop("expected"), float(feeds.pop("bound"))
    for threads in (1, 3):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if library != "-":
            options.register_custom_ops_library(library)
        try:
            session = onnxruntime.InferenceSession(str(case), options, providers=["CPUExecutionProvider"])
            result = session.run(None, feeds)[0]
        except Exception as error:
            failures.append(f"{case.stem}, {threads} threads: {error}")
            continue
        errors = np.abs(result.astype(np.float64) - expected) / np.maximum(1, np.abs(expected))
        if result.shape != expected.shape or not errors.max(initial=0) <= bound:
            failures.append(f"{case.stem}, {threads} threads: shape {result.shape}, error {errors.max(initial=0):.2e}")
maps = Path("/proc/self/maps")
report = {
    "version": onnxruntime.__version__,
    "cases": len(cases),
    "failures": failures,
    "has_cuda_library": maps.exists() and "libnnorm_ort_cuda" in maps.read_text(),
}
print(json.dumps(report))

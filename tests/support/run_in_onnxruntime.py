"""Runs a model in the ONNX Runtime of this interpreter.

    python run_in_onnxruntime.py MODEL FEEDS RESULTS [LIBRARY]

With a library of kernels the model's graph is taken as it is. Imports ONNX Runtime and NumPy only, for environments
that have nothing else.
"""

import sys

import numpy as np
import onnxruntime

model, feeds, results, *library = sys.argv[1:]
options = onnxruntime.SessionOptions()
for path in library:
    options.register_custom_ops_library(path)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
outputs = session.run(None, dict(np.load(feeds)))
names = [output.name for output in session.get_outputs()]
np.savez(results, **dict(zip(names, outputs)))  # noqa: B905 - this file also runs on Python 3.9
print(onnxruntime.__version__)

"""Runs a model in whatever ONNX Runtime this interpreter has: ``python run_in_onnxruntime.py MODEL FEEDS RESULTS``.

Imports ONNX Runtime and NumPy only, for environments that have nothing else (see test_onnxruntime_versions.py).
"""

import sys

import numpy as np
import onnxruntime

model, feeds, results = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
outputs = session.run(None, dict(np.load(feeds)))
names = [output.name for output in session.get_outputs()]
np.savez(results, **dict(zip(names, outputs)))  # noqa: B905 - this file also runs on Python 3.9
print(onnxruntime.__version__)

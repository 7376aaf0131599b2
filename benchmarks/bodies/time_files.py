"""Times ONNX files in turns in the ONNX Runtime of this environment, which needs nothing else.

python time_files.py THREADS SHAPE TURNS FILE …    writes {"version": …, "seconds": {FILE: [one for each turn]}}
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

WARM_UP = 2


def main(threads: str, shape: str, turns: str, *files: str) -> None:
    x = np.random.default_rng(0).standard_normal([int(length) for length in shape.split("x")]).astype(np.float32)
    runs = {file: _opened(file, int(threads), x) for file in files}
    seconds: dict[str, list[float]] = {file: [] for file in files}
    order = random.Random(0)
    for turn in range(WARM_UP + int(turns)):
        for file in order.sample(files, len(files)):
            start = time.perf_counter()
            runs[file]()
            if turn >= WARM_UP:
                seconds[file].append(time.perf_counter() - start)
    print(json.dumps({"version": onnxruntime.__version__, "seconds": seconds}))


def _opened(file: str, threads: int, x: Any) -> Callable[[], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda: session.run(None, {given.name: x})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Many threads run the kernels for a long time: ``python tests/fuzz/soak.py --minutes 30``.

Every thread runs one session that all of them share, and after some runs opens a session of its own, runs and closes
it. Each output must have the bits of the first run, and the memory of the process must stay flat. Prints JSON with the
counts and the memory, and exits with 1 if an output differed, a thread failed or memory grew.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from nnorm_export import register
from nnorm_export.domain import OPERATORS
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

SHAPE = (4, 16, 9, 7)
RUNS_OF_A_SESSION = 200  # of the shared session, between two sessions that a thread opens
# A leak of each session's operators is 45 kB; memory that varies with what the threads do at the moment is not a leak.
MOST_KILOBYTES_PER_SESSION, MOST_KILOBYTES = 2.0, 16_384


def model() -> tuple[bytes, dict[str, np.ndarray]]:
    """A file with a node of every operator in a chain, without bodies, and inputs for it."""
    rng = np.random.default_rng(0)
    channels, width = SHAPE[1], SHAPE[-1]
    feeds: dict[str, np.ndarray] = {"X": rng.standard_normal(SHAPE)}
    nodes, last = [], "X"
    for index, operator in enumerate(OPERATORS.values()):
        inputs = [last]
        for name in operator.parameters:
            values = rng.uniform(0.5, 1.5, channels if operator.is_per_channel else width)
            feeds[f"{name}{index}"] = values
            inputs.append(f"{name}{index}")
        inputs += ["X"] * len(operator.operands)
        attributes = {"num_groups": 4} if "num_groups" in operator.attributes else {}
        nodes.append(helper.make_node(operator.op_type, inputs, [f"y{index}"], domain=DOMAIN, **attributes))
        last = f"y{index}"
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    output = helper.make_tensor_value_info(last, TensorProto.FLOAT, SHAPE)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    graph = helper.make_graph(nodes, "soak", infos, [output])
    file: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return file, {name: value.astype(np.float32) for name, value in feeds.items()}


def open_session(file: bytes, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    register(options)
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def resident_kilobytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def soak(seconds: float, threads: int = 8) -> dict[str, Any]:
    """Runs for this time; what was counted and measured."""
    file, feeds = model()
    shared = open_session(file, 2)
    expected = shared.run(None, feeds)[0].tobytes()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    lock, end = threading.Lock(), time.monotonic() + seconds

    def work() -> None:
        try:
            while time.monotonic() < end:
                wrong = sum(shared.run(None, feeds)[0].tobytes() != expected for _ in range(RUNS_OF_A_SESSION))
                wrong += open_session(file, 1).run(None, feeds)[0].tobytes() != expected
                with lock:
                    counts.update(runs=RUNS_OF_A_SESSION + 1, sessions=1, wrong=wrong)
        except Exception as error:  # whatever a run raises ends the thread, and is reported
            with lock:
                failures.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    samples: list[tuple[int, int]] = []  # (sessions so far, kilobytes), from a tenth of the time on
    while any(worker.is_alive() for worker in workers):
        time.sleep(seconds / 50)
        if time.monotonic() > end - 0.9 * seconds:
            samples.append((counts["sessions"], resident_kilobytes()))
    for worker in workers:
        worker.join()
    (first_sessions, first), (last_sessions, last) = samples[0], samples[-1]
    growth, opened = last - first, max(1, last_sessions - first_sessions)
    flat = growth <= min(max(MOST_KILOBYTES_PER_SESSION * opened, 4096), MOST_KILOBYTES)
    return {
        "seconds": round(seconds),
        "threads": threads,
        **{name: counts[name] for name in ("runs", "sessions", "wrong")},
        "failures": failures,
        "resident_kilobytes_at_a_tenth": first,
        "resident_kilobytes_at_the_end": last,
        "resident_kilobytes_at_most": max(kilobytes for _, kilobytes in samples),
        "flat": flat,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=8, help="how many (default: %(default)s)")
    arguments = parser.parse_args()
    result = soak(arguments.minutes * 60, arguments.threads)
    print(json.dumps(result, indent=2))
    return 0 if result["flat"] and not result["wrong"] and not result["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long a process takes until its first answer, and its greatest memory: ``python -m`` this module is that process.

Its argument is JSON: the file, its runtime and options, and the ``.npz`` file of the inputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.files.tuned import Options
from nnorm_export.runtimes import load

_TIMEOUT = 120  # seconds


@dataclass(frozen=True)
class Start:
    """A process that opened a file and ran it once.

    Attributes:
        seconds: from the start of the process to the first answer, the import of the runtime included.
        memory: its greatest resident memory in bytes; None where the system does not tell.
    """

    seconds: float
    memory: int | None


def start_of(path: Path, runtime: str, options: Options, inputs: Path) -> Start | None:
    """Starts the process; None if it fails, as where a second process finds no free memory."""
    argument = json.dumps([str(path), runtime, options, str(inputs)])
    began = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", __name__, argument]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            timer_end = began + _TIMEOUT
            line = process.stdout.readline() if process.stdout is not None else ""
            seconds = time.perf_counter() - began
            process.wait(max(1.0, timer_end - time.perf_counter()))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Start(seconds, json.loads(line)) if line.strip() else None


def peak_memory(status: Path = Path("/proc/self/status")) -> int | None:
    """The greatest resident memory of this process. Linux alone tells it without that of the process that began it."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def _main() -> None:
    path, runtime, options, inputs = json.loads(sys.argv[1])
    with np.load(inputs) as arrays:
        feed: dict[str, Array] = {name: arrays[name] for name in arrays.files}
    load(path, runtime, **options)(**feed)
    print(json.dumps(peak_memory()), flush=True)


if __name__ == "__main__":
    _main()

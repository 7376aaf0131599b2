"""How long a process takes until its first answer, and its greatest memory: ``python -m`` this module is that process.

Its argument is JSON: the file, its runtime and options, and the ``.npy`` files of the inputs in order.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
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


def start_of(path: Path, runtime: str, options: Options, inputs: Sequence[Path]) -> Start | None:
    """Starts the process; None if it fails, as where a second process finds no free memory, or does not end."""
    argument = json.dumps([str(path), runtime, options, [str(each) for each in inputs]])
    command = [sys.executable, "-W", "ignore", "-m", __name__, argument]
    began = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
        answered, memory = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return Start(answered - began, memory)


def peak_memory(status: Path = Path("/proc/self/status")) -> int | None:
    """The greatest resident memory of this process. Linux alone tells it without that of the process that began it."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def _main() -> None:
    path, runtime, options, inputs = json.loads(sys.argv[1])
    arrays: list[Array] = [np.load(each) for each in inputs]
    load(path, runtime, **options)(*arrays)
    print(json.dumps([time.time(), peak_memory()]))


if __name__ == "__main__":
    _main()

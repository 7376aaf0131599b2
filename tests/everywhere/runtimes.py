"""The runtimes of the matrix, and how a process of each is started, watched and, after a crash, started again."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNNERS = Path(__file__).parent / "runners"
NODE = ".venv-everywhere-node"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
ONNX = ("portable", "primitives")
# The form of a file in an older opset -> the opset.
OLDER_OPSETS = {f"opset{opset}": opset for opset in (11, 13, 15, 17)}
WITH_OLDER = (*ONNX, *OLDER_OPSETS)
SECONDS_PER_FILE = 180  # compilers take up to 20


@dataclass(frozen=True)
class Runtime:
    """A runtime of the matrix.

    Attributes:
        title: its name in the table.
        program: the runner and its first arguments, ``python:tract`` or ``browser:wasm:onnxruntime-web``.
        environment: the folder in the repository that has its packages; "" is the environment of the tests.
        forms, dtypes: the files that are tried.
        is_quick: runs in ``make test-all`` too.
    """

    name: str
    title: str
    program: str
    environment: str = ""
    forms: tuple[str, ...] = ONNX
    dtypes: tuple[str, ...] = ("fp32", "fp16", "fp16io")
    is_quick: bool = False

    def missing(self) -> str:
        """What this machine lacks to run it, or ""."""
        runner = self.program.partition(":")[0]
        if self.environment and not (ROOT / self.environment / "installed").exists():
            return f"{self.environment} is not installed: make test-everywhere"
        if runner != "python" and not shutil.which("node"):
            return "Node.js is not installed"
        if runner == "browser" and not chromium():
            return "Chromium is not installed"
        return ""

    def command(self, folder: Path, out: Path) -> list[str]:
        runner, *arguments = self.program.split(":")
        if runner == "python":
            python = ROOT / self.environment / "bin" / "python" if self.environment else sys.executable
            return [str(python), str(RUNNERS / "python.py"), *arguments, str(folder), str(out)]
        return ["node", str(RUNNERS / f"{runner}.mjs"), *arguments, str(folder), str(out)]

    def reads(self, entry: Mapping[str, Any]) -> bool:
        return entry["form"] in self.forms and entry["dtype"] in self.dtypes


# Version of ONNX Runtime -> the newest of :data:`OLDER_OPSETS` that it reads.
_OLDER = {"1.10": 15, "1.12": 17, "1.14": 17, "1.16": 17}


def _forms(newest: int) -> tuple[str, ...]:
    return tuple(form for form, opset in OLDER_OPSETS.items() if opset <= newest)


# Compilers take seconds for each file, so they are not asked for half precision.
_FP32 = ("fp32",)
RUNTIMES = (
    Runtime("onnxruntime-1.18", "ONNX Runtime, oldest", "python:onnxruntime", ".venv-onnxruntime-1.18", WITH_OLDER),
    Runtime("onnxruntime", "ONNX Runtime, newest", "python:onnxruntime", ".venv-everywhere-onnxruntime", WITH_OLDER),
    Runtime("onnxruntime-node", "ONNX Runtime for Node.js", "node:onnxruntime-node", NODE, WITH_OLDER, is_quick=True),
    *(
        Runtime(
            f"onnxruntime-node-{version}",
            f"ONNX Runtime {version} for Node.js",
            f"node:onnxruntime-node-{version}",
            NODE,
            _forms(newest),
            dtypes=_FP32,
            is_quick=True,
        )
        for version, newest in _OLDER.items()
    ),
    Runtime("onnxruntime-web-wasm", "ONNX Runtime Web, WebAssembly in Chromium", "browser:wasm:onnxruntime-web", NODE),
    Runtime("onnxruntime-web-webgpu", "ONNX Runtime Web, WebGPU in Chromium", "browser:webgpu:onnxruntime-web", NODE),
    *(
        Runtime(
            f"onnxruntime-web-{version}",
            f"ONNX Runtime Web {version}, WebAssembly in Chromium",
            f"browser:wasm:onnxruntime-web-{version}",
            NODE,
            _forms(_OLDER[version]),
            dtypes=_FP32,
        )
        for version in ("1.10", "1.16")
    ),
    Runtime(
        "onnxruntime-openvino",
        "ONNX Runtime's OpenVINO provider",
        "python:onnxruntime-openvino",
        ".venv-everywhere-onnxruntime-openvino",
    ),
    Runtime("openvino", "OpenVINO", "python:openvino", forms=(*ONNX, "torchscript", "pt2"), is_quick=True),
    Runtime("opencv5", "OpenCV 5", "python:opencv", ".venv-everywhere-opencv5", forms=(*ONNX, "opencv"), is_quick=True),
    Runtime("opencv4", "OpenCV 4", "python:opencv", ".venv-everywhere-opencv4", forms=(*ONNX, "opencv")),
    Runtime("opencv4.8", "OpenCV 4.8", "python:opencv-alone", ".venv-everywhere-opencv4.8", ("opset13",), dtypes=_FP32),
    Runtime("tract", "tract", "python:tract", ".venv-everywhere-tract", forms=(*ONNX, "tract"), is_quick=True),
    Runtime("iree", "IREE, on processors", "python:iree", ".venv-everywhere-iree", dtypes=_FP32),
    Runtime("tvm", "Apache TVM, on processors", "python:tvm", ".venv-everywhere-tvm", dtypes=_FP32),
    Runtime(
        "executorch", "ExecuTorch", "python:executorch", ".venv-everywhere-executorch", ("executorch",), dtypes=_FP32
    ),
    Runtime("litert", "LiteRT", "python:litert", ".venv-everywhere-litert", ("litert",), dtypes=_FP32),
    Runtime("reference", "onnx.reference", "python:reference"),
)


def chromium() -> str:
    return next((path for name in CHROMIUMS if (path := shutil.which(name))), "")


def run(runtime: Runtime, folder: Path, names: Sequence[str], out: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Runs the files ``names``; returns the runtime's version and, for each file, what its runner reported.

    A report has ``outputs``, or ``refused`` or ``crashed`` with the text. A file during which the process ends, or
    takes too long, is reported as ``crashed``, and a new process runs the others.

    Raises:
        RuntimeError: a process ended before its first file.
    """
    out.mkdir(parents=True, exist_ok=True)
    version, reports, left = "", {}, list(names)
    while left:
        begun, line = "", None
        for line in _lines(runtime, folder, left, out):
            version = line.get("version", version)
            begun = line.get("begun", begun)
            if "finished" in line:
                reports[line["finished"]] = line
                left.remove(line["finished"])
                begun = ""
            elif "ended" in line and left:
                if not begun:
                    raise RuntimeError(f"{runtime.title} did not start, {line['ended']}:\n{_tail(out / 'stderr.txt')}")
                reports[begun] = {"crashed": line["ended"]}
                left.remove(begun)
    return version, reports


def _lines(runtime: Runtime, folder: Path, names: Sequence[str], out: Path) -> Iterator[dict[str, Any]]:
    """The lines that a new process prints, and last {"ended": how}."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),  # nnorm_export
        "NNORM_NODE_MODULES": str(ROOT / NODE / "node_modules"),
        "NNORM_CHROMIUM": chromium(),
        "OMP_NUM_THREADS": "2",
    }
    command = runtime.command(folder.resolve(), out.resolve())
    with (out / "stderr.txt").open("a") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended; how is told below
        process.stdin.write("\n".join(names))
        process.stdin.close()
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    try:
        while text := lines.get(timeout=SECONDS_PER_FILE):
            yield json.loads(text)
        process.wait(timeout=SECONDS_PER_FILE)
        code = process.returncode
        yield {"ended": f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"}
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"ended": f"took over {SECONDS_PER_FILE} seconds"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the browser, if it has one
        process.wait()


def _forward(stream: Any, lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:]

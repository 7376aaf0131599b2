"""Two Triton servers with two instances each, in front of one model repository, and a client that knows both.

An instance of Triton's Python backend is a process of its own (``triton_python_backend_stub``), therefore one can be
killed. A server with its instances is what a node is to a cluster.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from triton_server import Program, program

import nnorm_export
from benchmarks.failures.client import TIMEOUT, Ask, AttemptFailed, Log
from benchmarks.failures.models import SHAPE
from nnorm_export.dtypes import Array

INSTANCES, SERVERS = 2, 2
_DOWN = 3.0  # seconds until a dead server or instance is noticed
_GRACE = 10.0  # seconds that a server has to end by itself
_STUB = "triton_python_backend_stub"


class Triton:
    """The :class:`.disturbances.Service` of the two servers."""

    def __init__(self, programs: Sequence[Program], paths: Sequence[Path], repository: Path) -> None:
        self._programs, self._paths, self._repository = programs, paths, repository
        self._input = nnorm_export.load(paths[0]).inputs[0].name
        self.processes = [each.start() for each in programs]
        for each, process in zip(programs, self.processes, strict=True):
            each.wait(process)

    def asks(self) -> list[Ask]:
        """Each server by HTTP and by gRPC."""
        urls = [getattr(each.address, protocol) for protocol in ("http", "grpc") for each in self._programs]
        return [_ask(nnorm_export.load(f"{url}/net", timeout=TIMEOUT)) for url in urls]

    def kill_replica(self, random: random.Random, wait: Callable[[], None]) -> str:
        """One instance, and after seconds its server is started again.

        The server stays ready with a dead instance, does not replace it, and fails each request that it gives it, after
        a second. Something must watch the instances: here it is this program.
        """
        index = random.randrange(len(self.processes))
        victim = random.choice(self._stubs(index))
        wait()
        victim.kill()
        time.sleep(_DOWN)
        self.processes[index].terminate()
        with suppress(subprocess.TimeoutExpired):
            self.processes[index].wait(_GRACE)
        self._start_again(index)
        return f"instance {victim.pid} of server {index}"

    def kill_node(self, random: random.Random, wait: Callable[[], None]) -> str:
        index = random.randrange(len(self.processes))
        process = self.processes[index]
        wait()
        _kill(process)
        time.sleep(_DOWN)
        self._start_again(index)
        return f"server {index}, process {process.pid}"

    def replace(self, version: int) -> None:
        nnorm_export.write_repository(self._paths[version % 2], self._repository, **_OPTIONS)
        for each in self._programs:  # one after the other: each server loads the new version, and then ends the old one
            _post(f"{each.address.http}/v2/repository/models/net/load")
        deadline = time.monotonic() + TIMEOUT
        while any(_versions(each) != [str(version + 1)] for each in self._programs):
            if time.monotonic() > deadline:
                raise TimeoutError("a server still has the old version")
            time.sleep(0.05)

    def is_whole(self, log: Log, since: int) -> bool:
        return all(len(self._stubs(index)) == INSTANCES for index in range(SERVERS))

    def version(self) -> str:
        with urllib.request.urlopen(f"{self._programs[0].address.http}/v2", timeout=TIMEOUT) as answer:
            return f"Triton {json.load(answer)['version']} of nvidia-pytriton, Python backend"

    def raw(self, random: random.Random) -> tuple[int, bytes]:
        address = urlsplit(random.choice(self._programs).address.http)
        values = [random.gauss(0, 1) for _ in range(math.prod(SHAPE))]
        tensor = {"name": self._input, "shape": [1, *SHAPE], "datatype": "FP32", "data": values}
        body = json.dumps({"inputs": [tensor]}).encode()
        head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        return address.port or 0, head.encode() + body

    def _start_again(self, index: int) -> None:
        _kill(self.processes[index])
        self.processes[index] = self._programs[index].start()
        self._programs[index].wait(self.processes[index])

    def _stubs(self, index: int) -> list[psutil.Process]:
        """The instances of a server that are alive."""
        found = []
        for child in psutil.Process(self.processes[index].pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith(_STUB[:15]) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found


_OPTIONS = {"name": "net", "backend": "python", "instances": INSTANCES, "threads": 1, "max_batch_size": 16}


@contextmanager
def triton(python: Path, paths: Sequence[Path], folder: Path, environment: Mapping[str, str]) -> Iterator[Triton]:
    """The servers, ready, with the first of ``paths``."""
    nnorm_export.write_repository(paths[0], folder / "models", **_OPTIONS)
    programs = []
    for index in range(SERVERS):
        (folder / f"server{index}").mkdir()
        memory = f"--backend-config=python,shm-region-prefix-name=nnorm_failures_{os.getpid()}_{index}_"
        options = ["--model-control-mode=explicit", "--load-model=net", memory]
        programs.append(program(python, folder / "models", folder / f"server{index}", environment, options))
    with ExitStack() as stack:
        stack.callback(_remove_memory)
        servers = Triton(programs, paths, folder / "models")
        stack.callback(lambda: [_kill(process) for process in servers.processes])
        yield servers


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The server and its instances, which are of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove_memory() -> None:
    """Shared memory that killed servers left."""
    for left in Path("/dev/shm").glob(f"nnorm_failures_{os.getpid()}_*"):
        left.unlink()


def _ask(runner: nnorm_export.Runner) -> Ask:
    def ask(images: Array) -> tuple[Array, str]:
        try:
            return runner(images)[0], ""
        except nnorm_export.ModelFileError as error:  # an InputError would come again
            raise AttemptFailed(str(error)) from error

    return ask


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60) as answer:
        answer.read()


def _versions(server: Program) -> list[str]:
    with urllib.request.urlopen(f"{server.address.http}/v2/models/net", timeout=TIMEOUT) as answer:
        versions: list[str] = json.load(answer)["versions"]
        return versions

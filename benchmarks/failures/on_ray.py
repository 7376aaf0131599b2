"""samples/ray/serve.py on two local nodes, a replica on each, and a client of its HTTP address."""

from __future__ import annotations

import http.client
import io
import os
import random
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from benchmarks.failures.client import TIMEOUT, Ask, AttemptFailed, Log
from benchmarks.failures.models import SHAPE
from nnorm_export.dtypes import Array

SAMPLE = Path(__file__).parents[2] / "samples" / "ray" / "serve.py"
REPLICAS = 2
_PORT = 8123
_REPLICA = "ray::ServeReplica"
_DOWN = 3.0  # seconds from the end of a node to the start of its successor
_START = 150  # seconds


class Ray:
    """The :class:`.disturbances.Service` of the cluster."""

    def __init__(self, python: Path, paths: Sequence[Path], folder: Path, environment: Mapping[str, str]) -> None:
        self._python, self._paths, self._environment = python, paths, {**os.environ, **environment}
        self._log = (folder / "ray.log").open("w")
        self.nodes = subprocess.Popen(
            [python, Path(__file__).with_name("ray_nodes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
        )
        self._address, raylet = self._told().split()
        self._raylet = int(raylet)
        self.replace(0)

    def asks(self) -> list[Ask]:
        return [_ask]

    def kill_replica(self, random: random.Random, wait: Callable[[], None]) -> str:
        victim = random.choice(_replicas())
        wait()
        victim.kill()
        victim.wait()
        return f"replica {victim.pid}"

    def kill_node(self, random: random.Random, wait: Callable[[], None]) -> str:
        """SIGKILL to all processes of the second node, and after seconds another node."""
        raylet = psutil.Process(self._raylet)
        processes = [raylet, *raylet.children(recursive=True)]
        wait()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_DOWN)
        assert self.nodes.stdin
        print(file=self.nodes.stdin, flush=True)
        what, self._raylet = f"node of raylet {self._raylet}, {len(processes)} processes", int(self._told())
        return what

    def replace(self, version: int) -> None:
        """The command that a user gives: it returns when all replicas have the new file."""
        options = ["--replicas", str(REPLICAS), "--threads", "1", "--max-batch", "16", "--port", str(_PORT)]
        subprocess.run(
            [self._python, SAMPLE, self._paths[version % 2], *options, "--address", self._address, "--detach"],
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
            check=True,
            timeout=_START,
        )

    def is_whole(self, log: Log, since: int) -> bool:
        """All replicas that are there have answered."""
        there = {str(replica.pid) for replica in _replicas()}
        answered = {attempt.replica for attempt in log.attempts[since:] if attempt.replica}
        return len(there) == REPLICAS and there <= answered

    def version(self) -> str:
        command = [self._python, "-c", "import ray; print(ray.__version__)"]
        return f"Ray {subprocess.check_output(command, text=True).strip()}"

    def raw(self, random: random.Random) -> tuple[int, bytes]:
        body = _body(np.array([random.gauss(0, 1) for _ in range(np.prod(SHAPE))], np.float32).reshape(1, *SHAPE))
        head = f"POST /nnorm HTTP/1.1\r\nHost: 127.0.0.1:{_PORT}\r\nContent-Length: {len(body)}\r\n\r\n"
        return _PORT, head.encode() + body

    def end(self) -> None:
        self.nodes.kill()
        self.nodes.wait()
        self._log.close()

    def _told(self) -> str:
        assert self.nodes.stdout
        line = self.nodes.stdout.readline()
        if not line:
            raise RuntimeError(f"the nodes ended:\n{Path(self._log.name).read_text()[-4000:]}")
        return line


@contextmanager
def ray(python: Path, paths: Sequence[Path], folder: Path, environment: Mapping[str, str]) -> Iterator[Ray]:
    """The cluster, which serves the first of ``paths``; its processes end with the namespace that this runs in."""
    more = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Slow machines: workers are not to be the last in the queue, nor a proxy given up while it starts.
        "RAY_raylet_start_wait_time_s": str(_START),
        "RAY_worker_niceness": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    cluster = Ray(python, paths, folder, {**environment, **more})
    try:
        yield cluster
    finally:
        cluster.end()


def _replicas() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).startswith(_REPLICA):
                found.append(process)
    return found


def _ask(images: Array) -> tuple[Array, str]:
    connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=TIMEOUT)
    try:
        connection.request("POST", "/nnorm", _body(images))
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise AttemptFailed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if answer.status >= 500 or answer.status == 404:  # 404: a proxy that has just started knows no route
        raise AttemptFailed(f"{answer.status} {content.decode(errors='replace')}")
    if answer.status != 200:
        raise RuntimeError(f"the server refuses a request: {answer.status} {content.decode(errors='replace')}")
    return np.load(io.BytesIO(content)), answer.headers["x-replica"]


def _body(images: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, images)
    return buffer.getvalue()

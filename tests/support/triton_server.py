"""A real tritonserver, the one that nvidia-pytriton carries, serving a model repository on this machine alone.

It has the Python backend only. The environment that it runs in is made by ``make test-serving``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 90


@dataclass(frozen=True)
class Server:
    """Its addresses: ``http://127.0.0.1:PORT`` and ``grpc://…``."""

    http: str
    grpc: str


@dataclass(frozen=True)
class Program:
    """A tritonserver that can be started, also again after it was killed: it keeps its ports.

    Attributes:
        log: of all starts.
    """

    command: Sequence[str | Path]
    variables: Mapping[str, str]
    address: Server
    log: Path

    def start(self) -> subprocess.Popen[bytes]:
        """The process, in a session of its own with its stubs."""
        with self.log.open("a") as stream:
            return subprocess.Popen(
                self.command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Returns when it is ready."""
        _wait(process, f"{self.address.http}/v2/health/ready", self.log)


def program(
    python: Path, repository: Path, folder: Path, environment: Mapping[str, str], options: Sequence[str] = ()
) -> Program:
    """With the environment of the interpreter ``python``; ``folder`` is its scratch folder.

    Args:
        options: further ones of its command line.
    """
    libraries = subprocess.check_output(
        [python, "-c", "import sysconfig, pytriton; print(sysconfig.get_config_var('LIBDIR'), *pytriton.__path__)"],
        text=True,
    ).split()
    triton = Path(libraries[1]) / "tritonserver"
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    # Links, not copies: the backend looks for its files in the folder that it was loaded from.
    for source in (
        triton / "backends" / "python" / "libtriton_python.so",
        triton / "backends" / "python" / "triton_python_backend_utils.py",
        triton / "python_backend_stubs" / version.strip() / "triton_python_backend_stub",
    ):
        (backend / source.name).symlink_to(source)
    http, grpc = _free_port(), _free_port()
    command = [
        triton / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={backend.parent}",
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc}",
        "--allow-metrics=false",
        *options,
    ]
    variables = {
        **environment,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": libraries[0],
    }
    address = Server(f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}")
    return Program(command, variables, address, folder / "server.log")


@contextmanager
def serving(
    python: Path, repository: Path, folder: Path, environment: Mapping[str, str], *options: str
) -> Iterator[Server]:
    """The server, ready; see :func:`program`."""
    runs = program(python, repository, folder, environment, options)
    process = runs.start()
    try:
        runs.wait(process)
        yield runs.address
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server is not ready:\n{log.read_text()[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

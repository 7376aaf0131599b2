"""The overhead of a server: ResNet18 through Triton's Python backend or Ray Serve, beside the session alone.

python -m benchmarks.serving triton|ray --python PYTHON [--clients N] [--seconds S] [--write]

PYTHON is the interpreter of the server's environment. Server and client share this machine.
"""

from __future__ import annotations

import argparse
import io
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from namespaces import bring_up_loopback
from numpy.typing import NDArray
from triton_server import serving

import nnorm_export
from benchmarks.measure import describe_machine, markdown_table, time_in_turns, write_section
from benchmarks.networks import NETWORKS, build
from nnorm_export import library

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "serving.md"
TITLES = {"triton": "Triton, Python backend", "ray": "Ray Serve"}
TEXT = """
ResNet18 with BatchNormalNorm, the portable file with kernels, images of 3 × 32 × 32, one thread in each session.
*Alone* is the session in the client's own process; requests to it and to the server take turns, {count} of each. *Adds*
is the median of the differences within one turn, in brackets as a share of the session's own time. Server and client
share the cores.

{one}
Processor time of a request of one image in the server's processes: {processes}.

{clients} clients at once, for {seconds:g} seconds: each has one image in a request, and asks again when it has the
answer. The server combines requests into batches; the session alone runs batches of {clients}.

{many}
"""

Array = NDArray[Any]
Ask = Callable[[Array], Array]  # images -> logits


@contextmanager
def triton(python: Path, model: Path, folder: Path) -> Iterator[Callable[[], Ask]]:
    nnorm_export.write_repository(model, folder / "models", name="net", backend="python", threads=1)
    with serving(python, folder / "models", folder, _environment()) as server:

        def client() -> Ask:
            runner = nnorm_export.load(f"{server.grpc}/net")
            return lambda images: runner(images)[0]

        yield client


@contextmanager
def ray(python: Path, model: Path, folder: Path) -> Iterator[Callable[[], Ask]]:
    bring_up_loopback()
    environment = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_worker_niceness": "0",  # otherwise the clients, which share the processor, would have priority
    }
    command = [python, ROOT / "samples" / "ray" / "serve.py", model, "--replicas", "1", "--threads", "1"]
    log = folder / "serve.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env={**os.environ, **_environment(), **environment},
        )
    try:
        assert server.stdout
        if "serving" not in server.stdout.readline():
            raise SystemExit(f"Ray Serve did not start:\n{log.read_text()[-4000:]}")
        yield lambda: _ask_ray
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _ask_ray(images: Array) -> Array:
    body = io.BytesIO()
    np.save(body, images)
    with urllib.request.urlopen("http://127.0.0.1:8000/nnorm", data=body.getvalue(), timeout=30) as answer:
        logits: Array = np.load(io.BytesIO(answer.read()))
        return logits


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "NNORM_EXPORT_LIBRARY": library.get_library_path()}


SERVERS: dict[str, Callable[[Path, Path, Path], AbstractContextManager[Callable[[], Ask]]]] = {
    "triton": triton,
    "ray": ray,
}


def one_client(server: Ask, alone: Ask, batches: Sequence[int], count: int) -> list[list[str]]:
    """A table: one request after the other, to the session and to the server in turn."""
    lines = [["images in a request", "alone p50", "alone p99", "server p50", "server p99", "adds"]]
    for batch in batches:
        images = _images(batch)
        asks = {"alone": partial(alone, images), "server": partial(server, images)}
        seconds = {name: timing.seconds for name, timing in time_in_turns(asks, base="alone", repeats=count).items()}
        own = statistics.median(seconds["alone"])
        adds = statistics.median(np.subtract(seconds["server"], seconds["alone"]))
        figures = (_milliseconds(seconds[name], share) for name in asks for share in (50, 99))
        lines.append([str(batch), *figures, f"{1000 * adds:.2f} ms ({adds / own:.0%})"])
    return lines


def processor_times(server: Ask, count: int) -> str:
    """The processes of the server that work for a request of one image, each with its milliseconds of a processor."""
    images, before = _images(1), _seconds_of_children()
    for _ in range(count):
        server(images)
    spent = {child: seconds - before.get(child, 0) for child, seconds in _seconds_of_children().items()}
    most = sorted(spent.items(), key=lambda item: -item[1])
    shown = [f"{name} {1000 * seconds / count:.1f} ms" for (_, name), seconds in most if 1000 * seconds / count >= 0.5]
    return ", ".join(shown)


def _seconds_of_children() -> dict[tuple[int, str], float]:
    """(id, title) of each child process -> the seconds of a processor that it has used."""
    seconds = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            times, (title, *_) = child.cpu_times(), [*child.cmdline(), child.name()]
            seconds[child.pid, Path(title).name.strip()] = times.user + times.system
    return seconds


def many_clients(client: Callable[[], Ask], alone: Ask, clients: int, seconds: float) -> list[list[str]]:
    """A table: images a second of the server, and of the session before and after the server."""
    before = _images_a_second(alone, clients, seconds / 2)
    taken: list[float] = []
    connected = threading.Barrier(clients)

    def go_on_asking() -> None:
        ask, images = client(), _images(1)
        ask(images)
        connected.wait(60)
        start = time.perf_counter()
        end = start + seconds
        while True:
            ask(images)
            done = time.perf_counter()
            if done > end:
                return
            taken.append(done - start)
            start = done

    threads = [threading.Thread(target=go_on_asking) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = (before + _images_a_second(alone, clients, seconds / 2)) / 2
    rate = len(taken) / seconds
    return [
        ["", "images a second", "p50", "p99"],
        ["alone", f"{own:.0f}", "", ""],
        ["server", f"{rate:.0f} ({rate / own:.2f})", _milliseconds(taken, 50), _milliseconds(taken, 99)],
    ]


def _images_a_second(ask: Ask, batch: int, seconds: float) -> float:
    images, count, start = _images(batch), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        ask(images)
        count += batch
    return count / (time.perf_counter() - start)


def _images(batch: int) -> Array:
    return np.random.default_rng(0).standard_normal((batch, 3, 32, 32)).astype(np.float32)


def _milliseconds(seconds: Sequence[float], percentile: float) -> str:
    return f"{1000 * np.percentile(seconds, percentile):.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of the server's environment")
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time (default %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="of one client, for each size (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="that many clients ask (default %(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the server's section of results/serving.md")
    options = parser.parse_args()
    network, images = NETWORKS["resnet18"], torch.from_numpy(_images(4))
    torch.manual_seed(1)
    model = build(network.build, network.ours, images).eval()
    with tempfile.TemporaryDirectory(prefix="serve", ignore_cleanup_errors=True) as folder:
        path = nnorm_export.export(model, (images,), Path(folder) / "net.onnx").path
        runner = nnorm_export.load(path, intra_op_num_threads=1)

        def alone(images: Array) -> Array:
            return runner(images)[0]

        with SERVERS[options.server](options.python.absolute(), path, Path(folder)) as client:
            ask = client()
            np.testing.assert_array_equal(ask(_images(8)), alone(_images(8)))
            one = one_client(ask, alone, (1, 8, 32), options.requests)
            processes = processor_times(ask, options.requests)
            many = many_clients(client, alone, options.clients, options.seconds)
    texts = ["\n".join(markdown_table(table)) for table in (one, many)]
    text = TEXT.format(
        count=options.requests,
        clients=options.clients,
        seconds=options.seconds,
        one=texts[0],
        many=texts[1],
        processes=processes,
    )
    section = f"Machine: {describe_machine()}.\n{text}"
    print(section)
    if options.write:
        write_section(RESULTS, TITLES[options.server], section)
        print(f"wrote {RESULTS.name}", file=sys.stderr)


if __name__ == "__main__":
    main()

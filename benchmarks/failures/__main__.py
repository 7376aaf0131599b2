"""Loads on servers whose replicas, nodes and connections are killed, and whose model is replaced meanwhile.

python -m benchmarks.failures triton|ray --python PYTHON [--minutes M] [--rounds N] [--kinds KIND …] [--qps Q]
                              [--seed N] [--json FILE] [--write]

PYTHON is the interpreter of the server's environment. Server and client share this machine; see `make bench-failures`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from threading import Event as Flag
from time import perf_counter
from typing import Any

import numpy as np
from namespaces import bring_up_loopback

from benchmarks.failures import models
from benchmarks.failures.client import Ask, Client, Log, Versions
from benchmarks.failures.disturbances import KINDS, Disturber, counts, refuse_bad_request
from benchmarks.failures.figures import Figures, figures
from benchmarks.failures.on_ray import ray
from benchmarks.failures.on_triton import triton
from benchmarks.failures.report import section
from benchmarks.measure import write_section
from nnorm_export import library
from nnorm_export.dtypes import Array
from nnorm_export.tuning.open_loop import Answers, poisson_arrivals, run_open_loop

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "failures.md"
TITLES = {"triton": "Triton, two servers with two instances each", "ray": "Ray Serve, two nodes"}
SERVERS: dict[str, Callable[..., AbstractContextManager[Any]]] = {"triton": triton, "ray": ray}
CLIENTS = 64  # connections: the requests that can wait at the servers at the same time
_CALM = 0.2  # of the time, that a load without disturbances takes before
_LAST = 25.0  # seconds before the end in which no disturbance begins, if the load has a fixed end


class Arrivals(list[float]):
    """Times that end early, when ``is_done`` is set."""

    def __init__(self, times: Sequence[float], is_done: Flag) -> None:
        super().__init__(times)
        self._is_done = is_done

    def __iter__(self) -> Iterator[float]:
        return takewhile(lambda _: not self._is_done.is_set(), super().__iter__())


class Load:
    """A load on a service: each request has one of ``rows``, in turn."""

    def __init__(self, asks: Sequence[Ask], versions: Versions, rows: Array, qps: float, seed: int) -> None:
        self._asks, self._versions, self._rows, self._qps, self._seed = asks, versions, rows, qps, seed
        self._next = 0

    def run(self, count: int, log: Log, is_done: Flag) -> Answers:
        numbers = range(self._next, self._next + count)
        self._next += count
        rows = [number % len(self._rows) for number in numbers]
        requests = [
            {"images": self._rows[row : row + 1], "number": np.array([number])}
            for row, number in zip(rows, numbers, strict=True)
        ]
        arrivals = Arrivals(poisson_arrivals(self._qps, count, self._seed + self._next), is_done)
        clients = [Client(self._asks, models.SHAPE, self._versions, log) for _ in range(CLIENTS)]
        return run_open_loop(clients, requests, arrivals)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of a load without disturbances and of one with them, and the disturbances."""
    seconds, start = 60 * options.minutes, perf_counter()

    def say(text: str) -> None:
        print(f"{perf_counter() - start:.0f} s: {text}", file=sys.stderr, flush=True)

    calm_count, count = (max(round(options.qps * length), 1) for length in (_CALM * seconds, seconds))
    paths = models.files(folder)
    rows = models.images(options.seed)
    versions = Versions(models.answers(paths, rows))
    say("the files and their answers are there")
    environment = {"PYTHONPATH": str(ROOT), "NNORM_EXPORT_LIBRARY": library.get_library_path()}
    with SERVERS[options.server](options.python.absolute(), paths, folder, environment) as service:
        load = Load(service.asks(), versions, rows, options.qps, options.seed)
        load.run(1, Log(), Flag())  # the first request opens the connections
        refuse_bad_request(service)
        version = service.version()
        say("the server answers")
        calm: Figures | None = None
        if not options.rounds:
            log = Log()
            calm = figures(load.run(calm_count - 1, log, Flag()), log, versions)
            say(f"undisturbed: {calm}")
        log = Log()
        until = perf_counter() + seconds - (0 if options.rounds else _LAST)
        disturber = Disturber(
            service,
            versions,
            log,
            options.seed,
            options.rounds or 10**6,
            until,
            gap=(1.0, 2.0) if options.rounds else (3.0, 8.0),
            kinds=options.kinds,
        )
        disturber.start()
        try:
            # With a number of rounds the load ends after them, otherwise it has its own end.
            answers = load.run(count, log, disturber.is_done)
        finally:
            disturber.is_done.set()
            disturber.join()
        disturbed = figures(answers, log, versions, disturber.events)
        say(f"disturbed: {disturbed}")
    recovery = {kind: [e.ended - e.begun for e in disturber.events if e.kind == kind] for kind in counts([])}
    return {
        "calm": calm and asdict(calm),
        "disturbed": asdict(disturbed),
        "events": counts(disturber.events),
        "cuts": dict(disturber.cuts),
        "longest_recovery": {kind: max(times, default=0.0) for kind, times in recovery.items()},
        "replicas": len({attempt.replica for attempt in log.attempts if attempt.replica}),
        "version": version,
        "qps": options.qps,
        "seed": options.seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of the server's environment")
    parser.add_argument("--minutes", type=float, default=10, help="of the load at most (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=0, help="of disturbances, after which the load ends")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of disturbances (default: all)")
    parser.add_argument("--qps", type=float, default=20, help="requests per second (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default %(default)s)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--write", action="store_true", help="replace the server's section of results/failures.md")
    options = parser.parse_args()
    if options.write and (options.rounds or len(options.kinds) < len(KINDS)):
        parser.error("--rounds and --kinds are for short runs, which are not kept; leave out --write")
    bring_up_loopback()
    with tempfile.TemporaryDirectory(prefix="fail", ignore_cleanup_errors=True) as folder:
        found = measure(options, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found))
    text = section(found)
    print(text)
    if options.write:
        write_section(RESULTS, TITLES[options.server], text)
        print(f"wrote {RESULTS.name}", file=sys.stderr)


if __name__ == "__main__":
    main()

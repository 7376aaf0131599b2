"""Kills, replacements and broken connections at random times, while a load runs."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from benchmarks.failures.client import Log, Versions

KINDS = ("replica", "replacement", "node")
_CUT_EVERY = 2.0  # seconds between broken connections, in the mean
_HELD = 3.0  # seconds that a client holds a connection that it does not use
_WAITING = 2  # requests without an answer at the time of a kill
_LONGEST_WAIT = 10.0  # seconds for so many
CUTS = ("half a request, closed", "half a request, held", "an answer not read")


class Service(Protocol):
    """What the servers offer to the disturbances."""

    def kill_replica(self, random: random.Random, wait: Callable[[], None]) -> str:
        """SIGKILL to one replica as soon as ``wait`` returns; returns what was killed."""

    def kill_node(self, random: random.Random, wait: Callable[[], None]) -> str:
        """SIGKILL to all processes of a node as soon as ``wait`` returns, after seconds a new node."""

    def replace(self, version: int) -> None:
        """Returns when the server has only the model of this version."""

    def is_whole(self, log: Log, since: int) -> bool:
        """Whether all replicas answer; ``log`` has the attempts, those from ``since`` on are after the disturbance."""

    def version(self) -> str:
        """Of the server's software."""

    def raw(self, random: random.Random) -> tuple[int, bytes]:
        """A port, and the bytes of a whole HTTP request to it."""


@dataclass(frozen=True)
class Event:
    """One disturbance, and how long it took until the server was whole."""

    kind: str
    what: str
    begun: float
    ended: float


@dataclass
class Disturber:
    """Disturbs ``service`` in a thread: in each round one of each of ``kinds``, in another order.

    The next begins when the server is whole again, so that a failure can be assigned to one disturbance.

    Args:
        rounds: the most of them.
        is_done: is set after the rounds, and ends the load; or by the load, which ends the disturbances.
        until: time of ``perf_counter()``, after which none begins.
        gap: the least and the greatest seconds before each.
    """

    service: Service
    versions: Versions
    log: Log
    seed: int
    rounds: int
    until: float
    gap: tuple[float, float]
    kinds: Sequence[str] = KINDS
    events: list[Event] = field(default_factory=list)
    cuts: Counter[str] = field(default_factory=Counter)
    is_done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        executor = ThreadPoolExecutor()
        self._parts = [executor.submit(self._guarded, part) for part in (self._disturb, self._cut)]
        executor.shutdown(wait=False)

    def join(self) -> None:
        """Waits for the end of the disturbances; raises the error that one of them met."""
        wait(self._parts)
        for part in self._parts:
            part.result()

    def _guarded(self, part: Callable[[], None]) -> None:
        """Runs ``part``, whose error ends the load."""
        try:
            part()
        except BaseException:  # join() raises it
            self.is_done.set()
            raise

    def _disturb(self) -> None:
        chance = random.Random(self.seed)
        for _ in range(self.rounds):
            for kind in chance.sample(self.kinds, len(self.kinds)):
                if self.is_done.wait(chance.uniform(*self.gap)) or perf_counter() > self.until:
                    return  # the load has an end of its own
                self._do(kind, chance)
        self.is_done.set()

    def _do(self, kind: str, chance: random.Random) -> None:
        since, begun = len(self.log.attempts), perf_counter()
        if kind == "replacement":
            version = len(self.versions.begun)
            self.versions.begun.append(begun)
            self.service.replace(version)
            self.versions.ended.append(perf_counter())
            what = f"version {version}"
        else:
            kill = self.service.kill_replica if kind == "replica" else self.service.kill_node
            what = kill(chance, self._wait_for_requests)
        deadline = time.monotonic() + 120
        while not self.service.is_whole(self.log, since):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {what} the server was not whole again in 120 seconds")
            time.sleep(0.1)
        self.events.append(Event(kind, what, begun, perf_counter()))

    def _wait_for_requests(self) -> None:
        """Until the clients wait for answers: a kill between requests would show nothing."""
        deadline = time.monotonic() + _LONGEST_WAIT
        while len(self.log.waiting) < _WAITING and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _cut(self) -> None:
        chance = random.Random(self.seed + 1)
        held: list[tuple[float, socket.socket]] = []
        while not self.is_done.wait(chance.expovariate(1 / _CUT_EVERY)):
            kind = chance.choice(CUTS)
            port, request = self.service.raw(chance)
            with suppress(OSError):  # the server that was chosen is down
                connection = _sent(port, request if kind == CUTS[2] else request[: len(request) - 100], kind)
                self.cuts[kind] += 1
                if connection:
                    held.append((perf_counter(), connection))
            for begun, connection in list(held):
                if perf_counter() - begun > _HELD:
                    held.remove((begun, connection))
                    connection.close()
        for _, connection in held:
            connection.close()


def refuse_bad_request(service: Service) -> None:
    """Raises an error unless the server answers the whole of the request that the cuts send parts of."""
    port, request = service.raw(random.Random(0))
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(request)
        if b" 200 " not in (status := connection.recv(100).partition(b"\r\n")[0]):
            raise AssertionError(f"the server answers {status!r} to the request that is to be cut")


def _sent(port: int, request: bytes, kind: str) -> socket.socket | None:
    """Sends ``request``; returns the connection if it stays open."""
    connection = socket.create_connection(("127.0.0.1", port), 2)
    connection.sendall(request)
    # Closed with an RST, as a process that is killed with bytes unread does.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if kind == CUTS[0]:
        connection.close()
        return None
    return connection


def counts(events: Sequence[Event]) -> Mapping[str, int]:
    """How many there were of each of :data:`KINDS`."""
    return {kind: sum(event.kind == kind for event in events) for kind in KINDS}

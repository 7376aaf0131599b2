"""benchmarks/failures: what counts as lost, wrong and sent again, without a server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.failures import client, disturbances, on_ray
from benchmarks.failures.__main__ import Arrivals
from benchmarks.failures.client import Ask, Attempt, AttemptFailed, Client, Log, Versions
from benchmarks.failures.disturbances import Disturber, Event
from benchmarks.failures.figures import figures
from benchmarks.failures.report import section
from nnorm_export.dtypes import Array
from nnorm_export.tuning.open_loop import Answers, run_open_loop

OLD, NEW = np.zeros((3, 2), np.float32), np.ones((3, 2), np.float32)
IMAGE = np.zeros((1, 2), np.float32)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.0)


def ask_once(number: int, answers: Sequence[Array | AttemptFailed], versions: Versions | None = None) -> Log:
    """What a client notes of a request to which the servers answer in this order, the last one for ever."""
    left = list(answers)

    def ask(images: Array) -> tuple[Array, str]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, AttemptFailed):
            raise answer
        return answer, "7"

    log = Log()
    Client([ask], (2,), versions or Versions([OLD, NEW]), log)(IMAGE, np.array([number]))
    assert not log.waiting
    return log


def test_a_request_is_sent_again_after_a_failure() -> None:
    log = ask_once(4, [AttemptFailed("500"), AttemptFailed("reset"), OLD[:1]])
    assert [attempt.problem for attempt in log.attempts] == ["500", "reset", ""]
    assert log.attempts[-1].replica == "7"
    assert (log.lost, log.wrong) == ([], [])


def test_a_request_without_an_answer_is_lost() -> None:
    log = ask_once(4, [AttemptFailed("500")])
    assert (log.lost, len(log.attempts)) == ([4], client.ATTEMPTS)


@pytest.mark.parametrize(
    "answer", [OLD[:1] + 1e-3, OLD[:1] * np.nan, OLD[:2], OLD[0], np.zeros((1, 3), np.float32)], ids=str
)
def test_a_wrong_answer(answer: Array) -> None:
    log = ask_once(4, [answer])
    assert (log.wrong, log.stale) == ([4], [])


def test_the_rows_of_another_request_are_wrong() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert not ask_once(4, [rows[1:2]], Versions([rows, rows + 9])).wrong
    assert ask_once(4, [rows[2:3]], Versions([rows, rows + 9])).wrong == [4]


def test_both_models_are_right_during_a_replacement_alone() -> None:
    before = Versions([OLD, NEW])
    during = Versions([OLD, NEW], begun=[-np.inf, 0.0])
    after = Versions([OLD, NEW], begun=[-np.inf, 0.0], ended=[-np.inf, 1.0])
    wrong = {
        name: [bool(ask_once(0, [rows[:1]], versions).stale) for rows in (OLD, NEW)]
        for name, versions in {"before": before, "during": during, "after": after}.items()
    }
    assert wrong == {"before": [False, True], "during": [False, False], "after": [True, False]}


def test_attempts_that_began_before_the_end_of_a_replacement_may_have_the_old_model() -> None:
    versions = Versions([OLD, NEW], begun=[-np.inf, 10.0], ended=[-np.inf, 20.0])

    def allowed(sent: float, ended: float) -> list[float]:
        return [float(rows[0, 0]) for rows in versions.allowed(sent, ended)]

    assert [allowed(1, 2), allowed(9, 11), allowed(19, 21), allowed(21, 22)] == [[0], [0, 1], [0, 1], [1]]


def test_each_attempt_is_made_at_the_next_server() -> None:
    asked = []

    def down(images: Array) -> tuple[Array, str]:
        asked.append("down")
        raise AttemptFailed("down")

    def up(images: Array) -> tuple[Array, str]:
        asked.append("up")
        return OLD[:1], ""

    for number in range(2):
        Client([down, up], (2,), Versions([OLD, NEW]), Log())(IMAGE, np.array([number]))
    assert asked == ["down", "up", "up"]


def test_figures() -> None:
    log = Log(
        [
            Attempt(0, 0.0, 0.1),
            Attempt(1, 1.0, 1.1, problem="http://127.0.0.1:80/net: [500] stub 17 is dead"),
            Attempt(1, 1.2, 1.3, problem="http://127.0.0.1:81/net: [500] stub 18 is dead"),
            Attempt(1, 1.4, 1.5),
            Attempt(2, 3.0, 3.5),
        ],
        lost=[3],
        wrong=[2],
    )
    answers = Answers(np.array([0.1, 0.5, 0.5, 9.0]), np.zeros(4), 4.0, False)
    found = figures(answers, log, Versions([OLD, NEW]), [Event("replacement", "version 1", 1.25, 2.0)])
    assert (found.requests, found.lost, found.wrong, found.retried) == (4, 1, 1, 1)
    assert found.failed == {"[N] stub N is dead": 2}
    assert found.failed_in_replacements == 1
    assert (found.p50_ms, found.max_ms, found.longest_gap) == (500, 9000, 2.0)


class Fake:
    """A service that dies and comes back at once."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def kill_replica(self, random: random.Random, wait: Callable[[], None]) -> str:
        wait()
        self.done.append("replica")
        return "replica 1"

    def kill_node(self, random: random.Random, wait: Callable[[], None]) -> str:
        wait()
        self.done.append("node")
        return "node 1"

    def replace(self, version: int) -> None:
        if version > 2:
            raise RuntimeError("no third version")
        self.done.append(f"version {version}")

    def is_whole(self, log: Log, since: int) -> bool:
        return True

    def version(self) -> str:
        return "1"

    def raw(self, random: random.Random) -> tuple[int, bytes]:
        return 9, b"a request"


@pytest.mark.slow
def test_disturbances_come_in_rounds_and_end_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbances, "_LONGEST_WAIT", 0.2)
    log, service, versions = Log(), Fake(), Versions([OLD, NEW])
    disturber = Disturber(service, versions, log, 0, rounds=2, until=np.inf, gap=(0.0, 0.1))

    def ask(images: Array) -> tuple[Array, str]:
        time.sleep(0.01)
        return versions.expected[len(versions.ended) % 2 - 1][:1], ""

    clients = [Client([ask], (2,), versions, log) for _ in range(4)]
    disturber.start()
    requests = [{"images": IMAGE, "number": np.array([number])} for number in range(3)]
    answers = run_open_loop(clients, requests, Arrivals([0.01 * n for n in range(6000)], disturber.is_done))
    disturber.join()
    assert disturbances.counts(disturber.events) == {"replica": 2, "replacement": 2, "node": 2}
    assert sorted(service.done) == ["node", "node", "replica", "replica", "version 1", "version 2"]
    assert 0 < len(answers.latencies) < 6000
    assert not log.wrong


def test_an_error_of_a_disturbance_is_raised() -> None:
    disturber = Disturber(
        Fake(), Versions([OLD, NEW]), Log(), 0, 3, until=np.inf, gap=(0.0, 0.0), kinds=("replacement",)
    )
    disturber.start()
    with pytest.raises(RuntimeError, match="no third version"):
        disturber.join()


class Server(BaseHTTPRequestHandler):
    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.status:
            self.send_response(self.status)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"text")

    def log_message(self, *arguments: object) -> None:
        return


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(0, AttemptFailed, "RemoteDisconnected"), (500, AttemptFailed, "500 text"), (400, RuntimeError, "400 text")],
)
def test_what_is_sent_again_to_ray(
    status: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "status", status)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    monkeypatch.setattr(on_ray, "_PORT", server.server_address[1])
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    ask: Ask = on_ray._ask
    try:
        with pytest.raises(error, match=message):
            ask(IMAGE)
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(AttemptFailed, match="ConnectionRefusedError"):
        ask(IMAGE)


def test_the_section_of_the_results() -> None:
    log = Log([Attempt(0, 0.0, 0.1, problem="500"), Attempt(0, 0.2, 0.3)])
    answers = Answers(np.array([0.3]), np.zeros(1), 1.0, False)
    load = asdict(figures(answers, log, Versions([OLD, NEW])))
    times = dict.fromkeys(disturbances.KINDS, 1.5)
    text = section(
        {
            "calm": None,
            "disturbed": load,
            "events": {"replica": 2, "replacement": 3, "node": 4},
            "cuts": {"held": 5},
            "longest_recovery": times,
            "version": "Server 1",
            "qps": 20.0,
            "seed": 6,
        }
    )
    for line in (
        "| lost | 0 |",
        "| sent more than once | 1 |",
        "| node killed | 4 | 1.5 s |",
        "- 1 × `N`",
        "Server 1.",
    ):
        assert line in text

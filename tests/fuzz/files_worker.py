"""Cases in forked processes, which may end by a signal, run without end or use up memory."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from files_run import CASE, OUTSIDE, SECRET, Outcome, execute

_MEMORY = 3 * 2**30  # beyond what a worker has when it starts
_CASES = 1500  # of a worker; a new one takes over


@dataclass
class _Worker:
    pid: int
    pipe: int
    folder: Path
    case: int | None = None
    used: float = 0.0
    asleep: float = 0.0  # since when it waits, and the processor time that it had used then
    used_asleep: float = 0.0
    rest: bytes = b""
    waiting: list[int] = field(default_factory=list)


def run_cases(
    cases: Iterable[int],
    prepare: Callable[[int, Path], None],
    *,
    jobs: int = 1,
    keep: Path | None = None,
    seconds: float = 20.0,
) -> Iterator[tuple[int, Outcome]]:
    """Yields each case with its outcome, ``crash`` and ``hang`` included.

    Args:
        keep: a folder that findings are copied into.
        seconds: a case that takes more processor time hangs, and so does one that waits for as long.
    """
    left = list(cases)[::-1]
    base = Path(tempfile.mkdtemp(prefix="fuzz-"))
    workers: list[_Worker] = []
    try:
        while left or workers:
            while left and len(workers) < jobs:
                taken = [left.pop() for _ in range(min(_CASES, max(1, -(-len(left) // jobs))))]
                workers.append(_start(taken, prepare, base))
            ready, _, _ = select.select([worker.pipe for worker in workers], [], [], 1.0)
            for worker in list(workers):
                finished, outcomes = _read(worker) if worker.pipe in ready else (False, [])
                yield from ((case, _kept(outcome, case, worker, keep)) for case, outcome in outcomes)
                if not finished and worker.case is not None and _hangs(worker, seconds):
                    os.kill(worker.pid, signal.SIGKILL)
                    finished = True
                if finished:
                    workers.remove(worker)
                    yield from _buried(worker, left, keep)
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
        shutil.rmtree(base, ignore_errors=True)


def _start(cases: list[int], prepare: Callable[[int, Path], None], base: Path) -> _Worker:
    folder = Path(tempfile.mkdtemp(dir=base))
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            _work(cases, prepare, folder, writing)
            status = 0
        finally:
            os._exit(status)  # neither pytest nor the parent's handlers run in the child
    os.close(writing)
    return _Worker(pid, reading, folder, waiting=cases)


def _work(cases: list[int], prepare: Callable[[int, Path], None], base: Path, pipe: int) -> None:
    """What a worker does: each case in a folder of its own, said before and after on ``pipe``."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # libraries print by themselves
        os.dup2(nothing, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for case in cases:
        os.write(pipe, f"{json.dumps({'start': case})}\n".encode())
        folder = base / "case"
        _empty(base)
        (base / OUTSIDE).write_bytes(SECRET)
        folder.mkdir()
        prepare(case, folder)
        outcome = execute(folder)
        os.write(pipe, f"{json.dumps({'case': case, **asdict(outcome)})}\n".encode())
        if outcome.kind in ("traceback", "wrong"):
            os.write(pipe, b"\n")
            _wait_for_copy(folder)


def _wait_for_copy(folder: Path) -> None:
    """Waits until the parent has copied a finding, of which this file is the sign."""
    until = time.monotonic() + 20
    while not (folder / ".copied").exists() and time.monotonic() < until:
        time.sleep(0.005)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _read(worker: _Worker) -> tuple[bool, list[tuple[int, Outcome]]]:
    data = os.read(worker.pipe, 2**16)
    *lines, worker.rest = (worker.rest + data).split(b"\n")
    outcomes = []
    for line in filter(None, lines):
        message = json.loads(line)
        if "start" in message:
            worker.case, worker.used, worker.asleep = message["start"], _seconds(worker.pid), 0.0
        else:
            worker.waiting.remove(message["case"])
            worker.case = None
            outcomes.append((message.pop("case"), Outcome(**message)))
    return not data, outcomes


def _state(pid: int) -> tuple[str, float]:
    """The state of a process, ``R`` for one that runs or could, and its processor time so far."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0.0
    return parts[0], (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def _seconds(pid: int) -> float:
    return _state(pid)[1]


def _hangs(worker: _Worker, limit: float) -> bool:
    state, seconds = _state(worker.pid)
    if state != "S":
        worker.asleep = 0.0
    elif not worker.asleep or seconds - worker.used_asleep > 0.05:
        worker.asleep, worker.used_asleep = time.monotonic(), seconds
    waits = bool(worker.asleep) and time.monotonic() - worker.asleep > limit
    return waits or seconds - worker.used > limit


def _buried(worker: _Worker, left: list[int], keep: Path | None) -> Iterator[tuple[int, Outcome]]:
    """The outcome of the case that ended the worker, if one did; its other cases wait for the next worker."""
    os.close(worker.pipe)
    _, status = os.waitpid(worker.pid, 0)
    case, killed = worker.case, os.WIFSIGNALED(status)
    if case is not None or os.waitstatus_to_exitcode(status) != 0:
        by = f"signal {os.WTERMSIG(status)}" if killed else f"exit {os.waitstatus_to_exitcode(status)}"
        is_hang = killed and os.WTERMSIG(status) == signal.SIGKILL
        family, command = "unknown", "unknown"
        if (worker.folder / "case" / CASE).is_file():
            described = json.loads((worker.folder / "case" / CASE).read_text())
            family, command = described["family"], " ".join(described["command"])
        if case in worker.waiting:
            worker.waiting.remove(case)
        outcome = Outcome("hang" if is_hang else "crash", family, command, f"ended by {by}")
        number = -1 if case is None else case
        yield number, _kept(outcome, number, worker, keep)
    left.extend(worker.waiting[::-1])
    shutil.rmtree(worker.folder, ignore_errors=True)


def _kept(outcome: Outcome, case: int, worker: _Worker, keep: Path | None) -> Outcome:
    folder = worker.folder / "case"
    if outcome.kind in ("clean", "right") or not folder.is_dir():
        return outcome
    if keep is not None:
        target = keep / f"{outcome.kind}-{outcome.family.replace(' ', '-')}-{case}"
        shutil.rmtree(target, ignore_errors=True)
        ignored = shutil.ignore_patterns("repository", "__pycache__")
        shutil.copytree(folder, target, ignore=lambda at, names: ignored(at, names) | _odd(at, names))
        links = {str(path.relative_to(folder)): os.readlink(path) for path in folder.rglob("*") if path.is_symlink()}
        if links:  # in words: nothing that reads the kept files follows them
            case_of = json.loads((target / CASE).read_text())
            (target / CASE).write_text(json.dumps(case_of | {"links": links}))
        (target / "outcome.txt").write_text(outcome.detail)
    (folder / ".copied").touch()
    return outcome


def _odd(folder: str, names: list[str]) -> set[str]:
    """What is not copied: links, pipes and devices."""
    paths = [Path(folder) / name for name in names]
    return {path.name for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())}

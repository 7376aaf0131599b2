"""Parts of a long run: each ends with one line, and a table of all of them ends the run."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# The closing lines of pytest, ctest, ruff and mypy.
CLOSING = re.compile(
    r"(\d+ (?:passed|failed|skipped|error)[^=\n]*?) in [\d.]+"
    r"|(\d+% tests passed[^\n]*)|(All checks passed)|(Success: [^\n]*)"
)
_printing = threading.Lock()


@dataclass(frozen=True)
class Part:
    """A command; it starts when the parts named in ``after`` have ended, and is left out if one of them failed."""

    name: str
    command: Sequence[str]
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Outcome:
    name: str
    outcome: str
    seconds: float = 0.0
    said: str = ""

    def __str__(self) -> str:
        return f"{self.name:<26} {self.seconds:6.0f} s  {self.outcome:<9} {self.said}".rstrip()


def closing_line(output: str) -> str:
    """The closing line of the tests; "" if there is no known one."""
    found = [next(filter(None, match.groups())) for match in CLOSING.finditer(output)]
    return "; ".join(found[-2:])


def run(part: Part, log: Path) -> Outcome:
    """Run a part. Its output goes to ``log``, and is printed if the part fails."""
    start = time.monotonic()
    with log.open("wb") as stream:
        code = subprocess.call(
            part.command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=part.environment
        )
    output = log.read_text(errors="replace")
    outcome = Outcome(part.name, "FAILED" if code else "passed", time.monotonic() - start, closing_line(output))
    with _printing:
        if code:
            print(f"\n---- {part.name} failed, exit code {code}: {' '.join(part.command)}\n{output}\n----")
        print(outcome, flush=True)
    return outcome


def run_all(parts: Sequence[Part], folder: Path, jobs: int) -> int:
    """Run ``parts``, ``jobs`` at a time, in their order; return the exit code of the whole.

    A part that waits for another part does not occupy a job: the next part that can start runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    changed = threading.Condition()
    waiting = list(parts)

    def next_part() -> Part | None:
        with changed:
            while waiting:
                for part in waiting:
                    if all(name in outcomes for name in part.after):
                        waiting.remove(part)
                        return part
                changed.wait()
            return None

    def work() -> None:
        while (part := next_part()) is not None:
            failed = [name for name in part.after if outcomes[name].outcome != "passed"]
            if failed:
                outcome = Outcome(part.name, "left out", said=f"because {', '.join(failed)} did not pass")
                print(outcome, flush=True)
            else:
                try:
                    outcome = run(part, folder / f"{part.name}.log")
                except OSError as error:  # the program is missing, or the disk is full
                    outcome = Outcome(part.name, "FAILED", said=str(error))
                    print(outcome, flush=True)
            with changed:
                outcomes[part.name] = outcome
                changed.notify_all()

    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(work) for _ in range(jobs)]
        try:
            for worker in workers:
                worker.result()
        except BaseException:  # Ctrl-C has ended the running parts; no other part starts
            with changed:
                waiting.clear()
                changed.notify_all()
            raise
    print("\n" + "\n".join(str(outcomes[part.name]) for part in parts))
    failed = sum(outcome.outcome != "passed" for outcome in outcomes.values())
    print(f"{len(parts)} parts, {failed} not passed, {time.monotonic() - start:.0f} s; their output is in {folder}/")
    return 1 if failed else 0


def unknown_names(parts: Sequence[Part]) -> list[str]:
    """The names in ``after`` that no part has, for which a run would wait forever."""
    known = {part.name for part in parts}
    return sorted({name for part in parts for name in part.after} - known)

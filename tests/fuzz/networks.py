"""Differential testing: random networks, run by every backend, held against float64.

    python tests/fuzz/networks.py --count 3000 --seed 0 --jobs 2  # resumes where it was stopped
    python tests/fuzz/networks.py --show 17      # one network: its spec, its layers, its results
    python tests/fuzz/networks.py --shrink 17    # its smallest network with a fault of the same kind
    python tests/fuzz/networks.py --figures      # the figures so far, as results/fuzz.md has them

Each network is one line of the results' file. The networks run in processes of their own, so that a crash or a hang of
a runtime is a finding and not the end.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from fuzz.networks_backends import run
from fuzz.networks_build import build
from fuzz.networks_spec import Spec, random_spec, smaller
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HANG = 300.0  # seconds without an answer
WORKER = [sys.executable, __file__, "--worker"]
RENEWED_EVERY = 150  # networks of one process: torch's exporter keeps some memory of each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="networks, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--results", type=Path, default=Path("build/fuzz/networks.jsonl"), help="a line per network")
    parser.add_argument("--again", action="store_true", help="run seeds whose results had faults again")
    parser.add_argument("--show", type=int, metavar="SEED", help="run one network and print it")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="find a smaller network with the fault")
    parser.add_argument("--figures", action="store_true", help="print the figures of the results' file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work()
    if args.show is not None:
        return show(args.show)
    if args.shrink is not None:
        return shrink(args.shrink)
    if not args.figures:
        drive(args)
    results = list(read(args.results).values())
    print(figures(results))
    faulty = [result for result in results if result["faults"]]
    for result in faulty:
        print(result["spec"], *(f"  {backend}: {fault[:300]}" for backend, fault in result["faults"].items()), sep="\n")
    return int(bool(faulty))


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Seed -> its last result."""
    lines = path.read_text().splitlines() if path.exists() else []
    results = [json.loads(line) for line in lines if line.endswith("}")]  # the last may have been cut off
    return {result["seed"]: result for result in results}


def drive(args: argparse.Namespace) -> None:
    args.results.parent.mkdir(parents=True, exist_ok=True)
    done = read(args.results)
    kept = {seed for seed, result in done.items() if not (args.again and result["faults"])}
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    waiting = [seed for seed in range(args.seed, args.seed + args.count) if seed not in kept]
    for seed in waiting:
        seeds.put(seed)
    columns = (TextColumn("networks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[faults]} with faults"))  # fmt: skip
    lock, faults = threading.Lock(), 0
    with args.results.open("a") as file, Progress(*columns) as progress:
        task = progress.add_task("", total=args.count, completed=args.count - len(waiting), faults=0)

        def keep(result: dict[str, Any]) -> None:
            nonlocal faults
            with lock:
                file.write(json.dumps(result) + "\n")
                file.flush()
                faults += bool(result["faults"])
                progress.update(task, advance=1, faults=faults)

        threads = [threading.Thread(target=serve, args=(seeds, keep), daemon=True) for _ in range(args.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def serve(seeds: queue.SimpleQueue[int], keep: Callable[[dict[str, Any]], None]) -> None:
    """Gives seeds to a worker, one after another, and a new worker its seeds when it has crashed, hung or grown old."""
    while not seeds.empty():
        with subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
            assert worker.stdin is not None
            assert worker.stderr is not None
            said: list[bytes] = []
            listener = threading.Thread(target=lambda: said.extend(worker.stderr), daemon=True)  # noqa: B023
            listener.start()
            for _ in range(RENEWED_EVERY):
                try:
                    seed = seeds.get_nowait()
                except queue.Empty:
                    break
                worker.stdin.write(f"{seed}\n".encode())
                worker.stdin.flush()
                line = answer(worker)
                if line is None:
                    worker.kill()
                    worker.wait()
                    listener.join(5)
                    last = b"".join(said[-5:]).decode(errors="replace").strip()
                    how = "hang" if worker.returncode == -9 else f"crash with exit code {worker.returncode}"
                    keep({"seed": seed, "spec": f"seed {seed}", "skipped": "", "uses": {}, "refused": {}, "nodes": 0,
                          "faults": {"process": f"{how}: {last[-500:]}"}, "seconds": 0.0})  # fmt: skip
                    break
                keep(json.loads(line))
            worker.stdin.close()


def answer(worker: subprocess.Popen[bytes]) -> bytes | None:
    """The line that the worker answers with; None if it ends, or does not answer in time."""
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], HANG)
    line = worker.stdout.readline() if ready else b""
    return line if line.endswith(b"}\n") else None


def work() -> int:
    """Reads seeds from stdin and writes results to a copy of stdout, which nothing else writes to."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        results.write(json.dumps(asdict(run(random_spec(int(line))))) + "\n")
        results.flush()
    return 0


def show(seed: int) -> int:
    spec = random_spec(seed)
    outcome = run(spec, seldom=False)
    print(spec, build(spec)[0], outcome.skipped, f"greatest distances: {outcome.uses}", sep="\n")
    for backend, text in [*outcome.refused.items(), *outcome.faults.items()]:
        print(f"{backend}: {text}")
    return int(bool(outcome.faults))


def shrink(seed: int) -> int:
    """Prints smaller and smaller networks that have a fault of the same kind."""
    spec = random_spec(seed)
    faults = run(spec, seldom=False).faults
    if not faults:
        print(f"{spec}\nhas no fault")
        return 0
    backend, fault = next(iter(faults.items()))
    kind = fault.partition(":")[0]

    def has_it(candidate: Spec) -> bool:
        return run(candidate, (backend,), seldom=False).faults.get(backend, "").startswith(kind)

    found = True
    while found:
        found = False
        for candidate in smaller(spec):
            if has_it(candidate):
                spec, found = candidate, True
                print(spec, flush=True)
                break
    print(spec.to_json(), build(spec)[0], run(spec, (backend,), seldom=False).faults, sep="\n")
    return 1


def figures(results: list[dict[str, Any]]) -> str:
    """The table of results/fuzz.md."""
    ran = [result for result in results if not result["skipped"]]
    skipped = Counter(result["skipped"] for result in results if result["skipped"])
    backends = list(
        dict.fromkeys(backend for result in ran for part in ("uses", "refused", "faults") for backend in result[part])
    )
    lines = [
        f"{len(ran)} networks with {sum(r['nodes'] for r in ran)} normalizations, {sum(map(runs, ran))} runs; "
        f"{sum(bool(r['faults']) for r in ran)} networks with faults."
        + "".join(f" {count} more were drawn and left out: {reason}." for reason, count in skipped.items()),
        "",
        "| backend | runs | right | greatest distance, in rounding errors | refused | wrong | crashed or unexpected |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for backend in backends:
        uses = [r["uses"][backend] for r in ran if backend in r["uses"] and backend not in r["faults"]]
        faults = [r["faults"][backend] for r in ran if backend in r["faults"]]
        wrong = sum(fault.startswith("wrong") for fault in faults)
        refused = sum(backend in r["refused"] for r in ran)
        lines.append(
            f"| {backend} | {len(uses) + len(faults) + refused} | {len(uses)} | {max(uses, default=0):.1f} | "
            f"{refused} | {wrong} | {len(faults) - wrong} |"
        )
    reasons = Counter((reason, backend) for r in ran for backend, reason in r["refused"].items())
    by_reason: dict[str, list[str]] = {}
    for (reason, backend), count in sorted(reasons.items()):
        by_reason.setdefault(reason, []).append(f"{backend} {count}")
    lines += ["", "Refused:", *(f"- {reason}: {', '.join(counts)}" for reason, counts in by_reason.items())]
    return "\n".join(lines)


def runs(result: dict[str, Any]) -> int:
    return len(result["uses"]) + len(result["refused"])


if __name__ == "__main__":
    sys.exit(main())

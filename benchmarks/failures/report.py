"""The section of results/failures.md for one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.failures.models import ROWS
from benchmarks.measure import describe_machine, markdown_table

TEXT = """
{qps:g} requests per second (an open loop with Poisson arrivals), each of one of {rows} rows in turn, seed {seed}. The
latency counts from the time at which a request was to arrive, until its answer, all attempts included.

{loads}
{disturbances}
{failed}
"""


def section(found: Mapping[str, Any]) -> str:
    loads = {"undisturbed": found["calm"], "disturbed": found["disturbed"]}
    lines = [["", *(name for name, load in loads.items() if load)]]
    for name, show in _ROWS.items():
        lines.append([name, *(show(load) for load in loads.values() if load)])
    events = [["disturbance", "number", "longest time until the server was whole"]]
    names = {"replica": "replica killed", "node": "node killed", "replacement": "model replaced"}
    for kind, count in found["events"].items():
        events.append([names[kind], str(count), f"{found['longest_recovery'][kind]:.1f} s"])
    events += [[f"connection cut: {kind}", str(count), ""] for kind, count in sorted(found["cuts"].items())]
    failed = [f"- {count} × `{problem}`" for problem, count in found["disturbed"]["failed"].items()]
    text = TEXT.format(
        qps=found["qps"],
        seed=found["seed"],
        rows=ROWS,
        loads="\n".join(markdown_table(lines)),
        disturbances="\n".join(markdown_table(events)),
        failed="\n".join(["What the client read in attempts that failed:", "", *failed] if failed else []),
    )
    return f"Machine: {describe_machine()}, {found['version']}.\n{text}"


_ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "requests": lambda load: f"{load['requests']:,}",
    "lost": lambda load: str(load["lost"]),
    "wrong": lambda load: str(load["wrong"]),
    "sent more than once": lambda load: f"{load['retried']:,}",
    "attempts that failed during a replacement": lambda load: str(load["failed_in_replacements"]),
    "seconds": lambda load: f"{load['seconds']:.0f}",
    "p50": lambda load: f"{load['p50_ms']:.1f} ms",
    "p99": lambda load: f"{load['p99_ms']:.1f} ms",
    "greatest latency": lambda load: f"{load['max_ms']:,.0f} ms",
    "p99 of the sender's own lateness": lambda load: f"{load['late_p99_ms']:.1f} ms",
    "longest time without an answer": lambda load: f"{load['longest_gap']:.2f} s",
}

"""The bodies beside the twin: in several versions of ONNX Runtime, in WebAssembly, and operator by operator.

python -m benchmarks.bodies [--models resnet18 wideresnet28-2] [--threads 1 2] [--batch 1 8] [--repeats N]
                            [--processes N] [--python INTERPRETER …] [--node-modules FOLDER] [--keep FOLDER]
                            [--before FOLDER] [--write]

Where a body changes: `--keep FOLDER` at the commit before, and `--before FOLDER` at the one after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from rich.console import Console

from benchmarks.__main__ import RESULTS, terminal_table
from benchmarks.measure import (
    describe_machine,
    markdown_table,
    session_options,
    threads_text,
    timings_of,
    write_section,
)
from benchmarks.networks import NETWORKS, TWIN, Candidates
from nnorm_export.runtimes.processor import processor

TIMERS = Path(__file__).parent
Seconds = dict[Path, list[float]]  # of each turn
BODIES, BEFORE = "primitives", "before"
HEADING = "Bodies, {processor}"
TEXT = """\
Written by `python -m benchmarks.bodies {command}`.

Machine: {machine}.

Files of the form `primitives`: the bodies stand in the graph. Medians of {repeats} runs in each of {processes}
processes, the files of a line taking turns; in brackets the median of the ratios to the twin, turn by turn.{before}
WebAssembly is ONNX Runtime Web in Node.js.
"""
BEFORE_TEXT = " `before` has the bodies of the commit before these."
PROFILE_TEXT = """
### Operator by operator

ONNX Runtime's profile, 1 thread: for each operator the sum of the medians of its nodes, and in brackets their number.
The profiler itself adds about a microsecond to each node.
"""


@dataclass(frozen=True, eq=False)
class Program:
    """What times files: a command, its title and the greatest number of threads that it can use."""

    title: str
    command: list[str | Path]
    most_threads: int = 64

    def seconds(self, threads: int, shape: Sequence[int], turns: int, files: Sequence[Path]) -> tuple[str, Seconds]:
        """The version of the runtime, and the seconds of each turn of each file, in a process of its own."""
        arguments = [threads, "x".join(map(str, shape)), turns, *files]
        try:
            run = subprocess.run([*self.command, *map(str, arguments)], capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"{self.command[0]} does not start: {error.strerror}") from error
        if run.returncode:
            raise SystemExit(f"{self.command[0]} failed: {run.stderr.strip()}")
        found = json.loads(run.stdout)
        return found["version"], {file: found["seconds"][str(file)] for file in files}


def programs(options: argparse.Namespace) -> list[Program]:
    timer = TIMERS / "time_files.py"
    found = [Program("ONNX Runtime", [python, timer]) for python in (sys.executable, *options.python)]
    if options.node_modules:
        found.append(Program("WebAssembly", ["node", TIMERS / "time_files.mjs", options.node_modules], most_threads=1))
    return found


def table_of(name: str, files: dict[str, Path], options: argparse.Namespace) -> list[list[str]]:
    """A line for each runtime and number of threads."""
    lines_of = [
        (program, threads)
        for program in programs(options)
        for threads in sorted({min(threads, program.most_threads) for threads in options.threads})
    ]
    versions: dict[Program, str] = {}
    seconds: dict[tuple[Program, int, int], Seconds] = defaultdict(lambda: defaultdict(list))
    for number in range(1, options.processes + 1):
        for program, threads in lines_of:
            for batch in options.batch:
                shape = (batch, *NETWORKS[name].shape)
                versions[program], found = program.seconds(threads, shape, options.repeats, [*files.values()])
                for file, times in found.items():
                    seconds[program, threads, batch][file] += times
        print(f"{name}: {number} of {options.processes} processes of each runtime", file=sys.stderr)
    lines = [[name, *(f"{row}, batch {batch}" for batch in options.batch for row in files)]]
    for program, threads in lines_of:
        timings = [timings_of(seconds[program, threads, batch], files[TWIN]) for batch in options.batch]
        cells = [str(each[file]) for each in timings for file in files.values()]
        lines.append([f"{program.title} {versions[program]}, {threads_text(threads)}", *cells])
    return lines


def profile(file: Path, shape: Sequence[int], folder: Path, runs: int) -> dict[str, tuple[int, float]]:
    """Operator -> the number of its nodes in the optimized graph, and their microseconds in a run."""
    options = session_options(1)
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for _ in range(runs):
        session.run(None, {given.name: x})
    of_nodes = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            of_nodes[event["args"]["op_name"], event["name"]].append(event["dur"])
    found: dict[str, tuple[int, float]] = {}
    for (op_type, _), durations in of_nodes.items():
        count, microseconds = found.get(op_type, (0, 0.0))
        found[op_type] = count + 1, microseconds + statistics.median(durations)
    return found


def profile_table(name: str, files: dict[str, Path], options: argparse.Namespace, folder: Path) -> list[list[str]]:
    """A line for each operator, those of the bodies that take longest first."""
    columns = [(row, batch) for batch in options.batch for row in files]
    found = {
        (row, batch): profile(files[row], (batch, *NETWORKS[name].shape), folder, options.repeats)
        for row, batch in columns
    }
    longest = found[BODIES, options.batch[-1]]
    op_types = sorted(
        {op_type for each in found.values() for op_type in each}, key=lambda op: -longest.get(op, (0, 0))[1]
    )
    lines = [[name, *(f"{row}, batch {batch}" for row, batch in columns)]]
    for op_type in op_types:
        cells = [found[column].get(op_type) for column in columns]
        lines.append([op_type, *("–" if cell is None else f"{cell[1]:,.0f} µs ({cell[0]})" for cell in cells)])
    sums = [[sum(part) for part in zip(*found[column].values(), strict=True)] for column in columns]
    return [*lines, ["together", *(f"{microseconds:,.0f} µs ({count})" for count, microseconds in sums)]]


def before(options: argparse.Namespace, name: str) -> Path:
    return Path(options.before) / f"{name}-{BODIES}.onnx"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bodies", description=(__doc__ or "").splitlines()[0])
    models = [name for name, network in NETWORKS.items() if len(network.shape) > 1]
    parser.add_argument("--models", nargs="+", choices=models, default=["resnet18", "wideresnet28-2"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of a session (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default 1 8)")
    parser.add_argument("--repeats", type=int, default=10, help="timed turns of each process (default %(default)s)")
    # On two threads some processes run bodies a third slower than others do, from their first run to their last.
    parser.add_argument("--processes", type=int, default=5, help="of each runtime, one after the other (default 5)")
    parser.add_argument("--python", nargs="*", default=[], help="interpreters with other versions of ONNX Runtime")
    parser.add_argument("--node-modules", type=Path, help="node_modules with onnxruntime-web: WebAssembly in Node.js")
    parser.add_argument("--keep", type=Path, help="folder in which the files stay")
    parser.add_argument("--before", type=Path, help="what --keep kept at another commit; a row of its own")
    parser.add_argument("--quick", action="store_true", help="tiny networks, to see that everything runs")
    parser.add_argument("--write", action="store_true", help="replace the section of this processor in results")
    options = parser.parse_args(argv)
    if options.quick and options.write:
        parser.error("--quick measures nothing worth keeping; leave out --write")
    if options.keep and options.before and options.keep.resolve() == options.before.resolve():
        parser.error("--keep replaces the files of --before; name another folder")
    if options.before and (missing := [name for name in options.models if not before(options, name).exists()]):
        parser.error(f"{options.before} has no file of {', '.join(missing)}; --keep writes them")
    if min(*options.batch, *options.threads, options.repeats, options.processes) < 1:
        parser.error("--batch, --threads, --repeats and --processes must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    timed, profiled = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.models:
            candidates = Candidates(name, folder, options.quick)
            for file in (TWIN, BODIES):
                candidates.write(file)
            files = {TWIN: candidates.path(TWIN)}
            if options.before:
                files[BEFORE] = before(options, name)
            files[BODIES] = candidates.path(BODIES)
            timed.append(table_of(name, files, options))
            profiled.append(profile_table(name, files, options, Path(temporary)))
    console = Console(width=None if Console().is_terminal else 200)
    for lines in [*timed, *profiled]:
        console.print(terminal_table(lines))
    if options.write:
        text = TEXT.format(
            command=" ".join(sys.argv[1:] if argv is None else argv),
            machine=describe_machine(),
            repeats=options.repeats,
            processes=options.processes,
            before=BEFORE_TEXT if options.before else "",
        )
        shown = [line for lines in timed for line in markdown_table(lines)]
        profiles = [line for lines in profiled for line in markdown_table(lines)]
        write_section(
            RESULTS, HEADING.format(processor=processor()), "\n".join([text, *shown, PROFILE_TEXT, *profiles])
        )
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()

"""The instructions that the CPU kernels run for each element, counted by valgrind and compared with a record.

python -m benchmarks.instructions PROGRAM [--record]

A count does not depend on the load of the machine. The program fails at 3 % more instructions than in the record, and
lists cases with fewer. PROGRAM is count_instructions of the C++ tests (`make bench-check` builds it). valgrind does not
run AVX-512; the kernels for AVX-512 have the same source as those for AVX2. Each compiler has its own record, because
another compiler makes other instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

RECORD = Path(__file__).parents[1] / "results" / "instructions.json"
LARGEST_RATIO = 1.03  # of instructions to the record
_MEASURED = re.compile(r"measured<(\d+)")


def count(program: Path) -> tuple[str, dict[str, float]]:
    """The compiler of ``program``, and name of a case -> instructions for each element."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", str(program)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"valgrind ended with {run.returncode}: {run.stderr[-2000:]}")
        counts = inclusive(out.read_text())
    compiler, *cases = run.stdout.splitlines()
    named = [case.split("|") for case in cases]
    found = {name: round(counts[number] / int(size), 3) for number, (name, size) in enumerate(named)}
    return compiler.removeprefix("compiler "), found


def inclusive(text: str) -> dict[int, int]:
    """Number N of a function ``measured<N>`` in a file of callgrind -> its instructions, with all that it calls."""
    names: dict[str, str] = {}
    counts: dict[int, int] = defaultdict(int)
    inside: int | None = None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key in ("fn", "cfn"):
            number, _, name = value.partition(" ")
            names.setdefault(number, name)
            if key == "fn":
                found = _MEASURED.search(names[number])
                inside = int(found[1]) if found else None
        elif inside is not None and re.match(r"[+\-*\d]", line):
            counts[inside] += int(line.split()[-1])
    return counts


def compare(compiler: str, found: dict[str, float], record: dict[str, dict[str, float]], unit: str) -> list[str]:
    """Sentences on the cases that differ from the record of ``compiler``."""
    before = record[compiler]
    sentences = [f"{name} is not on record" for name in found.keys() - before.keys()]
    sentences += [f"{name} is on record, and was not counted" for name in before.keys() - found.keys()]
    for name in found.keys() & before.keys():
        if found[name] > LARGEST_RATIO * before[name]:
            more = found[name] / before[name] - 1
            sentences.append(f"{name}: {found[name]:g} {unit}, {more:.1%} more than {before[name]:g}")
    return sorted(sentences)


def check(path: Path, compiler: str, found: dict[str, float], *, record: bool, unit: str) -> None:
    """Compares ``found`` with the record in ``path`` and ends the program if there is more; or writes the record."""
    every = json.loads(path.read_text()) if path.exists() else {}
    if record:
        path.write_text(json.dumps(every | {compiler: found}, indent=1) + "\n")
        return
    if compiler not in every:
        print(f"bench-check is skipped: nothing is on record for {compiler}; make bench-check RECORD=--record")
        return
    if wrong := compare(compiler, found, every, unit):
        sys.exit("\n".join([*wrong, "If that must be: make bench-check RECORD=--record"]))
    fewer = [f"{name}: {found[name]:g}, {before:g} on record" for name, before in every[compiler].items()
             if found[name] < before / LARGEST_RATIO]  # fmt: skip
    print("\n".join([f"{len(found)} kernels have no more instructions than on record ({compiler})", *fewer]))


def parse_options(module: str, about: str | None, counted: str) -> argparse.Namespace:
    """The options of a program that counts ``counted``, a path, and its ``--record``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=(about or "").splitlines()[0])
    parser.add_argument(counted, type=Path)
    parser.add_argument("--record", action="store_true", help="write the counts down, in place of those on record")
    return parser.parse_args()


def main() -> None:
    options = parse_options("instructions", __doc__, "program")
    if shutil.which("valgrind") is None:
        print("bench-check is skipped: valgrind is not installed (apt-get install valgrind)")
        return
    compiler, found = count(options.program)
    check(RECORD, compiler, found, record=options.record, unit="instructions for an element")


if __name__ == "__main__":
    main()

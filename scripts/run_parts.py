"""Runs targets of the Makefile as parts of a long test, several at a time, and ends with a table of them.

    python scripts/run_parts.py --jobs 2 lint test-cpp bench-check:test-cpp

``bench-check:test-cpp`` starts when test-cpp has passed, and does not build its files again. The output of each part is
in build/parts/NAME.log, and is printed if the part fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import parts


def part_of(text: str, make: str) -> parts.Part:
    name, _, after = text.partition(":")
    earlier = tuple(filter(None, after.split(",")))
    made = [option for each in earlier for option in ("--assume-old", each)]
    # MAKEFLAGS of the make that runs this program names a jobserver, which is not open here.
    environment = {key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    # MAKEFLAGS also has the variables of make's command line, after "--", which the parts need.
    variables = shlex.split(os.environ.get("MAKEFLAGS", "").partition("-- ")[2])
    return parts.Part(name, [make, "--no-print-directory", name, *made, *variables], earlier, environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="TARGET[:AFTER,…]")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time (default %(default)s)")
    parser.add_argument("--make", default="make", help="the make to call (default %(default)s)")
    parser.add_argument("--logs", type=Path, default=Path("build/parts"), help="folder (default %(default)s)")
    options = parser.parse_args()
    chosen = [part_of(text, options.make) for text in options.parts]
    if unknown := parts.unknown_names(chosen):
        parser.error(f"no part is called {', '.join(unknown)}")
    return parts.run_all(chosen, options.logs, options.jobs)


if __name__ == "__main__":
    sys.exit(main())

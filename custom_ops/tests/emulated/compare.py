"""Compares the digests that test_same_bits printed on several processors, and prints a table in Markdown.

python custom_ops/tests/emulated/compare.py OUTPUT OUTPUT …    files with the output of the program

Exits with 1 if two processors computed different bits, or if a digest has nothing to be compared with.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path


def main(outputs: list[str]) -> int:
    if len(outputs) < 2:
        raise SystemExit(__doc__)
    # {(operators, type): {values: {file and processor: digest}}}, the fewest values first
    digests: dict[tuple[str, str], dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for output in outputs:
        for line in Path(output).read_text().splitlines():
            if line.startswith("digest "):
                operators, type_name, values, digest, processor = line.split()[1:]
                digests[operators, type_name][int(values)][f"{output}: {processor}"] = digest
    if not digests:
        raise SystemExit(f"there is no digest in {', '.join(outputs)}; these are not outputs of test_same_bits")
    print("| operators | type | values | processors | bits |\n| --- | --- | ---: | --- | --- |")
    different = 0
    for (operators, type_name), by_values in digests.items():
        wrong = {values: found for values, found in by_values.items() if not _are_same(found, outputs)}
        values, found = min(wrong.items()) if wrong else max(by_values.items())
        processors = ", ".join(place.rpartition(": ")[2] for place in found)
        result = f"NOT THE SAME: {found}" if wrong else "the same"
        print(f"| {operators} | {type_name} | {values} | {processors} | {result} |")
        different += bool(wrong)
    return 1 if different else 0


def _are_same(found: dict[str, str], outputs: list[str]) -> bool:
    files = {place.rpartition(": ")[0] for place in found}
    return len(files) == len(set(outputs)) and len(set(found.values())) == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

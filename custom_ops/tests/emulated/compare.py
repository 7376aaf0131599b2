"""Compares the digests that test_same_bits printed on several processors.

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
    # {(operators, type, values): {file and processor: digest}}
    digests: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for output in outputs:
        for line in Path(output).read_text().splitlines():
            if line.startswith("digest "):
                *of_what, digest, processor = line.split()[1:]
                digests[tuple(of_what)][f"{output}: {processor}"] = digest
    if not digests:
        raise SystemExit(f"there is no digest in {', '.join(outputs)}; these are not outputs of test_same_bits")
    different = 0
    for (operators, type_name, values), found in digests.items():
        files = {place.rpartition(": ")[0] for place in found}
        alone, same = len(files) < len(outputs), len(set(found.values())) == 1
        different += alone or not same
        processors = " ".join(place.rpartition(": ")[2] for place in found)
        verdict = "missing in some files" if alone else "the same bits" if same else f"DIFFERENT BITS: {found}"
        print(f"{operators:16} {type_name:9} {values:>11} values, {processors}: {verdict}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

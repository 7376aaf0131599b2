"""Writes results/every_float.md from what every_float, bodies.py, compare.py and test_cuda_same_bits print.

PYTHONPATH=. python custom_ops/tests/every_float/table.py FOLDER OUTPUT

FOLDER has kernels.txt, bodies.txt, processors.txt and gpu.txt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.processor import processor

TEXT = """\
# ψ of every float

Written by `custom_ops/tests/every_float/table.py` (`make every-float`), on {processor}.

The kernels compute ψ(h; η) = ((1 + |h|)^η − 1)/η with the sign of h, by BatchNormalNorm with scale, weight 1 and
shift, bias 0. The reference is ψ by the C library in float64. Exponents are those of the branch; for 16-bit types all
of their numbers up to 2¹⁵ are exponents. What the columns count:

- **Greatest error**, in units in the last place, for |h| up to 10, up to 10⁴ and up to 2¹²⁶, and where it is. η = 0
  is computed as 2⁻²⁶, which shows where |h| is great.
- **Rounded correctly**: the result is the number nearest to the reference. For 16-bit types the other references are so
  near the middle between two numbers that float32 rounds to the wrong one: their errors are 0.50 too.
- **Falls**: how often ψ(h) is less than ψ of the input before h. A sample of float32 does not show it.
- **Saturated**: pairs of inputs and exponents with |h| above 2¹²⁶ or 2^z above 2^127.5. There ψ keeps its sign, is
  finite in float32, and is not compared: it stays within a factor of 2 while the reference rises further.
- **Tiny**: pairs whose |h·η| is not a normal number, and the greatest error there in units of the smallest number
  times 1 + 2/η.

The program also checks: ψ(−h) has the bits of −ψ(h); AVX-512, AVX2 and plain code give the same bits, in a long run in
one block of 16 (NEON: [below](#processors)); ±0 gives 0, ±infinity what 2¹²⁶ gives, NaN gives NaN; no number gives
NaN.

{kernels}

## Bodies

The same inputs through the body of BatchNormalNorm in ONNX Runtime, without kernels.

{bodies}

## Processors

The kernels for x86 (AVX-512, AVX2 and plain code) and those for AArch64 (NEON), which an emulator runs
(`make same-bits-neon-long`). x has any bits, numbers of any size, or numbers as networks have them; layouts, epilogues,
lengths of rows and parameters are drawn; BatchNormalNorm stands for its operators with an epilogue too, LayerNormalNorm
for GroupNormalNorm. "The same": the digests of all values are equal.

{processors}

## The GPU's sources

The sources of the kernels for GPUs, compiled for the processor, against the CPU kernels: how many values have other
bits. x has any bits. 16-bit types have a line for `NNORM_EXPORT_SAME_BITS=1`, and one for the device's approximate
instructions: there x has numbers as networks have them, and functions of the C library replace the hardware's logarithm
and power. On a GPU, whose instructions have other errors, more values may differ.

{gpu}
"""


def main(folder: Path, output: Path) -> None:
    tables = {}
    for name in ("kernels", "bodies", "processors", "gpu"):
        lines = (folder / f"{name}.txt").read_text().splitlines()
        tables[name] = "\n".join(line.replace("|h|", "abs(h)") for line in lines if line.startswith("| "))
    output.write_text(TEXT.format(processor=processor(), **tables))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""benchmarks/: what instructions.py reads of callgrind's files, and when it fails; the sections of its results."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.gpu import records
from benchmarks.instructions import RECORD, compare, inclusive
from benchmarks.measure import time_in_turns, with_section
from nnorm_export.runtimes.processor import processor

_FILE = """\
version: 1
events: Ir

fl=(1) count_instructions.cpp
fn=(10) void nnorm_test::measured<0ul>(std::function<void ()> const&)
20 5
cfn=(11) std::function<void ()>::operator()() const
calls=1 0
20 1000
+3 2

fn=(11)
30 1000

fn=(12) void nnorm_test::measured<1ul>(std::function<void ()> const&)
20 4
cfn=(11)
calls=1 0
* 3000

totals: 4011
"""


def test_calls_are_counted_with_what_they_call() -> None:
    assert inclusive(_FILE) == {0: 1007, 1: 3004}


def test_three_percent_more_fails() -> None:
    record = {"gcc": {"a": 10.0, "b": 10.0}}
    assert compare("gcc", {"a": 10.3, "b": 5.0}, record, "µops") == []
    assert compare("gcc", {"a": 10.31, "b": 10.0}, record, "µops") == ["a: 10.31 µops, 3.1% more than 10"]
    assert compare("gcc", {"a": 10.0, "c": 1.0}, record, "µops") == [
        "b is on record, and was not counted",
        "c is not on record",
    ]


def test_the_record_has_every_kind_of_kernel() -> None:
    for cases in json.loads(RECORD.read_text()).values():
        for part in ("avx2", "baseline", "LayerNormalNorm", "GroupNormalNorm", "Quantized", "float16", "channels last"):
            assert any(part in name for name in cases), part


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("# R\n", "# R\n\n## new\n\n1\n"),
        (
            "# R\n\n## a\n\n0\n\n### deeper\n\n## b\n\n2\n",
            "# R\n\n## a\n\n0\n\n### deeper\n\n## b\n\n2\n\n## new\n\n1\n",
        ),
        ("# R\n\n## new\n\n0\n\n### deeper\n\n## b\n\n2\n", "# R\n\n## new\n\n1\n\n## b\n\n2\n"),
        ("# R\n\n## b\n\n2\n\n## new\n\n0\n", "# R\n\n## b\n\n2\n\n## new\n\n1\n"),
    ],
)
def test_a_section_of_the_results_replaces_its_older_self_alone(page: str, expected: str) -> None:
    assert with_section(page, "new", "\n1\n") == expected


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (
            "cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fma avx2\n\nprocessor\t: 1\n",
            "AMD EPYC (family 25, model 1; AVX2)",
        ),
        (
            "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512f avx512_vnni\n",
            "AMD EPYC (family 25, model 17; AVX-512, VNNI)",
        ),
        ("cpu family\t: 6\nmodel\t\t: 1\nmodel name\t: Old\nflags\t\t: sse2\n", "Old (family 6, model 1; SSE2)"),
        ("processor\t: 0\nmodel name\t: Neoverse\nFeatures\t: asimd\n", "Neoverse"),
    ],
)
def test_processors_of_one_name_are_told_apart(cpuinfo: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert processor(tmp_path / "cpuinfo") == expected


def test_no_candidate_always_runs_behind_the_same_one() -> None:
    """What ran before leaves the caches full of its own: it must not be the same one for a candidate in every turn."""
    ran: list[str] = []
    candidates = {name: lambda name=name: ran.append(name) for name in "abc"}
    timings = time_in_turns(candidates, base="a", repeats=500)
    turns = [ran[start : start + 3] for start in range(0, len(ran), 3)]
    assert {len(timing.seconds) for timing in timings.values()} == {500}
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    behind = Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    for pair in itertools.permutations("abc", 2):
        assert 0.25 < behind[pair] / len(turns) < 0.42, pair  # of the orders of three, a third have it


_BENCH = """NVIDIA L4, 58 multiprocessors, 48 MiB of L2 cache; CUDA 13.0, driver for up to 13.0; medians of 15 turns.

| tensor | what | µs | 10 – 90 % | GB/s | of the faster copy |
| --- | --- | ---: | ---: | ---: | ---: |
| [64, 256] float32 | copy kernel | 101.7 | 101.3 – 101.9 | 4042 | 100 % |
| [64, 256] float32 | LayerNormalNorm | 106.3 | 106.1 – 106.6 | 3868 | 96 % |
| [64, 256] float16 | BatchNormalNorm, no table | 53.1 | 53.0 – 53.3 | 3870 | 94 % |
| [64, 256] float16 | BatchNormalNorm, same bits, no table | 70.1 | 70.0 – 70.3 | 2931 | 71 % |
"""


def test_what_ran_on_a_gpu_is_read_from_its_log() -> None:
    network = records.Record(
        "Networks", "vit, batch 8", "kernels", 0.5, 1.25, "NVIDIA L4", "2222222", "a note", "a driver"
    )
    log = f"{_BENCH}[  7.0 s] other lines\n{json.dumps(asdict(network))}\n"
    kernel, without_table, read_network = records.read_log(log, "1111111")
    assert kernel == records.Record(
        "Kernels", "[64, 256] float32", "LayerNormalNorm", 106.3, 0.96, "NVIDIA L4", "1111111"
    )
    assert (without_table.row, without_table.ratio) == ("BatchNormalNorm, no table", 0.94)
    assert read_network == network
    page = records.page([kernel, network, replace(kernel, ratio=0.99, commit="3333333")])
    assert "| [64, 256] float32 | LayerNormalNorm | 106.3 | 99 % | 3333333 | 96 % (1111111) |" in page
    assert "| vit, batch 8 | 0.500 ms (1.25), a note | 2222222 |" in page


def test_a_commit_has_a_line_if_it_has_what_newer_ones_lack() -> None:
    def row(name: str, commit: str) -> records.Record:
        return records.Record("Networks", "vit, batch 16", name, 2.0, 1.0, "NVIDIA L4", commit)

    lines = records.page([row("twin", "old"), row("twin", "middle"), row("kernels", "middle"), row("twin", "new")])
    assert [line.split(" | ")[-1].rstrip(" |") for line in lines.splitlines() if "vit" in line] == ["new", "middle"]


def test_the_page_is_that_of_the_records() -> None:
    assert records.PAGE.read_text(encoding="utf-8") == records.page(records.read(records.KEPT))

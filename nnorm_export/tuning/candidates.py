"""What tune() measures: a file, the runtime that runs it, its threads and the rows of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnorm_export.files.tuned import Options
from nnorm_export.reports import Report

# Runtimes whose options have the number of threads. The threads of the others are those of the process, or one.
_WITH_THREADS = ("onnxruntime", "openvino")
# Smaller parts of the work of an operator, for threads that other programs slow down.
_SMALL_PARTS = {"session_config": {"session.dynamic_block_base": "4"}}


@dataclass(frozen=True)
class Way(Report):
    """A runtime that runs a file, with the options that do not concern threads."""

    runtime: str
    options: Options = field(default_factory=dict)

    def __str__(self) -> str:
        return self.runtime if self.options.get("kernels", True) else f"{self.runtime}, bodies"


@dataclass(frozen=True)
class Candidate(Report):
    """A configuration.

    Attributes:
        variant: the name of its file, one of :data:`.variants.VARIANTS`.
        runtime, options: the arguments of :func:`nnorm_export.load`.
        batch: the rows of a call.
    """

    variant: str
    runtime: str
    options: Options
    batch: int

    def __str__(self) -> str:
        return f"{self.variant} in {self.runtime}, {options_text(self.options)}, batch {self.batch}"


def options_text(options: Options) -> str:
    threads = options.get("intra_op_num_threads", 0)
    texts = [
        "bodies" if options.get("kernels") is False else "",
        "its own threads" if not threads else f"{threads} thread{'s' * (threads > 1)}",
        *(f"{name.removeprefix('session.')}={value}" for name, value in options.get("session_config", {}).items()),
    ]
    return ", ".join(filter(None, texts))


def candidates_of(variant: str, way: Way, threads: Sequence[int], batches: Sequence[int]) -> Iterator[Candidate]:
    """The configurations of a file in a runtime, always in the same order."""
    for options in _options_of(way, threads):
        for batch in batches:
            yield Candidate(variant, way.runtime, options, batch)


def _options_of(way: Way, threads: Sequence[int]) -> Iterator[Options]:
    if way.runtime not in _WITH_THREADS:
        yield way.options
        return
    for count in threads:
        options: dict[str, Any] = {**way.options, "intra_op_num_threads": count}
        yield options
        if way.runtime == "onnxruntime" and count > 1 and not way.options:
            yield options | _SMALL_PARTS


def threads_for(cores: int) -> list[int]:
    """1, 2, 4, … and all ``cores``."""
    return sorted({*(1 << power for power in range(cores.bit_length()) if 1 << power <= cores), cores})

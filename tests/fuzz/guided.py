"""``make fuzz-guided``: files mutated towards new branches of the code that reads them, by atheris (libFuzzer).

    python tests/fuzz/guided.py onnx -max_total_time=600

The files are read and described, and nothing in them is run: ``files.py`` runs them, with mutations that are drawn
blindly. What is raised beside an error of ours ends the run with its traceback, and libFuzzer keeps the file.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import torch

with atheris.instrument_imports(include=["nnorm_export"]):
    from nnorm_export.cli.inputs import read_inputs
    from nnorm_export.errors import NnormExportError
    from nnorm_export.files import onnx_file
    from nnorm_export.files.bodies import problems_of, unknown_bodies
    from nnorm_export.files.inspection import describe
    from nnorm_export.models.checkpoints import load_checkpoint
    from nnorm_export.models.exported_programs import load_program

import files_nets
import files_seeds
from files_cases import mutated_model
from files_mutations import mutate_safetensors, mutate_zip


def read_onnx(path: Path) -> None:
    describe(path)
    file = onnx_file.read(path)
    problems_of(file)
    unknown_bodies(file)


@dataclass(frozen=True)
class Target:
    """What reads a file: ``read(path)``; and how a file of this kind is mutated."""

    seeds: tuple[str, ...]
    read: Callable[[Path], object]
    mutate: Callable[[bytes, random.Random], bytes]

    @property
    def suffix(self) -> str:
        return Path(self.seeds[0]).suffix


def _load_checkpoint(path: Path) -> None:
    load_checkpoint(files_nets.small(), path)


def _read_inputs(path: Path) -> None:
    read_inputs([str(path)], files_nets.small())


TARGETS = {
    "onnx": Target((*files_seeds.ONNX, files_seeds.OPTIMIZED), read_onnx, mutated_model),
    "torchscript": Target(("small.pt",), describe, mutate_zip),
    "program": Target(("small.pt2",), load_program, mutate_zip),
    "checkpoint": Target(("weights.pt", "lightning.ckpt"), _load_checkpoint, mutate_zip),
    "safetensors": Target(("weights.safetensors",), _load_checkpoint, mutate_safetensors),
    "inputs": Target(("inputs.npz",), _read_inputs, mutate_zip),
}


def try_one(data: bytes, *, target: Target, path: Path) -> None:
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.read(path)
        except NnormExportError:
            return


def mutate(data: bytes, size: int, seed: int, *, target: Target) -> bytes:
    """By the structure of the file, where it still has one; else, and sometimes else, by libFuzzer."""
    rng = random.Random(seed)
    if rng.random() < 0.7:
        try:
            mutated = target.mutate(data, rng)
        except Exception:  # a parser of files that libFuzzer has damaged; its own mutation takes over
            mutated = b""
        if 0 < len(mutated) <= size:
            return mutated
    return bytes(atheris.Mutate(data, size))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(f"{__doc__}\nThe first argument is one of {', '.join(TARGETS)}; others are libFuzzer's.")
    target, options = TARGETS[sys.argv[1]], sys.argv[2:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seeds, corpus = Path(folder, "seeds"), Path(folder, "corpus")
        seeds.mkdir()
        corpus.mkdir()
        build = multiprocessing.get_context("fork").Process(target=files_seeds.build, args=(seeds, False))
        build.start()
        build.join()
        for name in target.seeds:
            if (seeds / name).exists():  # without kernels there is no optimized file
                (corpus / name).write_bytes((seeds / name).read_bytes())
        if not any(corpus.iterdir()):
            raise SystemExit("the seeds cannot be built")
        largest = 2 * max(file.stat().st_size for file in corpus.iterdir())
        atheris.Setup(
            [sys.argv[0], f"-max_len={largest}", "-timeout=60", "-rss_limit_mb=4096", *options, str(corpus)],
            partial(try_one, target=target, path=Path(folder, f"case{target.suffix}")),
            custom_mutator=partial(mutate, target=target),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()

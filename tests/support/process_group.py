"""Functions in several processes that communicate over gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

_SECONDS = 300


def run_in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(rank, *arguments) in ``count`` processes of one group; the results by rank.

    The processes are forks of one that has imported everything and done nothing: a process cannot be forked that has
    CUDA, or the threads that a backward pass leaves in some builds of PyTorch.
    """
    start = "forkserver" if hasattr(os, "fork") else "spawn"
    if start == "forkserver":
        # All that the tests import: what is not here is imported by each process, for seconds.
        modules = ["pytest", "torch.distributed", "nnorm_export.freezing", "nnorm_export.layers"]
        multiprocessing.set_forkserver_preload(modules)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _run, (count, Path(folder), function, arguments), nprocs=count, start_method=start
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(count)]


def _run(rank: int, count: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.alarm(_SECONDS)  # a process waits for ever for one that has failed
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=count)
    result = function(rank, *arguments)
    dist.destroy_process_group()
    torch.save(result, folder / f"{rank}.pt")

"""The library of training kernels for CPUs, called through ctypes: it depends on no version of PyTorch.

``custom_ops/training/problem.h`` defines the problem. The environment variable ``NNORM_EXPORT_LIBRARY`` chooses the
folder, as for ONNX Runtime's kernels; ``none`` switches the kernels off.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from nnorm_export.errors import RuntimeMissingError
from nnorm_export.library import OVERRIDE, WITHOUT, find_training_library

MOST_PARTS = 64  # of a problem, and so the most threads
MOST_PARTS_OF_ROWS = 16  # the gradients of shared weights are summed within each part, then over the parts
_ELEMENTS_FOR_THREADS = 32768  # of a smaller problem, handing parts to threads costs more than it saves


class Problem(ctypes.Structure):
    """``nnorm::TrainingProblem``."""

    tensors: tuple[Tensor, ...]  # what the pointers point to: a thread may still write when the call was interrupted

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y", "statistics")),
        *((name, ctypes.c_void_p) for name in ("gradient", "gradient_x", "gradient_weight", "gradient_bias", "team")),
        *((name, ctypes.c_uint64) for name in ("sets", "segments", "segment_length")),
        *((name, ctypes.c_uint64) for name in ("set_stride", "segment_stride", "element_stride")),
        *((name, ctypes.c_uint64) for name in ("period", "run", "parts", "seed")),
        *((name, ctypes.c_double) for name in ("epsilon", "delta", "alpha", "least_lmbda", "greatest_lmbda", "noise")),
        *((name, ctypes.c_int32) for name in ("order", "standardizes", "has_range", "computes_deviation")),
    )


@cache
def _library() -> ctypes.CDLL | None:
    path = find_training_library()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeMissingError(
            f"the training kernels in {path} cannot be loaded: {error}. Install nnorm_export again on this machine, or "
            f"train without kernels: {OVERRIDE}={WITHOUT}"
        ) from error
    library.nnorm_training_instruction_set.restype = ctypes.c_char_p
    library.nnorm_training_problem_size.restype = ctypes.c_size_t
    library.nnorm_training_run.argtypes = (
        *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.POINTER(Problem), ctypes.c_uint64, ctypes.c_uint64),
    )
    # A library of another version beside this package reads another problem.
    return library if library.nnorm_training_problem_size() == ctypes.sizeof(Problem) else None


def is_available() -> bool:
    return _library() is not None


def instruction_sets() -> list[str]:
    """The sets of instructions that the kernels are built for and this machine has, fastest first."""
    library = _library()
    if library is None:
        return []
    names = (library.nnorm_training_instruction_set(index) for index in itertools.count())
    return [name.decode() for name in itertools.takewhile(lambda name: name is not None, names)]


_chosen = 0  # which of instruction_sets() runs; tests run each


class Pass(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    NOISE = 2  # the noise alone, into y


def run(problem: Problem, dtype: torch.dtype, which: Pass) -> None:
    """Computes ``problem`` with as many threads as PyTorch uses; the result has the same bits for any number."""
    library = _library()
    assert library is not None
    is_double = dtype == torch.float64

    def compute(first: int, end: int) -> None:
        if library.nnorm_training_run(_chosen, is_double, which, problem, first, end) != 0:
            raise MemoryError("a training kernel of nnorm_export found no memory for its buffers")

    is_small = problem.sets * problem.segments * problem.segment_length < _ELEMENTS_FOR_THREADS
    threads = 1 if is_small else min(torch.get_num_threads(), problem.parts)
    problem.team = team_of_pytorch() if threads > 1 else None
    if threads == 1 or problem.team is not None:
        compute(0, problem.parts)
        return
    numbers = iter(range(problem.parts))  # the threads take the parts in turn

    def parts() -> None:
        for number in numbers:
            compute(number, number + 1)

    others = [_pool(threads).submit(parts) for _ in range(threads - 1)]
    try:
        parts()
    finally:  # after an interrupt too, the threads end before their tensors are freed
        for _ in numbers:
            pass
        wait(others)
    for other in others:
        other.result()


def team_of_pytorch() -> int | None:
    """GOMP_parallel of PyTorch's OpenMP, which runs a function in its threads; None if PyTorch has another library.

    Those threads wait for their next work without sleeping, so that others would share the processor's cores with them.
    All of them are asked, as by PyTorch's operators: OpenMP ends threads that a smaller team leaves out, and starts
    them again for the next one. A process that was forked has none: OpenMP would wait for those of its parent.
    """
    return _gomp_parallel() if os.getpid() == _PROCESS else None


_PROCESS = os.getpid()  # that loaded this module


@cache
def _gomp_parallel() -> int | None:
    if not torch._C.has_openmp:
        return None
    for name in (None, torch._C.__file__):  # as the loader looks for it: in what all share, and in what PyTorch needs
        with contextlib.suppress(AttributeError, OSError, TypeError):  # Windows refuses None
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
    return None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="nnorm_export")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork

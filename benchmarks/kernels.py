"""The kernels alone, each as a model of one node in ONNX Runtime, with ONNX Runtime's own operators for comparison.

In a network the nodes before a kernel have woken the session's threads, raised the processor's clock, and filled the
caches with other tensors. Therefore a small kernel runs for some time before it is timed, while the threads of the
other sessions sleep. Each run takes other tensors, together more than the second-level cache holds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from rich.progress import Progress

import nnorm_export
from benchmarks.measure import Timing, session_options, threads_text, time_in_turns
from nnorm_export.domain import OPERATORS
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

# Elements of float32 in the input. Small ones rotate, see ROTATING; 8 MiB fit the third-level cache, 256 MiB do not.
SIZES = {"128 KiB": 2**15, "8 MiB": 2**21, "256 MiB": 2**26}
WIDTH, CHANNELS, EXTENT = 768, 64, 1024
SMALL = 2**18  # elements; with more elements a run takes much longer than waking a thread
UNTIL_ASLEEP = 0.1  # seconds; ONNX Runtime's threads spin for half of this time after a run
UNTIL_AWAKE = 0.02  # seconds of untimed runs, because the first hundred runs are slower
TIMED_RUNS = 20
ROTATING = 2**20  # elements of all inputs through which the runs rotate
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
DTYPES = {
    "float32": (np.float32, TensorProto.FLOAT),
    "float16": (np.float16, TensorProto.FLOAT16),
    "float64": (np.float64, TensorProto.DOUBLE),
}


@dataclass(frozen=True)
class Kernel:
    """One operator: its inputs, their shape for a number of elements, and the operator to compare it with."""

    op_type: str
    base: str
    per_channel: bool
    dtype: str = "float32"
    width: int = WIDTH  # of a row

    @property
    def domain(self) -> str:
        if self.op_type in OPERATORS:
            return DOMAIN
        return MICROSOFT if self.op_type.startswith("Skip") else ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The inputs with one number for each channel, or for each element of a row."""
        if self.op_type in OPERATORS:
            return OPERATORS[self.op_type].parameters
        return ("weight", "bias") if self.op_type.endswith("LayerNormalization") else ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The inputs after X of the same shape as X."""
        if self.op_type in OPERATORS:
            return OPERATORS[self.op_type].operands
        return ("residual",) if self.domain == MICROSOFT else ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs, in the operator's order."""
        others = (self.operands, self.parameters) if self.domain == MICROSOFT else (self.parameters, self.operands)
        return ("X", *itertools.chain(*others))

    @property
    def name(self) -> str:
        return self.op_type if self.dtype == "float32" else f"{self.op_type}, {self.dtype}"

    def shape(self, elements: int) -> tuple[int, ...]:
        if not self.per_channel:
            return elements // self.width, self.width
        extent = min(EXTENT, elements // CHANNELS)
        return elements // (CHANNELS * extent), CHANNELS, extent


# ReLU, a copy with a comparison, is the fastest elementwise operator.
KERNELS = [
    Kernel("Relu", "Relu", True),
    *(Kernel(f"BatchNormalNorm{epilogue}", "Relu", True) for epilogue in ("", "Relu", "AddRelu")),
    Kernel("GroupNormalNorm", "Relu", True),
    Kernel("LayerNormalization", "LayerNormalization", False),
    Kernel("LayerNormalNorm", "LayerNormalization", False),
    Kernel("BatchNormalNorm", "Relu", True, "float16"),
    Kernel("BatchNormalNorm", "Relu", True, "float64"),
]


def open_kernel(kernel: Kernel, elements: int, threads: int, rotating: int = ROTATING) -> Callable[[], Any]:
    """A function that runs the node on tensors that are bound once, so that a run allocates and copies nothing.

    The runs rotate through inputs of ``rotating`` elements together.
    """
    rng = np.random.default_rng(0)
    kind, element = DTYPES[kernel.dtype]
    arithmetic = np.float64 if kernel.dtype == "float64" else np.float32
    shape = kernel.shape(elements)
    x = rng.standard_normal(shape, np.float32).astype(kind)
    width = shape[1]
    parameters = {name: rng.uniform(0.5, 1.5, width).astype(arithmetic) for name in kernel.parameters}
    tensors = {"X": x} | {name: x.copy() for name in kernel.operands}
    attributes = {"GroupNormalNorm": {"num_groups": 8}}.get(kernel.op_type, {})
    node = helper.make_node(kernel.op_type, kernel.inputs, ["Y"], domain=kernel.domain, **attributes)
    graph = helper.make_graph(
        [node],
        kernel.op_type,
        [helper.make_tensor_value_info(name, element, shape) for name in tensors],
        [helper.make_tensor_value_info("Y", element, shape)],
        [numpy_helper.from_array(value, name) for name, value in parameters.items()],
    )
    opsets = [helper.make_opsetid(*each) for each in (("", 20), (DOMAIN, DOMAIN_VERSION), (MICROSOFT, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = session_options(threads, stop_spinning=elements > SMALL)
    nnorm_export.register(options)  # the nodes have no bodies: only kernels run them
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def bind() -> Any:
        binding = session.io_binding()
        for name, tensor in tensors.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(tensor.copy()))
        binding.bind_ortvalue_output("Y", onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(x)))
        return binding

    bindings = itertools.cycle([bind() for _ in range(max(1, rotating // elements))])
    return lambda: session.run_with_iobinding(next(bindings))


def _wake(runs: Mapping[str, Callable[[], Any]], threads: int, name: str) -> None:
    """Runs the kernel until its threads are awake, the threads of the others sleep and the clock is at full speed."""
    if threads > 1:
        time.sleep(UNTIL_ASLEEP)
    end = time.perf_counter() + UNTIL_AWAKE
    while time.perf_counter() < end:
        runs[name]()


def measure(options: argparse.Namespace, progress: Progress) -> dict[tuple[str, str, int], Timing]:
    """(kernel, size, threads) -> the timing, with its ratio to the timing of the compared operator."""
    sizes = dict(list(SIZES.items())[:1]) if options.quick else SIZES
    results = {}
    task = progress.add_task("kernels", total=len(sizes) * len(options.threads))
    for size, elements in sizes.items():
        for threads in options.threads:
            for base in dict.fromkeys(kernel.base for kernel in KERNELS):
                runs = {k.name: open_kernel(k, elements, threads) for k in KERNELS if k.base == base}
                prepare, timed = (partial(_wake, runs, threads), TIMED_RUNS) if elements <= SMALL else (None, 1)
                timings = time_in_turns(runs, base=base, repeats=options.repeats, prepare=prepare, runs=timed)
                for name, timing in timings.items():
                    results[name, size, threads] = timing
            progress.advance(task)
    return results


def table(results: dict[tuple[str, str, int], Timing], options: argparse.Namespace) -> list[list[str]]:
    """Nanoseconds per element, gigabytes per second read and written, and the ratio."""
    columns = list(dict.fromkeys((size, threads) for _, size, threads in results))
    lines = [["kernel", *(f"{size}, {threads_text(threads)}" for size, threads in columns)]]
    for kernel in KERNELS:
        cells = []
        for size, threads in columns:
            timing = results[kernel.name, size, threads]
            elements = int(np.prod(kernel.shape(SIZES[size])))
            passes = 2 + len(kernel.operands)
            bytes_moved = passes * elements * np.dtype(DTYPES[kernel.dtype][0]).itemsize
            nanoseconds = 1e6 * timing.milliseconds / elements
            cells.append(
                f"{nanoseconds:.2f} ns, {bytes_moved / timing.milliseconds / 1e6:.0f} GB/s ({timing.ratio:.2f})"
            )
        lines.append([kernel.name, *cells])
    return lines

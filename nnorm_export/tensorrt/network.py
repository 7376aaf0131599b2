"""The network between a parsed file and an engine: what runs each node in it, and how its build goes on.

TensorRT and TensorRT-RTX have these classes alike.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# What is told of a build: the phase that it is in, and the part of the work that is done, of 1. The time that is left
# is not known.
Progress = Callable[[str, float], None]

_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^|\]]*[^|\] ])")  # written by the parser: "[ONNX Layer: norm/Op | …]"
_MADE_UNIQUE = re.compile(r"_\d+$")  # which the parser appends to a name that another layer has


@dataclass(frozen=True)
class Built:
    """An engine that a builder made.

    Attributes:
        serialized: its bytes.
        plugins: the ONNX nodes that are plugins in it.
        kernels: name and type of each kernel of the GPU, in order; None if the builder does not tell.
    """

    serialized: bytes
    plugins: set[str]
    kernels: list[tuple[str, str]] | None


def onnx_nodes(name: str, metadata: str) -> set[str]:
    """The ONNX nodes that a layer comes from, by its metadata; by its name if it has none."""
    return set(_ONNX_NODE.findall(metadata)) or {name, _MADE_UNIQUE.sub("", name)}


def plugins_in(tensorrt: Any, network: Any) -> set[str]:
    """The ONNX nodes that the parser made plugins of."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    plugins = [layer for layer in layers if layer.type == tensorrt.LayerType.PLUGIN_V3]
    return {node for layer in plugins for node in onnx_nodes(layer.name, layer.metadata)}


def allow_decomposition(tensorrt: Any, network: Any) -> None:
    """Lets every Attention become products and a softmax where no kernel fits, as for float32.

    PyTorch writes this operator from opset 23 on. Without this, the build of a float32 network fails.
    """
    kind = getattr(tensorrt.LayerType, "ATTENTION_INPUT", None)  # older versions have no such layer
    for index in range(network.num_layers if kind is not None else 0):
        layer = network.get_layer(index)
        if layer.type == kind:
            # The bindings return the base class.
            layer.__class__ = getattr(tensorrt, "IAttentionInputLayer", None) or tensorrt.IAttentionBoundaryLayer
            layer.attention.decomposable = True


@contextlib.contextmanager
def monitored(tensorrt: Any, progress: Progress) -> Iterator[Any]:
    """Yields an IProgressMonitor that passes the part of the work that is done on to ``progress``.

    An exception of ``progress`` and Ctrl-C end the build at its next step, and are raised when the block ends. They
    must not be raised inside of TensorRT, whose code an exception of Python ends with the process.
    """

    class Monitor(tensorrt.IProgressMonitor):  # type: ignore[misc]  # the module has no types
        def __init__(self) -> None:
            super().__init__()
            self.error: BaseException | None = None
            self._phases: dict[str, list[int]] = {}  # nested, the outermost first: steps done, steps in all
            self._done = 0.0

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases[name] = [0, max(steps, 1)]
            self._tell(name)

        def step_complete(self, name: str, step: int) -> bool:
            if name in self._phases:
                self._phases[name][0] = min(step + 1, self._phases[name][1])
            self._tell(name)
            return self.error is None

        def phase_finish(self, name: str) -> None:
            self._phases.pop(name, None)

        def interrupt(self, *_: object) -> None:
            self.error = self.error or KeyboardInterrupt()

        def _tell(self, name: str) -> None:
            share, done = 1.0, 0.0
            for completed, steps in self._phases.values():
                done += share * completed / steps
                share /= steps
            self._done = max(self._done, min(done, 1.0))
            if self.error is None:
                try:
                    progress(name, self._done)
                except BaseException as error:  # the caller's code; raised again when the block ends
                    self.error = error

    monitor = Monitor()
    with _instead_of_interrupting(monitor.interrupt):
        yield monitor
    if monitor.error is not None:
        raise monitor.error


@contextlib.contextmanager
def _instead_of_interrupting(handle: Callable[..., object]) -> Iterator[None]:
    """Calls ``handle`` on Ctrl-C; the main thread alone can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        # None is a handler that was not set from Python; it cannot be set again.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)

"""TensorRT-RTX, NVIDIA's TensorRT for RTX cards: building its engines, which needs no GPU.

Its builder measures nothing. It writes an engine for a list of compute capabilities, and the engine's kernels are
compiled when it is first run on a card. So an engine is built on any machine, and runs where a card is. Its networks
are strongly typed, as TensorRT 11's are.

Polygraphy serves one of TensorRT and TensorRT-RTX in a process. Engines are built here without it, so that a process
may build for both.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, ModelFileError, RuntimeMissingError
from nnorm_export.tensorrt.network import Built, Progress, allow_decomposition, monitored, plugins_in
from nnorm_export.tensorrt.profiles import Profiles

REMEDY = "pip install 'nnorm_export[tensorrt-rtx]'"
CURRENT = "current"  # the compute capability of this machine's GPU

_TURING = "7.5"
_KERNEL = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+)", re.MULTILINE)
LAYERS = "Layers:"  # the first word of the builder's log message that lists the layers of an engine
_ON_THE_HOST = frozenset({"shape_call"})  # types of layers that run on the processor, not on the GPU
_LONGEST_LINE = 300  # TensorRT-RTX names every node that a kernel comes from, thousands of characters long


def import_rtx() -> Any:
    """The module ``tensorrt_rtx``.

    Raises:
        RuntimeMissingError: it is not installed, or its libraries are not found.
    """
    try:
        return importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        raise RuntimeMissingError(f"TensorRT-RTX cannot be used here ({error}): {REMEDY}") from None


def why_no_gpu() -> str:
    """Why this machine runs no engine; empty if the driver finds a GPU. It opens the driver's library alone."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"this machine has no NVIDIA driver ({name} is not found)"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the NVIDIA driver of this machine does not start (CUDA's error {code})"
    return "" if count.value else "the NVIDIA driver of this machine finds no GPU"


def require_gpu() -> None:
    """Raises RuntimeMissingError if TensorRT-RTX is not installed, or this machine has no GPU to run engines on."""
    import_rtx()
    if reason := why_no_gpu():
        raise RuntimeMissingError(
            f"TensorRT-RTX builds engines here, and runs none: {reason}. Run the engine on a machine with an RTX card; "
            "nnorm-export engine --rtx builds it on this one"
        )


class ComputeCapabilities:
    """The compute capabilities that an engine is for.

    Args:
        tensorrt: the module ``tensorrt_rtx``.
        names: ``8.6``, ``12.0``, … or ``current``; None leaves the choice to TensorRT-RTX, which documents it as
            Ampere (8.0) and later.

    Raises:
        InputError: this TensorRT-RTX does not build for one of them, or the list is empty or has one twice.
    """

    def __init__(self, tensorrt: Any, names: Sequence[str] | None) -> None:
        known = {
            f"{member[2:-1]}.{member[-1]}": value
            for member, value in vars(tensorrt.ComputeCapability).items()
            if re.fullmatch(r"SM\d+", member)
        }
        known[CURRENT] = tensorrt.ComputeCapability.CURRENT
        self.names = None if names is None else list(names)
        for name in self.names or ():
            if name not in known:
                listed = ", ".join(sorted(set(known) - {CURRENT}, key=float))
                raise InputError(
                    f"TensorRT-RTX {tensorrt.__version__} has no compute capability {name!r}; it builds for {listed}, "
                    f"and for {CURRENT!r}, the GPU of this machine. Other GPUs need TensorRT"
                )
        if self.names is not None and len(set(self.names)) != max(len(self.names), 1):
            raise InputError(f"compute capabilities are a list of different ones, and {self.names} is not")
        if CURRENT in (self.names or ()) and (reason := why_no_gpu()):
            raise InputError(f"the compute capability {CURRENT!r} needs a GPU, and {reason}; name one: 8.9")
        self._members = [known[name] for name in self.names or ()]

    def set_in(self, config: Any) -> None:
        if not self._members:
            return
        config.num_compute_capabilities = len(self._members)
        for index, member in enumerate(self._members):
            config.set_compute_capability(member, index)

    @property
    def advice(self) -> str:
        """What a failed build may be due to; empty if nothing is known."""
        if _TURING not in (self.names or ()):
            return ""
        return (
            f"\nThe compute capability {_TURING} takes float16 only, and no float32 product or bfloat16: export with "
            f"--dtype fp16, or leave {_TURING} out"
        )


@dataclass(frozen=True)
class Parsed:
    """A network, and what must live as long as it does."""

    network: Any
    builder: Any
    parser: Any
    log: Any


def parse(tensorrt: Any, onnx: Path, source: Path) -> Parsed:
    """The network of ``onnx``, a file that :func:`.write_for_parser` wrote of ``source``.

    Raises:
        ModelFileError: TensorRT-RTX cannot parse the file.
    """
    log = _log(tensorrt)
    builder = tensorrt.Builder(log)
    network = builder.create_network(0)
    parser = tensorrt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx)):
        said = "\n".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise _failure(source, "parse it", tensorrt, said)
    return Parsed(network, builder, parser, log)


def build(
    tensorrt: Any,
    onnx: Path,
    profiles: Profiles,
    capabilities: ComputeCapabilities,
    *,
    source: Path,
    tf32: bool,
    progress: Progress,
) -> Built:
    """The engine of ``onnx``, as of :func:`parse`.

    Raises:
        ModelFileError: TensorRT-RTX cannot parse the file or build the engine.
    """
    parsed = parse(tensorrt, onnx, source)
    builder, network = parsed.builder, parsed.network
    allow_decomposition(tensorrt, network)
    config = builder.create_builder_config()
    # Its default is TF32, which loses half of float32's digits.
    (config.set_flag if tf32 else config.clear_flag)(tensorrt.BuilderFlag.TF32)
    config.profiling_verbosity = tensorrt.ProfilingVerbosity.DETAILED
    capabilities.set_in(config)
    if profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in profiles.items():
            profile.set_shape(name, shapes.min, shapes.opt, shapes.max)
        config.add_optimization_profile(profile)
    with monitored(tensorrt, progress) as monitor:
        config.progress_monitor = monitor
        serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise _failure(source, "build an engine of it", tensorrt, "\n".join(parsed.log.errors), capabilities.advice)
    return Built(bytes(serialized), plugins_in(tensorrt, network), kernels_in(parsed.log.layers))


def kernels_in(layers: str) -> list[tuple[str, str]]:
    """Name and type of each kernel in the builder's description of an engine, in the order in which they run."""
    found = ((match["name"], match["type"]) for match in _KERNEL.finditer(layers))
    return [(name, kind) for name, kind in found if kind not in _ON_THE_HOST]


def _failure(source: Path, doing: str, tensorrt: Any, said: str, advice: str = "") -> ModelFileError:
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in said.splitlines()]
    says = "\n".join(dict.fromkeys(lines)) or "(nothing)"
    return ModelFileError(f"{source}: TensorRT-RTX {tensorrt.__version__} cannot {doing}. It says:\n{says}{advice}")


def _log(tensorrt: Any) -> Any:
    """An ILogger, which keeps the errors and the description of the engine's layers, and prints nothing."""
    severity = tensorrt.ILogger.Severity

    class Log(tensorrt.ILogger):  # type: ignore[misc]  # the module has no types
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.layers = ""

        def log(self, level: Any, text: str) -> None:
            if level in (severity.ERROR, severity.INTERNAL_ERROR):
                self.errors.append(text)
            elif text.startswith(LAYERS):
                self.layers = text

    return Log()

"""build_engine(): an engine of TensorRT, or of TensorRT-RTX, of an ONNX file."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files.least_batch import least_rows
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.staging import check_output, staged, writing
from nnorm_export.reports import Report
from nnorm_export.tensorrt import installation, rtx as tensorrt_rtx, rtx_plugins
from nnorm_export.tensorrt.network import Built, Progress, allow_decomposition, monitored, plugins_in
from nnorm_export.tensorrt.parser_input import write_for_parser
from nnorm_export.tensorrt.plugins import check_plugins, choose_plugins, faster_as_plugins, load_plugins
from nnorm_export.tensorrt.profiles import (
    DEFAULT_BATCH,
    Given,
    Profiles,
    check_profiles,
    default_profiles,
    input_axes,
)

_CHOSEN_BY_RTX = (
    "no compute capabilities given: TensorRT-RTX chooses, by its documentation 8.0 and later; name yours, "
    "8.6,8.9 for example"
)


@dataclass(frozen=True)
class EngineReport(Report):
    """An engine that was built.

    Attributes:
        path: the file.
        size: its bytes.
        runtime: the runtime that opens it, ``tensorrt`` or ``tensorrt-rtx``.
        tensorrt: the version that built it, and that runs it.
        compute_capabilities: those that it was built for; empty for the GPU of this machine (``tensorrt``), or where
            the choice was left to TensorRT-RTX.
        profiles: the shapes of each dynamic input that it is built for; empty if no input is dynamic.
        implementations: normalization -> ``plugin`` or ``body``, read off the network that the engine is built of.
        kernels: how many kernels of the GPU it has; None if the builder does not tell, as TensorRT's.
        notices: what else the user should know.
    """

    path: Path
    size: int
    runtime: str
    tensorrt: str
    compute_capabilities: list[str]
    profiles: Profiles
    implementations: dict[str, str]
    kernels: int | None
    notices: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """``plugin`` and ``body``, and how many normalizations they run."""
        return dict(Counter(self.implementations.values()))

    @property
    def built_for(self) -> str:
        """What runs it: ``TensorRT-RTX 1.7.1, compute capabilities 8.6 and 8.9``."""
        if self.runtime == "tensorrt":
            return f"TensorRT {self.tensorrt}, and GPUs like the one in this machine"
        listed = " and ".join(self.compute_capabilities) or "8.0 and later"
        return f"TensorRT-RTX {self.tensorrt}, compute capabilities {listed}"

    def __str__(self) -> str:
        ran = ", ".join(f"{count} by {way}" for way, count in self.counts.items()) or "none that are nodes of the file"
        shapes = "; ".join(f"{name} {shapes}" for name, shapes in self.profiles.items()) or "fixed"
        return f"{self.path}: for {self.built_for}, shapes: {shapes}, normalizations: {ran}"


def build_engine(
    path: str | Path,
    output: str | Path,
    *,
    profiles: Given | None = None,
    plugins: bool | None = None,
    timing_cache: str | Path | None = None,
    tf32: bool = False,
    rtx: bool = False,
    compute_capabilities: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> EngineReport:
    """Builds an engine from the ONNX file ``path``, for the installed version of TensorRT.

    The engine is for the GPU of this machine. With ``rtx`` it is for RTX cards, and this machine needs no GPU. The
    precision is that of the file: export with ``dtype="fp16"`` for an engine in float16.
    :func:`nnorm_export.load` opens the engine with ``runtime="tensorrt"`` or ``"tensorrt-rtx"``. Other programs must
    first load the plugins, if the engine has any (:func:`nnorm_export.get_plugin_path`).

    >>> report = nnorm_export.build_engine("model.onnx", "model.plan")
    >>> (logits,) = nnorm_export.load(report.path)(images.numpy())

    Args:
        path: a file in the form ``portable``, ``primitives`` or ``custom``.
        output: the file to write, ``model.plan`` for example; ``load`` takes ``model.rtx.plan`` for TensorRT-RTX's.
        profiles: input name -> its least, best and greatest shape, for each input with dynamic axes. None takes 1, 8
            and 64 for the batch, if no other axis is dynamic.
        plugins: True runs every normalization with this package's plugin, False every one with its body, which TensorRT
            fuses with its neighbors. None, the default, takes bodies for TensorRT-RTX. For TensorRT it takes plugins,
            if they are installed, for LayerNormalNorm and GroupNormalNorm, and bodies for BatchNormalNorm;
            :mod:`nnorm_export.tensorrt.plugins` says why.
        timing_cache: a file for TensorRT's measurements, which make a later build quicker. TensorRT-RTX has none.
        tf32: let the GPU round the factors of float32 products to TF32, for speed.
        rtx: build for TensorRT-RTX.
        compute_capabilities: the cards that TensorRT-RTX builds for: ``["8.6", "8.9", "12.0"]``, or ``["current"]`` for
            the GPU of this machine. None leaves the choice to it, which it documents as 8.0 and later.
        progress: called during the build with the phase that it is in and the part that is done, of 1.

    Raises:
        ModelFileError: ``path`` is not ONNX, is optimized for processors, or lacks bodies or normalizations that
            ``plugins`` needs; or TensorRT cannot build it; or the engine is not what ``plugins`` says.
        InputError: ``profiles`` does not fit the file, or an option is not one of the TensorRT that was chosen.
        RuntimeMissingError: TensorRT, Polygraphy or plugins that are needed are not installed.
        ExportError: ``output`` or ``timing_cache`` cannot be written. Both stay as they were, as in every other case.
    """
    if rtx and timing_cache is not None:
        raise InputError("TensorRT-RTX measures nothing when it builds, and has no timing cache; leave it out")
    if compute_capabilities is not None and not rtx:
        raise InputError(
            "compute capabilities are chosen for TensorRT-RTX (rtx=True, --rtx); TensorRT builds for the GPU of this "
            "machine"
        )
    check_output(output)
    if timing_cache is not None:
        check_output(timing_cache)
    builder = RtxBuilder(compute_capabilities) if rtx else TensorRTBuilder()
    source, output = read(Path(path).expanduser()), Path(output).expanduser()
    if output.exists() and output.samefile(source.path):
        raise ModelFileError(f"{source.path}: the engine would take the place of the model; give it another name")
    cache = None if timing_cache is None else Path(timing_cache).expanduser()
    with staged(output) as staging, _staged_cache(cache) as staged_cache:
        built = compile_engine(
            builder, source, profiles=profiles, plugins=plugins, tf32=tf32, timing_cache=staged_cache, progress=progress
        )
        with writing(output):
            staging.write_bytes(built.serialized)
    notices = [] if profiles is not None else _default_notices(built.profiles)
    notices += builder.notices + _plugin_notices(source, built, plugins)
    return EngineReport(
        path=output,
        size=len(built.serialized),
        runtime=builder.runtime,
        tensorrt=builder.version,
        compute_capabilities=builder.compute_capabilities,
        profiles=built.profiles,
        implementations=built.implementations,
        kernels=built.kernels,
        notices=notices,
    )


class TensorRTBuilder:
    """TensorRT's builder, by Polygraphy.

    Raises:
        RuntimeMissingError: TensorRT or Polygraphy is not installed.
    """

    runtime = "tensorrt"

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.compute_capabilities: list[str] = []
        self._polygraphy, self._tensorrt = installation.import_polygraphy()
        self.version = self._tensorrt.__version__

    def load_plugins(self, file: ModelFile, plugins: bool | None) -> str:
        """See :func:`.plugins.load_plugins`."""
        return load_plugins(self._polygraphy, self._tensorrt, plugins)

    def prefers_plugins(self, op_types: frozenset[str]) -> frozenset[str]:
        """The operators that plugins run by default; see :mod:`.plugins`."""
        return faster_as_plugins(op_types)

    def build(
        self,
        file: ModelFile,
        onnx: Path,
        profiles: Profiles,
        *,
        tf32: bool,
        timing_cache: Path | None,
        progress: Progress | None,
    ) -> Built:
        """The engine of ``onnx``, which is written of ``file``. ``timing_cache`` is read, if it exists, and written."""
        with installation.explained(file.path, "build an engine of it"):
            watched = contextlib.nullcontext() if progress is None else monitored(self._tensorrt, progress)
            with watched as monitor:
                return self._build(onnx, profiles, tf32, timing_cache, monitor)

    def _build(self, onnx: Path, profiles: Profiles, tf32: bool, timing_cache: Path | None, monitor: Any) -> Built:
        """The network is strongly typed, as TensorRT 11's always are: it computes in float16 what the file does."""
        polygraphy = self._polygraphy
        profile = polygraphy.Profile()
        for name, shapes in profiles.items():
            profile.add(name, min=shapes.min, opt=shapes.opt, max=shapes.max)
        known = timing_cache is not None and timing_cache.is_file()
        # Polygraphy asks for detailed profiling verbosity by itself; inspector.py needs it.
        config = polygraphy.CreateConfig(
            profiles=[profile],
            tf32=tf32,
            load_timing_cache=str(timing_cache) if known else None,
            progress_monitor=monitor,
        )
        parsed = polygraphy.NetworkFromOnnxPath(str(onnx), strongly_typed=True)()
        allow_decomposition(self._tensorrt, parsed[1])
        plugins = plugins_in(self._tensorrt, parsed[1])
        save_to = None if timing_cache is None else str(timing_cache)
        built = polygraphy.EngineBytesFromNetwork(parsed, config=config, save_timing_cache=save_to)()
        return Built(bytes(built), plugins, kernels=None)


class RtxBuilder:
    """TensorRT-RTX's builder, which needs no GPU.

    Args:
        compute_capabilities: as for :func:`build_engine`.

    Raises:
        RuntimeMissingError: TensorRT-RTX is not installed.
        InputError: it does not build for one of ``compute_capabilities``.
    """

    runtime = "tensorrt-rtx"

    def __init__(self, compute_capabilities: Sequence[str] | None = None) -> None:
        self._tensorrt = tensorrt_rtx.import_rtx()
        self._capabilities = tensorrt_rtx.ComputeCapabilities(self._tensorrt, compute_capabilities)
        self.version = self._tensorrt.__version__
        self.compute_capabilities = self._capabilities.names or []
        self.notices = [] if self.compute_capabilities else [_CHOSEN_BY_RTX]

    def load_plugins(self, file: ModelFile, plugins: bool | None) -> str:
        """The reason why the plugins cannot be loaded; an empty string if they are loaded or not needed.

        A normalization that has a body does not need a plugin here.
        """
        if plugins or (plugins is None and file.bare):
            return rtx_plugins.load(self._tensorrt, needed=bool(plugins))
        return ""

    def prefers_plugins(self, op_types: frozenset[str]) -> frozenset[str]:
        """The operators that plugins run by default: none; see :mod:`.plugins`."""
        return frozenset()

    def build(
        self,
        file: ModelFile,
        onnx: Path,
        profiles: Profiles,
        *,
        tf32: bool,
        timing_cache: Path | None,
        progress: Progress | None,
    ) -> Built:
        """The engine of ``onnx``, which is written of ``file``."""
        return tensorrt_rtx.build(
            self._tensorrt,
            onnx,
            profiles,
            self._capabilities,
            source=file.path,
            tf32=tf32,
            progress=progress or (lambda phase, done: None),
        )

    def plugins_of(self, file: ModelFile, onnx: Path) -> set[str]:
        """The nodes of ``onnx``, which is written of ``file``, that the parser makes plugins of."""
        return plugins_in(self._tensorrt, tensorrt_rtx.parse(self._tensorrt, onnx, file.path).network)


Builder = TensorRTBuilder | RtxBuilder


def plan_for_rtx(path: str | Path) -> dict[str, str]:
    """Normalization -> ``plugin`` or ``body``, as an engine of TensorRT-RTX would have it by default.

    The file is parsed and nothing is built; errors as of :func:`build_engine`.
    """
    builder, file = RtxBuilder(), read(path)
    unavailable = builder.load_plugins(file, None)
    op_types = choose_plugins(file, None, unavailable, builder.prefers_plugins)
    with tempfile.TemporaryDirectory() as folder:
        with writing(Path(folder)):
            onnx = write_for_parser(file, op_types, Path(folder))
        return check_plugins(file, op_types, builder.plugins_of(file, onnx))


@dataclass(frozen=True)
class CompiledEngine:
    """An engine in memory.

    Attributes:
        serialized: its bytes.
        profiles, implementations, kernels: as of :class:`EngineReport`.
        without_plugins: why there are no plugins here; empty if they are loaded, or not wanted.
    """

    serialized: bytes
    profiles: Profiles
    implementations: dict[str, str]
    kernels: int | None
    without_plugins: str


def compile_engine(
    builder: Builder,
    file: ModelFile,
    *,
    profiles: Given | None,
    plugins: bool | None,
    tf32: bool,
    timing_cache: Path | None = None,
    progress: Progress | None = None,
) -> CompiledEngine:
    """Builds an engine of ``file``; arguments and errors as of :func:`build_engine`."""
    unavailable = builder.load_plugins(file, plugins)
    op_types = choose_plugins(file, plugins, unavailable, builder.prefers_plugins)
    axes, least = input_axes(file.proto), least_rows(file.least_batch)
    shapes = default_profiles(axes, least) if profiles is None else check_profiles(axes, profiles)
    with tempfile.TemporaryDirectory() as folder:
        with writing(Path(folder)):
            onnx = write_for_parser(file, op_types, Path(folder))
        built = builder.build(file, onnx, shapes, tf32=tf32, timing_cache=timing_cache, progress=progress)
    implementations = check_plugins(file, op_types, built.plugins)
    kernels = None if built.kernels is None else len(built.kernels)
    return CompiledEngine(built.serialized, shapes, implementations, kernels, unavailable)


@contextlib.contextmanager
def _staged_cache(cache: Path | None) -> Iterator[Path | None]:
    """A copy of the timing cache to work on, which replaces it when the engine is built."""
    if cache is None:
        yield None
        return
    with staged(cache) as staging:
        if cache.is_file():
            with writing(cache):
                shutil.copyfile(cache, staging)
        yield staging
        Path(f"{staging}.lock").unlink(missing_ok=True)  # Polygraphy's


def _default_notices(shapes: Profiles) -> list[str]:
    least, best, greatest = DEFAULT_BATCH
    return [
        f"no shapes given: {name} may have a batch of {least} to {greatest}, and is fastest at {best}"
        for name in shapes
    ]


def _plugin_notices(source: ModelFile, built: CompiledEngine, plugins: bool | None) -> list[str]:
    slow = faster_as_plugins(node.op_type for node in source.normalizations)
    notices = []
    if plugins is None and built.without_plugins and slow:
        listed = ", ".join(sorted(slow))
        notices.append(f"bodies run {listed}, for which plugins are likely faster: {built.without_plugins}")
    if "plugin" in built.implementations.values():
        notices.append("the engine runs only where the plugins are loaded, by nnorm_export.load or get_plugin_path()")
    return notices

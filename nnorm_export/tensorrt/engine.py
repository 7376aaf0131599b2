"""build_engine(): a TensorRT engine of an ONNX file, for the GPU of this machine."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import ModelFileError
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.staging import check_target, staged, writing
from nnorm_export.tensorrt import installation
from nnorm_export.tensorrt.inspector import plugin_nodes
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


@dataclass(frozen=True)
class EngineReport:
    """A TensorRT engine that was built.

    Attributes:
        path: the file.
        size: its bytes.
        tensorrt: the version that built it, and that runs it.
        profiles: the shapes of each dynamic input that it is built for; empty if no input is dynamic.
        implementations: normalization -> ``plugin`` or ``body``, read off the layers of the engine.
        notices: what else the user should know.
    """

    path: Path
    size: int
    tensorrt: str
    profiles: Profiles
    implementations: dict[str, str]
    notices: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """``plugin`` and ``body``, and how many normalizations they run."""
        return dict(Counter(self.implementations.values()))

    def __str__(self) -> str:
        ran = ", ".join(f"{count} by {way}" for way, count in self.counts.items()) or "none that are nodes of the file"
        shapes = "; ".join(f"{name} {shapes}" for name, shapes in self.profiles.items()) or "fixed"
        return f"{self.path}: for TensorRT {self.tensorrt}, shapes: {shapes}, normalizations: {ran}"


def build_engine(
    path: str | Path,
    output: str | Path,
    *,
    profiles: Given | None = None,
    plugins: bool | None = None,
    timing_cache: str | Path | None = None,
    tf32: bool = False,
) -> EngineReport:
    """Builds the engine that TensorRT runs ``path`` with, for its installed version and the GPU of this machine.

    The precision is that of the file: export with ``dtype="fp16"`` for an engine in float16.
    :func:`nnorm_export.load` opens the engine with ``runtime="tensorrt"``; elsewhere it needs the plugins loaded, if it
    has any (:func:`nnorm_export.get_plugin_path`).

    Args:
        path: a file in the form ``portable``, ``primitives`` or ``custom``.
        output: the file to write, ``model.plan`` for example.
        profiles: input name -> its least, best and greatest shape, for each input with dynamic axes. None takes 1, 8
            and 64 for the batch, if no other axis is dynamic.
        plugins: True runs every normalization with this package's plugin, False every one with its body, which TensorRT
            fuses with its neighbours. None, the default, takes plugins, if they are installed, for LayerNormalNorm and
            GroupNormalNorm, and bodies for BatchNormalNorm; see :mod:`nnorm_export.tensorrt.plugins`.
        timing_cache: a file for TensorRT's measurements, which make a later build quicker.
        tf32: let the GPU round the factors of float32 products to TF32, for speed.

    Raises:
        ModelFileError: ``path`` is not ONNX, is optimised for processors, or lacks bodies or normalizations that
            ``plugins`` needs; or TensorRT cannot build it; or the engine is not what ``plugins`` says.
        InputError: ``profiles`` does not fit the file.
        RuntimeMissingError: TensorRT, Polygraphy or plugins that are needed are not installed.
        ExportError: ``output`` or ``timing_cache`` cannot be written.
        In every case both files stay as they were.
    """
    check_target(output)
    if timing_cache is not None:
        check_target(timing_cache)
    _, tensorrt = installation.import_polygraphy()
    source, target = read(Path(path).expanduser()), Path(output).expanduser()
    if target.exists() and target.samefile(source.path):
        raise ModelFileError(f"{source.path}: the engine would take the place of the model; give it another name")
    cache = None if timing_cache is None else Path(timing_cache).expanduser()
    with staged(target) as staging, _staged_cache(cache) as staged_cache:
        built = compile_engine(source, profiles=profiles, plugins=plugins, tf32=tf32, timing_cache=staged_cache)
        with writing(target):
            staging.write_bytes(built.serialized)
    notices = [] if profiles is not None else _default_notices(built.profiles)
    notices += _plugin_notices(source, built, plugins)
    size = len(built.serialized)
    return EngineReport(target, size, tensorrt.__version__, built.profiles, built.implementations, notices)


@dataclass(frozen=True)
class CompiledEngine:
    """An engine in memory.

    Attributes:
        engine: the ``ICudaEngine``, and ``serialized`` its bytes.
        profiles, implementations: as of :class:`EngineReport`.
        without_plugins: why there are no plugins here; empty if they are loaded, or not wanted.
    """

    engine: Any
    serialized: bytes
    profiles: Profiles
    implementations: dict[str, str]
    without_plugins: str


def compile_engine(
    file: ModelFile,
    *,
    profiles: Given | None,
    plugins: bool | None,
    tf32: bool,
    timing_cache: Path | None = None,
) -> CompiledEngine:
    """Builds an engine of ``file``; arguments and errors as of :func:`build_engine`."""
    polygraphy, tensorrt = installation.import_polygraphy()
    unavailable = load_plugins(polygraphy, tensorrt, plugins)
    op_types = choose_plugins(file, plugins, unavailable)
    axes = input_axes(file.proto)
    shapes = default_profiles(axes) if profiles is None else check_profiles(axes, profiles)
    with tempfile.TemporaryDirectory() as folder:
        with writing(Path(folder)):
            onnx = write_for_parser(file, op_types, Path(folder))
        with installation.explained(file.path, "build an engine of it"):
            serialized = _build(polygraphy, onnx, shapes, tf32, timing_cache)
            engine = polygraphy.EngineFromBytes(serialized)()
    implementations = check_plugins(file, op_types, plugin_nodes(engine, tensorrt, file.path))
    return CompiledEngine(engine, serialized, shapes, implementations, unavailable)


def _build(polygraphy: Any, onnx: Path, profiles: Profiles, tf32: bool, timing_cache: Path | None) -> bytes:
    """The serialised engine. ``timing_cache`` is read, if the file exists, and written.

    The network is strongly typed, as TensorRT 11's always are: the engine computes in float16 what the file does, and
    nothing else.
    """
    profile = polygraphy.Profile()
    for name, shapes in profiles.items():
        profile.add(name, min=shapes.min, opt=shapes.opt, max=shapes.max)
    known = timing_cache is not None and timing_cache.is_file()
    # Polygraphy asks for detailed profiling verbosity by itself; inspector.py needs it.
    config = polygraphy.CreateConfig(
        profiles=[profile], tf32=tf32, load_timing_cache=str(timing_cache) if known else None
    )
    network = polygraphy.NetworkFromOnnxPath(str(onnx), strongly_typed=True)
    save_to = None if timing_cache is None else str(timing_cache)
    return bytes(polygraphy.EngineBytesFromNetwork(network, config=config, save_timing_cache=save_to)())


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

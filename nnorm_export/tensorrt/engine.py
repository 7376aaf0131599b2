"""build_engine(): a TensorRT engine of an ONNX file, for the GPU of this machine."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nnorm_export.errors import ModelFileError
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.staging import staged, writing
from nnorm_export.tensorrt import parser_input as engines
from nnorm_export.tensorrt.inspector import plugin_nodes
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
        profiles: the shapes of each dynamic input that it is built for; empty where none is dynamic.
        implementations: normalization -> ``plugin`` or ``body``, read off the layers of the engine.
        notices: what the user should know beyond that.
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
            fuses with what is around it. None, the default, takes plugins where they are installed for
            LayerNormalNorm and GroupNormalNorm, and bodies for BatchNormalNorm; see
            :mod:`nnorm_export.tensorrt.parser_input`.
        timing_cache: a file that TensorRT notes its measurements in, so that a later build is quicker.
        tf32: let the GPU round the factors of float32 products to TF32, for speed.

    Raises:
        ModelFileError: ``path`` is not ONNX, is optimised for processors, or lacks bodies or normalizations that
            ``plugins`` needs; or TensorRT cannot build it; or the engine is not what ``plugins`` says.
        InputError: ``profiles`` does not fit the file.
        RuntimeMissingError: TensorRT, Polygraphy or plugins that are needed are not installed.
        ExportError: ``output`` or ``timing_cache`` cannot be written.
        In every case both are what they were before.
    """
    polygraphy, tensorrt = engines.import_polygraphy()
    source, target = read(Path(path).expanduser()), Path(output).expanduser()
    if target.exists() and target.samefile(source.path):
        raise ModelFileError(f"{source.path}: the engine would take the place of the model; give it another name")
    unavailable = engines.load_plugins(polygraphy, tensorrt, plugins)
    op_types = engines.choose_plugins(source, plugins, unavailable)
    axes = input_axes(source.proto)
    shapes = default_profiles(axes) if profiles is None else check_profiles(axes, profiles)
    cache = None if timing_cache is None else Path(timing_cache).expanduser()
    with staged(target) as staging, _staged_cache(cache) as staged_cache:
        with tempfile.TemporaryDirectory() as folder, engines.explained(source.path, "build an engine of it"):
            with writing(target):
                onnx = engines.write_for_parser(source, op_types, Path(folder))
            serialized = engines.build(onnx, shapes, tf32=tf32, timing_cache=staged_cache)
            engine = polygraphy.EngineFromBytes(serialized)()
        implementations = engines.check_plugins(source, op_types, plugin_nodes(engine, tensorrt, source.path))
        with writing(target):
            staging.write_bytes(serialized)
    notices = [] if profiles is not None else _default_notices(shapes)
    notices += _plugin_notices(source, implementations, plugins, unavailable)
    return EngineReport(target, len(serialized), tensorrt.__version__, shapes, implementations, notices)


@contextlib.contextmanager
def _staged_cache(cache: Path | None) -> Iterator[Path | None]:
    """A copy of the timing cache to work on, which takes its place when the engine is built."""
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


def _plugin_notices(
    source: ModelFile, implementations: dict[str, str], plugins: bool | None, unavailable: str
) -> list[str]:
    slow = {node.op_type for node in source.normalizations} & engines.FASTER_AS_PLUGIN
    notices = []
    if plugins is None and unavailable and slow:
        notices.append(f"bodies run {', '.join(sorted(slow))}, for which plugins are likely faster: {unavailable}")
    if "plugin" in implementations.values():
        notices.append("the engine runs only where the plugins are loaded, by nnorm_export.load or get_plugin_path()")
    return notices

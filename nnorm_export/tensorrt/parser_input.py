"""From an ONNX file to a TensorRT engine, by Polygraphy's loaders.

What runs a normalization is settled in the file that TensorRT's parser gets, because its own choice between a node's
body and a plugin changes from version to version (10.7 and 10.15 changed it). A normalization for a plugin is a node
without a body: where the plugin is not loaded, the parser fails. The others are inlined, as in the form ``primitives``:
no plugin that the process has loaded can take them. So neither is ever used in the other's stead without a word.

Which of the two is faster: a plugin reads each row once where the body of LayerNormalNorm or GroupNormalNorm is a chain
of reductions, but does not fuse with its neighbours. The operators of batch normalization are pointwise, and TensorRT
fuses such bodies into one kernel, or into the convolution before. So plugins are the default for the former only.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from nnorm_export import library
from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.files.forms import inline_bodies
from nnorm_export.files.machine import OPTIMIZED
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.files.staging import save
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.tensorrt.profiles import Profiles

FASTER_AS_PLUGIN = frozenset({"GroupNormalNorm", "LayerNormalNorm"})


def import_polygraphy() -> tuple[Any, Any]:
    """``polygraphy.backend.trt`` and ``tensorrt``.

    Raises:
        RuntimeMissingError: one of them is not installed, or TensorRT's libraries are not found.
    """
    try:
        # Extras: this package works without them. Polygraphy itself imports TensorRT when it is first needed.
        tensorrt = importlib.import_module("tensorrt")
        return importlib.import_module("polygraphy.backend.trt"), tensorrt
    except ImportError as error:
        raise RuntimeMissingError(
            f"TensorRT cannot be used here ({error}): pip install 'nnorm_export[tensorrt]', on a machine with an "
            "NVIDIA GPU and its driver. Engines are built and run on the kind of GPU that they are for"
        ) from None


def plugin_library(tensorrt: Any) -> str:
    """The library that registers our plugins, once, with this TensorRT when it is loaded.

    Raises:
        RuntimeMissingError: this installation has none, or none for this version.
    """
    major = tensorrt.__version__.partition(".")[0]
    any_version = Path(library.get_plugin_path(registering=True))
    path = any_version.with_name(library.REGISTERING_PLUGIN_FILE_NAMES.replace("*", major))
    if path.is_file():
        return str(path)
    raise RuntimeMissingError(
        f"there are plugins beside {any_version}, but none for TensorRT {tensorrt.__version__}: {path.name} is "
        "missing. Install nnorm_export again with TENSORRT_INCLUDE_DIR naming the folder of that version's "
        "NvInferRuntime.h"
    )


def load_plugins(polygraphy: Any, tensorrt: Any, plugins: bool | None) -> str:
    """Loads the plugins for every engine that this process builds or opens from now on, unless ``plugins`` is False.

    Returns:
        Why there are none; empty where they are loaded, or unwanted.

    Raises:
        RuntimeMissingError: ``plugins`` is True, and there are none or they cannot be loaded.
    """
    if plugins is False:
        return ""
    try:
        path = plugin_library(tensorrt)
        polygraphy.LoadPlugins([path])()
    except RuntimeMissingError as error:
        if plugins:
            raise
        return str(error)
    except OSError as error:  # installed, but broken: that is never passed over
        raise RuntimeMissingError(f"the TensorRT plugins in {path} cannot be loaded: {error}") from error
    return ""


def choose_plugins(file: ModelFile, plugins: bool | None, unavailable: str) -> frozenset[str]:
    """The operators of ``file`` that plugins run; the bodies of the others do.

    Args:
        plugins: True for all of them, False for none, None for those that are likely faster, where there are plugins,
            and for those without a body.
        unavailable: why there are no plugins; empty if there are.

    Raises:
        ModelFileError: the file is optimised for processors, has no normalizations for ``plugins=True``, or no bodies
            for ``plugins=False``.
        RuntimeMissingError: plugins are needed, and there are none.
    """
    if file.form == OPTIMIZED:
        raise ModelFileError(
            f"{file.path}: the file is optimised for processors; give the portable file that it was made from"
        )
    bodies = {function.name for function in file.proto.functions if function.domain == DOMAIN}
    op_types = frozenset(node.op_type for node in file.normalizations)
    if plugins and not op_types:
        raise ModelFileError(
            f"{file.path}: the file has no nnorm nodes for plugins to run (its form is {file.form!r}); export the form "
            "'portable', or leave plugins off"
        )
    bare = op_types - bodies
    if bare and plugins is False:
        raise ModelFileError(
            f"{file.path}: {', '.join(sorted(bare))} have no bodies in it (its form is {file.form!r}), so only plugins "
            "run them; export the form 'portable', or leave plugins on"
        )
    if unavailable and (plugins or bare):
        raise RuntimeMissingError(f"{file.path} needs TensorRT plugins: {unavailable}")
    if plugins is None:
        return bare if unavailable else bare | (op_types & FASTER_AS_PLUGIN)
    return op_types if plugins else frozenset()


def write_for_parser(file: ModelFile, op_types: frozenset[str], folder: Path) -> Path:
    """``file`` in ``folder`` as the parser is to get it: ``op_types`` without bodies, the other normalizations inlined.

    Raises:
        ModelFileError: the weights of ``file`` cannot be read.
    """
    if not file.normalizations:
        return file.path
    model = _with_weights(file.path)
    for identifier in [identifier for identifier in model.functions if identifier[0] == DOMAIN]:
        if identifier[1] in op_types:
            del model.functions[identifier]
    if model.functions:
        inline_bodies(model)
    if op_types:
        model.opset_imports[DOMAIN] = DOMAIN_VERSION
    path = folder / "model.onnx"
    save(model, path, external_data=None)
    return path


def _with_weights(path: Path) -> ir.Model:
    model = ir.load(path)
    try:
        ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path}: its weights lie in other files, which cannot be read ({error}); they belong beside it"
        ) from error
    return model


def check_plugins(file: ModelFile, op_types: frozenset[str], found: set[str]) -> dict[str, str]:
    """Node name -> ``plugin`` or ``body``, by ``found``, the result of :func:`.inspector.plugin_nodes`.

    Raises:
        ModelFileError: a normalization of ``op_types``, those for plugins, is not among them.
    """
    if lost := [node.name for node in file.normalizations if node.op_type in op_types and node.name not in found]:
        raise ModelFileError(
            f"{file.path}: {', '.join(lost)} should be run by plugins, and the engine has no plugins of these names "
            f"(it has: {', '.join(sorted(found)) or 'none'}). This is a defect of nnorm_export; until it is mended, "
            "leave plugins off (--no-plugins)"
        )
    return {node.name: "plugin" if node.name in found else "body" for node in file.normalizations}


def build(onnx: Path, profiles: Profiles, *, tf32: bool = False, timing_cache: Path | None = None) -> bytes:
    """The serialised engine of a file that :func:`write_for_parser` wrote.

    The network is strongly typed, as TensorRT 11's always are: what the file computes in float16 the engine does, and
    nothing else. ``timing_cache`` is read, if it is there, and written.

    Raises:
        RuntimeMissingError: as :func:`import_polygraphy`.
        PolygraphyException, RuntimeError, …: TensorRT cannot; see :func:`explained`.
    """
    polygraphy, _ = import_polygraphy()
    profile = polygraphy.Profile()
    for name, shapes in profiles.items():
        profile.add(name, min=shapes.min, opt=shapes.opt, max=shapes.max)
    known = timing_cache is not None and timing_cache.is_file()
    # Polygraphy asks for a detailed profiling verbosity by itself, which is what tells a plugin in the engine.
    config = polygraphy.CreateConfig(
        profiles=[profile], tf32=tf32, load_timing_cache=str(timing_cache) if known else None
    )
    network = polygraphy.NetworkFromOnnxPath(str(onnx), strongly_typed=True)
    save_to = None if timing_cache is None else str(timing_cache)
    return bytes(polygraphy.EngineBytesFromNetwork(network, config=config, save_timing_cache=save_to)())


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turns what TensorRT and Polygraphy raise and print into one error of ours; nothing is printed otherwise.

    Raises:
        ModelFileError: TensorRT cannot do it.
    """
    log = io.StringIO()
    try:
        # stderr is left alone: progress is shown on it meanwhile.
        with _logging_into(log), contextlib.redirect_stdout(log):
            yield
    except NnormExportError:
        raise
    except Exception as error:  # TensorRT's exceptions share no public base
        said = log.getvalue().strip()
        details = said if str(error) in said else f"{said}\n{error}".strip()
        raise ModelFileError(
            f"{path}: TensorRT cannot {doing}. Engines are built and run on machines with an NVIDIA GPU and its driver "
            f"only. What it says:\n{details}"
        ) from error


@contextlib.contextmanager
def _logging_into(log: io.StringIO) -> Iterator[None]:
    """Errors that Polygraphy logs, TensorRT's among them, go into ``log`` and nowhere else; the rest goes nowhere."""
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    by_logging, handler = logger.use_python_logging_system, logging.StreamHandler(log)
    logger.use_python_logging_system = True
    records = logger.python_logger
    propagate, records.propagate = records.propagate, False
    records.addHandler(handler)
    try:
        with logger.verbosity(logger.ERROR):
            yield
    finally:
        records.removeHandler(handler)
        records.propagate = propagate
        logger.use_python_logging_system = by_logging

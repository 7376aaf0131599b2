"""The plugins for TensorRT: loading them, and which normalizations of a file they run.

A plugin is one kernel, and nothing fuses with it. A body is standard operators, which TensorRT's compiler fuses with
each other and with their neighbors.

For TensorRT-RTX, bodies are the default. Counted in the engines that its builder writes, they make at most as many
kernels as plugins for every operator: one for the whole body of LayerNormalNorm, none for a BatchNormalNorm behind a
convolution, whose kernel computes it too. `make test-tensorrt` counts them. How long they take is not known.

For TensorRT itself nothing was counted or measured, because its libraries were never run with this package. What is
known: a plugin reads each row once, and a body of LayerNormalNorm or GroupNormalNorm that is not fused into one kernel
reads it once for each of its reductions; the bodies of batch normalization have none. So the default is the plugin for
those with reductions (:attr:`.Operator.is_faster_as_plugin`), and the body for the others. If its compiler fuses as
TensorRT-RTX's does, bodies are better for all of them: measure both, with ``trtexec --dumpProfile`` for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nnorm_export import library
from nnorm_export.domain import OPERATORS, QUANTIZED_OPERATORS
from nnorm_export.errors import ModelFileError, RuntimeMissingError
from nnorm_export.files.onnx_file import ModelFile, name_of
from nnorm_export.files.optimized_for import OPTIMIZED


def faster_as_plugins(op_types: Iterable[str]) -> frozenset[str]:
    """Those of ``op_types`` for which plugins are likely faster than bodies."""
    return frozenset(name for name in op_types if name in OPERATORS and OPERATORS[name].is_faster_as_plugin)


def plugin_library(tensorrt: Any) -> str:
    """The library that registers the plugins with this version of TensorRT when it is loaded.

    Raises:
        RuntimeMissingError: this installation has no plugins, or none for this version.
    """
    major = tensorrt.__version__.partition(".")[0]
    any_version = Path(library.get_plugin_path(registering=True))
    path = any_version.with_name(library.REGISTERING_PLUGIN_FILE_NAMES.replace("[0-9]*", major))
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
        The reason why the plugins cannot be loaded; an empty string if they are loaded, or ``plugins`` is False.

    Raises:
        RuntimeMissingError: ``plugins`` is True and there are none, or the installed ones cannot be loaded.
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
    except OSError as error:  # installed, but broken
        raise RuntimeMissingError(
            f"the TensorRT plugins in {path} cannot be loaded ({error}); install nnorm_export again beside this "
            "TensorRT, or leave plugins off (plugins=False, --no-plugins)"
        ) from error
    return ""


def choose_plugins(
    file: ModelFile, plugins: bool | None, unavailable: str, preferred: Callable[[frozenset[str]], frozenset[str]]
) -> frozenset[str]:
    """The operators of ``file`` that plugins run; the other operators are run by their bodies.

    Args:
        plugins: True for all of them, False for none. None for those without a body and, if there are plugins, for
            those that ``preferred`` returns of them.
        unavailable: why there are no plugins; empty if there are plugins.

    Raises:
        ModelFileError: the file is optimized for processors, has no normalizations for ``plugins=True``, or no bodies
            for ``plugins=False``.
        RuntimeMissingError: plugins are needed, and there are none.
    """
    if file.form == OPTIMIZED:
        raise ModelFileError(
            f"{file.path}: the file is optimized for processors; give the portable file that it was made from"
        )
    # Those between quantized tensors have no plugins: their bodies run.
    op_types = frozenset(node.op_type for node in file.normalizations) - QUANTIZED_OPERATORS.keys()
    if plugins and not op_types:
        raise ModelFileError(
            f"{file.path}: the file has no nnorm nodes for plugins to run (its form is {file.form!r}); export the form "
            "'portable', or leave plugins off"
        )
    bare = file.bare
    if bare and plugins is False:
        raise ModelFileError(
            f"{file.path}: {', '.join(sorted(bare))} have no bodies in it (its form is {file.form!r}), so only plugins "
            "run them; export the form 'portable', or leave plugins on"
        )
    if unavailable and (plugins or bare):
        raise RuntimeMissingError(f"{file.path} needs TensorRT plugins: {unavailable}")
    if plugins is None:
        return bare if unavailable else bare | preferred(op_types)
    return op_types if plugins else frozenset()


def check_plugins(file: ModelFile, op_types: frozenset[str], found: set[str]) -> dict[str, str]:
    """Node name -> ``plugin`` or ``body``, by ``found``, the result of :func:`.network.plugins_in`.

    Raises:
        ModelFileError: a normalization of ``op_types``, those for plugins, is not among them.
    """
    names = {name_of(node): node.op_type for node in file.normalizations}
    if lost := [name for name, op_type in names.items() if op_type in op_types and name not in found]:
        raise ModelFileError(
            f"{file.path}: {', '.join(lost)} should be run by plugins, and the network has no plugins of these names "
            f"(it has: {', '.join(sorted(found)) or 'none'}). This is a defect of nnorm_export: please report it, and "
            "leave plugins off (plugins=False, --no-plugins)"
        )
    return {name: "plugin" if name in found else "body" for name in names}

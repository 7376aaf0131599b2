"""The libraries of kernels: where they are, and how a session of ONNX Runtime comes to use them.

The environment variable ``NNORM_EXPORT_LIBRARY`` names another library than the package's own, for trying a build of
custom_ops/ without installing it; ``none`` runs without kernels, as an installation without the library does. The
libraries for GPUs are looked for beside it.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import nnorm_export
from nnorm_export.errors import RuntimeMissingError

if TYPE_CHECKING:
    import onnxruntime

OVERRIDE = "NNORM_EXPORT_LIBRARY"
WITHOUT = "none"

# What custom_ops/cmake/ installs, all in one folder.
FILE_NAME = "libnnorm_ort.dylib" if sys.platform == "darwin" else "libnnorm_ort.so"
CUDA_FILE_NAME = "libnnorm_ort_cuda.so"
PLUGIN_FILE_NAME = "libnnorm_trt.so"
REGISTERING_PLUGIN_FILE_NAMES = "libnnorm_trt_register_*.so"  # the major version of TensorRT

# The session options that have the library. Weak, so that they do not live on in here.
_registered: weakref.WeakSet[onnxruntime.SessionOptions] = weakref.WeakSet()


def get_library_path() -> str:
    """The absolute path of the library of kernels, for ``SessionOptions.register_custom_ops_library`` and its like.

    Raises:
        RuntimeMissingError: this installation has no library, or ``NNORM_EXPORT_LIBRARY`` names none.
    """
    path = find_library()
    if path is not None:
        return path
    if os.environ.get(OVERRIDE) == WITHOUT:
        raise RuntimeMissingError(f"the kernels for ONNX Runtime are switched off: {OVERRIDE}={WITHOUT}")
    raise RuntimeMissingError(
        "this installation of nnorm_export has no kernels for ONNX Runtime: it was installed without them "
        "(NNORM_EXPORT_BUILD_LIBRARY=0), or is a source tree. Install it again on a machine with a C++ compiler, "
        f"or name a built {FILE_NAME} in the environment variable {OVERRIDE}"
    )


def find_library() -> str | None:
    """:func:`get_library_path`, but None where it says there is no library: installed without, or switched off.

    Raises:
        RuntimeMissingError: ``NNORM_EXPORT_LIBRARY`` names something else than a file.
    """
    override = os.environ.get(OVERRIDE)
    if override == WITHOUT:
        return None
    if override:
        path = Path(override).absolute()  # dlopen would look for a bare file name in the system's folders
        if not path.is_file():
            raise RuntimeMissingError(
                f"{OVERRIDE} is {override!r}, which is not a file; unset it, or say {WITHOUT} to run without kernels"
            )
        return str(path)
    # An editable installation spreads the package over two folders: the sources, and what was built.
    for folder in nnorm_export.__path__:
        path = Path(folder).absolute() / "lib" / FILE_NAME
        if path.is_file():
            return str(path)
    return None


def find_cuda_library() -> str | None:
    """The library of kernels for ONNX Runtime's CUDA provider, which the one for processors loads by itself."""
    return _beside(CUDA_FILE_NAME)


def get_plugin_path(*, registering: bool = False) -> str:
    """The absolute path of the TensorRT plugins, for ``IPluginRegistry.load_library`` or ``trtexec --dynamicPlugins``.

    Args:
        registering: the companion that registers the plugins on being loaded, for hosts that do no more than load it:
            Polygraphy's ``--plugins``, ``trtexec --staticPlugins``, ONNX Runtime's ``trt_extra_plugin_lib_paths``,
            Triton. It is for the major version of TensorRT that is in its name.

    Raises:
        RuntimeMissingError: this installation has no plugins.
    """
    path = _beside(REGISTERING_PLUGIN_FILE_NAMES if registering else PLUGIN_FILE_NAME)
    if path is not None:
        return path
    raise RuntimeMissingError(
        "this installation of nnorm_export has no TensorRT plugins: building them takes nvcc and TensorRT's headers. "
        "Install it again where both are, with the environment variable TENSORRT_INCLUDE_DIR naming the folder of "
        "NvInferRuntime.h"
    )


def _beside(pattern: str) -> str | None:
    """A library that is installed in the same folder as the kernels for processors."""
    library = find_library()
    found = sorted(Path(library).parent.glob(pattern)) if library is not None else []
    return str(found[-1]) if found else None


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Sessions made with these options run the normalizations of a file with the kernels, not with their bodies.

    ONNX Runtime refuses a library that it is given twice for one session, so a second call does nothing.

    Raises:
        RuntimeMissingError: there is no library, see :func:`get_library_path`, or ONNX Runtime cannot load it.
    """
    if session_options in _registered:
        return
    path = get_library_path()
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:  # ONNX Runtime's errors have no base class of their own
        raise RuntimeMissingError(f"ONNX Runtime cannot load the kernels in {path}: {error}") from error
    _registered.add(session_options)

"""The libraries of kernels: their paths, and how a session of ONNX Runtime uses them.

:func:`find_library` looks in the environment variable ``NNORM_EXPORT_LIBRARY``, in the imported package, and in the
installed distribution, in this order. The variable names a build of custom_ops/ that is not installed, or ``none`` to
run without kernels. If Python runs inside a clone, the imported package is the clone's nnorm_export/, which has no
kernels, and the distribution is another folder. The libraries for GPUs and for training are beside the library for
processors.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import nnorm_export
from nnorm_export._version import __version__
from nnorm_export.errors import InputError, RuntimeMissingError

if TYPE_CHECKING:
    import onnxruntime

OVERRIDE = "NNORM_EXPORT_LIBRARY"
WITHOUT = "none"
# How GPUs compute tensors of 16 bits; custom_ops/include/nnorm/same_bits.h has the meaning of the values.
SAME_BITS = "NNORM_EXPORT_SAME_BITS"

# The files that custom_ops/cmake/ installs in one folder.
_NAMES = {"darwin": "lib{}.dylib", "win32": "{}.dll"}  # of a library, where it is not lib….so
FILE_NAME = _NAMES.get(sys.platform, "lib{}.so").format("nnorm_ort")
TRAINING_FILE_NAME = _NAMES.get(sys.platform, "lib{}.so").format("nnorm_training")
CUDA_FILE_NAME = "libnnorm_ort_cuda.so"
PLUGIN_FILE_NAME = "libnnorm_trt.so"
REGISTERING_PLUGIN_FILE_NAMES = "libnnorm_trt_register_[0-9]*.so"  # the number is the major version of TensorRT
REGISTERING_RTX_PLUGIN_FILE_NAME = "libnnorm_trt_register_rtx.so"

# The session options to which the library was added. The references are weak, so that the options can be freed.
_registered: weakref.WeakSet[onnxruntime.SessionOptions] = weakref.WeakSet()


def get_library_path() -> str:
    """Return the absolute path of the library of kernels, for ``SessionOptions.register_custom_ops_library``.

    Raises:
        RuntimeMissingError: no library is installed, or ``NNORM_EXPORT_LIBRARY`` does not name a file.
    """
    path = find_library()
    if path is not None:
        return path
    if os.environ.get(OVERRIDE) == WITHOUT:
        raise RuntimeMissingError(
            f"the kernels for ONNX Runtime are switched off: {OVERRIDE}={WITHOUT}; unset {OVERRIDE} to use them"
        )
    raise RuntimeMissingError(
        _why_unused()
        or "this installation of nnorm_export has no kernels for ONNX Runtime: it was installed without them "
        "(NNORM_EXPORT_BUILD_LIBRARY=0), or is a source tree. Install it again on a machine with a C++ compiler "
        "(pip install --force-reinstall --no-deps --no-cache-dir: pip keeps the wheel without them), "
        f"or name a built {FILE_NAME} in the environment variable {OVERRIDE}"
    )


def find_library() -> str | None:
    """Return the path of :func:`get_library_path`, or None if no library is installed or kernels are switched off.

    Raises:
        RuntimeMissingError: ``NNORM_EXPORT_LIBRARY`` does not name a file.
    """
    override = os.environ.get(OVERRIDE)
    if override == WITHOUT:
        return None
    if override:
        path = Path(override).absolute()  # dlopen would search the system's folders for a bare file name
        if not path.is_file():
            raise RuntimeMissingError(
                f"{OVERRIDE} is {override!r}, which is not a file; unset it, or say {WITHOUT} to run without kernels"
            )
        return str(path)
    # An editable installation has two folders: the sources, and the built libraries.
    for folder in nnorm_export.__path__:
        path = Path(folder).absolute() / "lib" / FILE_NAME
        if path.is_file():
            return str(path)
    installed = _installed_library()
    return installed[0] if installed is not None and installed[1] == __version__ else None


def warn_of_unused_kernels() -> None:
    """Warn of installed kernels that cannot be used, because their version is not the version of this package."""
    if os.environ.get(OVERRIDE) or find_library() is not None:
        return
    reason = _why_unused()
    if reason is not None:
        # One fixed place, because Python shows a warning once for each place.
        warnings.warn(f"ONNX Runtime runs the bodies of the normalizations, which are slower: {reason}", stacklevel=1)


def _why_unused() -> str | None:
    installed = _installed_library()
    if installed is None:
        return None
    path, version = installed
    return (
        f"the installed kernels, {path}, are of nnorm_export {version}, but the imported package, "
        f"{Path(nnorm_export.__path__[0]).absolute()}, is {__version__}. Start Python in another folder, or install "
        "the imported package: pip install ."
    )


def _installed_library() -> tuple[str, str] | None:
    """Return the library that pip installed for this interpreter, and its version."""
    try:
        distribution = importlib.metadata.distribution("nnorm_export")
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or []:
        path = Path(str(file.locate())).absolute()
        if file.name == FILE_NAME and path.is_file():
            return str(path), distribution.version
    return None


def find_cuda_library() -> str | None:
    """Return the library of kernels for ONNX Runtime's CUDA provider; the library for processors loads it."""
    return _beside(CUDA_FILE_NAME)


def find_training_library() -> str | None:
    """Return the library of kernels for PyTorch's training layers on processors."""
    return _beside(TRAINING_FILE_NAME)


def get_plugin_path(*, registering: bool = False, rtx: bool = False) -> str:
    """Return the path of the TensorRT plugins, for ``IPluginRegistry.load_library`` or ``trtexec --dynamicPlugins``.

    Args:
        registering: return the companion library, which registers the plugins when it is loaded, for hosts that only
            load libraries: Polygraphy's ``--plugins``, ``trtexec --staticPlugins``, ONNX Runtime's
            ``trt_extra_plugin_lib_paths``, Triton. Its name has the major version of TensorRT.
        rtx: with ``registering``, return the library for TensorRT-RTX 1.7 and newer. The plugins are the same.

    Raises:
        RuntimeMissingError: this installation has no plugins.
    """
    registering_names = REGISTERING_RTX_PLUGIN_FILE_NAME if rtx else REGISTERING_PLUGIN_FILE_NAMES
    path = _beside(registering_names if registering else PLUGIN_FILE_NAME)
    if path is not None:
        return path
    raise RuntimeMissingError(
        "this installation of nnorm_export has no TensorRT plugins: building them takes nvcc and TensorRT's headers. "
        "Install it again where both are, with the environment variables NNORM_CUDA=ON and TENSORRT_INCLUDE_DIR, the "
        "folder of NvInferRuntime.h"
    )


def _beside(pattern: str) -> str | None:
    """Return a library in the folder of the kernels for processors; None if there is none."""
    library = find_library()
    found = sorted(Path(library).parent.glob(pattern)) if library is not None else []
    return str(found[-1]) if found else None


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Register the kernels, so that sessions with these options run normalizations by kernels instead of bodies.

    A second call with the same options does nothing, because ONNX Runtime refuses a library that is registered twice.

    Raises:
        InputError: ``session_options`` is something else, an ``InferenceSession`` for example.
        RuntimeMissingError: no library is found, see :func:`get_library_path`, or ONNX Runtime cannot load it.
    """
    is_class = isinstance(session_options, type)
    if is_class or not hasattr(session_options, "register_custom_ops_library"):
        got = f"the class {session_options.__name__}" if is_class else type(session_options).__name__
        raise InputError(
            f"register takes onnxruntime.SessionOptions, got {got}; register before the session is made: "
            "options = SessionOptions(), register(options), InferenceSession(path, options)"
        )
    if session_options in _registered:
        return
    register_file(
        session_options,
        get_library_path(),
        f"Install nnorm_export again on this machine, or run without kernels: {OVERRIDE}={WITHOUT}",
    )
    _registered.add(session_options)


def register_file(session_options: onnxruntime.SessionOptions, path: str, remedy: str) -> None:
    """Register the library of kernels ``path``, which need not be the library of this package.

    Raises:
        RuntimeMissingError: ONNX Runtime cannot load it; the message ends with ``remedy``.
    """
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:  # The loader and each version of ONNX Runtime raise different classes.
        raise RuntimeMissingError(f"ONNX Runtime cannot load the kernels in {path}: {error}. {remedy}") from error

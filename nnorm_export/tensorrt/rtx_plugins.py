"""Loading this package's plugins into TensorRT-RTX."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from nnorm_export import library
from nnorm_export.domain import OPERATORS
from nnorm_export.errors import RuntimeMissingError
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.process import LOCK

_FIRST_WITH_PLUGINS = (1, 7)  # the first version whose parser makes plugins of nodes
_ADVICE = "Install nnorm_export again beside this TensorRT-RTX, or leave plugins off (plugins=False, --no-plugins)"


def load(tensorrt: Any, *, needed: bool) -> str:
    """Loads the plugins for every network that this process parses from now on.

    Returns:
        The reason why the plugins cannot be loaded; an empty string if they are loaded.

    Raises:
        RuntimeMissingError: they are ``needed`` and cannot be loaded.
    """
    with LOCK:
        try:
            _load(tensorrt)
        except RuntimeMissingError as error:
            if needed:
                raise
            return str(error)
    return ""


def _load(tensorrt: Any) -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", tensorrt.__version__)[:2])
    if version < _FIRST_WITH_PLUGINS:
        raise RuntimeMissingError(
            f"the parser of TensorRT-RTX {tensorrt.__version__} makes no plugins; 1.7 is the first whose parser does. "
            "Upgrade it, or leave plugins off (plugins=False, --no-plugins)"
        )
    path = library.get_plugin_path(registering=True, rtx=True)
    try:
        # It registers the plugins, and a second load does nothing. Its SONAME is that of a library that the parser
        # opens before it makes a plugin, and which NVIDIA's wheels lack: without it the process would end.
        ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeMissingError(
            f"the TensorRT-RTX plugins in {path} cannot be loaded ({error}). {_ADVICE}"
        ) from error
    registry = tensorrt.get_plugin_registry()
    if missing := [name for name in OPERATORS if registry.get_creator(name, str(DOMAIN_VERSION), DOMAIN) is None]:
        raise RuntimeMissingError(
            f"TensorRT-RTX {tensorrt.__version__} has no plugins {', '.join(missing)} after {path} was loaded. "
            f"{_ADVICE}"
        )

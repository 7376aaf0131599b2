"""Execution providers in libraries of their own, which ONNX Runtime loads after a registration."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from nnorm_export.errors import RuntimeMissingError, first_line
from nnorm_export.process import LOCK
from nnorm_export.runtimes.runtime import installed_version

_registered: set[str] = set()  # modules whose library is registered: ONNX Runtime refuses a second registration


@dataclass(frozen=True)
class PluginProvider:
    """An execution provider that a package contains.

    Attributes:
        names: what ONNX Runtime calls the provider; versions of one provider may have other names.
        title: the provider's name in messages.
        module: the package's module, whose ``get_library_path()`` finds the library.
        packages: the packages that contain the module.
        devices: the devices that the provider runs on, in messages.
    """

    names: tuple[str, ...]
    title: str
    module: str
    packages: tuple[str, ...]
    devices: str

    @property
    def installed(self) -> str:
        """The version of the installed package; empty if none is."""
        return next(filter(None, map(installed_version, self.packages)), "")

    def find_devices(self, onnxruntime: Any) -> list[Any]:
        """The devices of this machine that the provider takes, as ``onnxruntime.OrtEpDevice``.

        Raises:
            RuntimeMissingError: this ONNX Runtime cannot load the library, or the provider takes no device.
        """
        if not hasattr(onnxruntime, "register_execution_provider_library"):
            raise RuntimeMissingError(
                f"ONNX Runtime {onnxruntime.__version__} loads no libraries of providers; 1.23 and newer do: "
                "pip install --upgrade onnxruntime"
            )
        with LOCK:
            if self.module not in _registered:
                try:
                    library = importlib.import_module(self.module).get_library_path()
                    onnxruntime.register_execution_provider_library(self.names[0], library)
                except Exception as error:  # ONNX Runtime's exceptions share no public base
                    raise RuntimeMissingError(
                        f"ONNX Runtime {onnxruntime.__version__} cannot load its provider for {self.title}: "
                        f"{first_line(error)}"
                    ) from error
                _registered.add(self.module)
        found = [device for device in onnxruntime.get_ep_devices() if device.ep_name in self.names]
        if not found:
            raise RuntimeMissingError(
                f"ONNX Runtime's provider for {self.title} takes none of this machine's GPUs; it runs on {self.devices}"
            )
        return found

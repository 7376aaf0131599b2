"""What a runtime declares: a module of this package has a tuple ``RUNTIMES`` of them, and ``_MODULES`` lists it."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import RuntimeMissingError
from nnorm_export.pytorch_missing import needed_by
from nnorm_export.runtimes.runner import Runner


@dataclass(frozen=True)
class Component:
    """Something that is installed, or missing.

    Attributes:
        name: what it is.
        found: a version or a path; empty if it is missing.
        remedy: what to do if it is missing or does not work; else empty.
    """

    name: str
    found: str
    remedy: str = ""

    @classmethod
    def optional(cls, name: str, found: str | None, remedy: str) -> Component:
        """A component whose ``remedy`` is needed only if it is missing."""
        return cls(name, found or "", "" if found else remedy)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime, as :func:`nnorm_export.load`, ``doctor``, the pytest plugin and certificates need to know it.

    Calling it opens a file: ``RUNTIMES["onnxruntime"](path, **options)``.

    Attributes:
        name: as ``load(path, runtime=…)`` takes it.
        runner: its :class:`Runner`; ``"module:Class"`` if importing that takes long, or needs PyTorch.
        packages: distributions that it comes in; its version is that of the first that is installed. Empty if its
            version is not known here, as a server's is not.
        extra: the extra of this package that installs it; None if it comes with every installation.
        opens_onnx: whether it opens ONNX files.
        is_own: whether a path is a file of its own format, or its URL. A file that no runtime claims is opened as ONNX.
        check: raises RuntimeMissingError, with the remedy, if the runtime cannot run here. By default it runs where one
            of ``packages`` is installed.
        components: what ``doctor`` lists for it. By default ``packages`` with their versions.
        may_unpickle: whether its files may hold pickles; its runner then takes ``trust_pickle``.
        before_onnx: what must happen before it can run an ONNX file, if that takes minutes. ``doctor`` prints it, and
            does not open ONNX files in such a runtime.
        planned: with ``before_onnx``, what would run each normalization of an ONNX file there, as
            :attr:`.Runner.implementations`, found in seconds and without a GPU.
    """

    name: str
    runner: Callable[..., Runner] | str
    packages: tuple[str, ...]
    extra: str | None = None
    opens_onnx: bool = False
    is_own: Callable[[str | Path], bool] = lambda path: False
    check: Callable[[], object] | None = None
    components: Callable[[], Iterable[Component]] | None = None
    may_unpickle: bool = False
    before_onnx: str = ""
    planned: Callable[[str | Path], dict[str, str]] | None = None

    def __call__(self, path: str | Path, *, trust_pickle: bool = False, **options: Any) -> Runner:
        options |= {"trust_pickle": True} if trust_pickle and self.may_unpickle else {}
        runner = self.runner
        if isinstance(runner, str):
            module, _, name = runner.partition(":")
            with needed_by(f"the runtime {self.name}"):
                runner = getattr(importlib.import_module(module), name)
        opened: Runner = runner(path, **options)
        return opened

    def require(self) -> None:
        """Raises RuntimeMissingError if the runtime cannot run on this machine."""
        if self.check is not None:
            self.check()
        elif self.packages and not any(map(installed_version, self.packages)):
            raise RuntimeMissingError(f"{self.packages[0]} is not installed: {self.remedy(self.packages[0])}")

    def remedy(self, package: str) -> str:
        """The command that installs ``package``."""
        return f"pip install {package}" if self.extra is None else f"pip install 'nnorm_export[{self.extra}]'"

    def list_components(self) -> Iterable[Component]:
        if self.components is not None:
            return self.components()
        return [
            Component.optional(package, installed_version(package), self.remedy(package)) for package in self.packages
        ]

    @property
    def version(self) -> str:
        """``onnxruntime 1.23.0``, or ``unknown``."""
        installed = ((package, installed_version(package)) for package in self.packages)
        return next((f"{package} {version}" for package, version in installed if version), "unknown")


def installed_version(package: str) -> str:
    """The version of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

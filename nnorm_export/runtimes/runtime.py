"""The declaration of a runtime. Modules with a tuple ``RUNTIMES`` of declarations are listed in ``_MODULES``."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import RuntimeMissingError, first_line
from nnorm_export.pytorch_missing import needed_by
from nnorm_export.runtimes.runner import Runner


@dataclass(frozen=True)
class Component:
    """A component that is installed or missing.

    Attributes:
        name: the name of the component.
        found: a version or a path; empty if the component is missing.
        remedy: what to do if the component is missing or does not work; else empty.
        is_optional: whether most installations work without it.
    """

    name: str
    found: str
    remedy: str = ""
    is_optional: bool = False

    @classmethod
    def optional(cls, name: str, found: str | None, remedy: str) -> Component:
        """A component that most installations work without, with ``remedy`` only if it is missing."""
        return cls(name, found or "", "" if found else remedy, is_optional=True)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The declaration of a runtime for :func:`nnorm_export.load`, ``doctor``, the pytest plugin and certificates.

    Calling a declaration opens a file: ``RUNTIMES["onnxruntime"](path, **options)``.

    Attributes:
        name: the name that ``load(path, runtime=…)`` takes.
        runner: the :class:`Runner`; ``"module:Class"`` if importing it takes long, or needs PyTorch.
        packages: the distributions that contain the runtime; its version is the version of the first that is
            installed. Empty if the version is unknown here, as for a server.
        extra: the extra of this package that installs the runtime; None if every installation has the runtime.
        opens_onnx: whether the runtime opens ONNX files.
        is_own: whether a path is a file of the runtime's own format, or its URL. A file that no runtime claims is
            opened as ONNX.
        check: raises RuntimeMissingError, with the remedy, if the runtime cannot run here. The default requires one of
            ``packages``.
        components: the components that ``doctor`` lists. The default is the first of ``packages``, with the version.
        may_unpickle: whether the runtime's files may contain pickles; then the runner takes ``trust_pickle``.
        before_onnx: the step before the runtime can run an ONNX file, if it takes minutes. ``doctor`` prints the text,
            and does not open ONNX files in this runtime.
        planned: with ``before_onnx``, a function that returns the :attr:`.Runner.implementations` for an ONNX file in
            seconds and without a GPU.
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

    def imported(self, module: str) -> Any:
        """A module of the runtime's library.

        Raises:
            RuntimeMissingError: it is not installed, or does not load.
        """
        try:
            return importlib.import_module(module)
        except ImportError as error:
            package = self.packages[0]
            raise RuntimeMissingError(
                f"{package} cannot be used ({first_line(error)}): {self.remedy(package)}"
            ) from error

    def list_components(self) -> Iterable[Component]:
        if self.components is not None:
            return self.components()
        if not self.packages:
            return []
        found = next(filter(None, map(installed_version, self.packages)), "")
        return [Component.optional(self.packages[0], found, self.remedy(self.packages[0]))]

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

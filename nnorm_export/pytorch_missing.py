"""The error if PyTorch is missing, as on machines that serve, or too old. The error says what needs PyTorch.

PyTorch is the extra ``torch``. Modules import PyTorch as usual. The entry points of the package turn the error of the
import into the error of this module: the public names, the layers, the commands and the runtimes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import lazy_loader

from nnorm_export.errors import PyTorchMissingError

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = "pip install 'nnorm_export[torch]'"
_OLDEST_PYTORCH = (2, 6)  # pip checks this version only if the extra is installed


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Turns the ImportError of a missing PyTorch into the error that ``what`` needs PyTorch.

    An installed PyTorch that is broken (a shared library or a part of it is missing) keeps its own error.
    """
    try:
        yield
    except PyTorchMissingError:  # the inner error names the cause more exactly than ``what``
        raise
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PyTorchMissingError(f"{what} needs PyTorch, which is not installed: {REMEDY}", name="torch") from error


def fault_of(version: str) -> str:
    """The message that an installed PyTorch of this version is too old; empty if it is new enough."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= _OLDEST_PYTORCH:
        return ""
    return f"nnorm_export needs PyTorch {'.'.join(map(str, _OLDEST_PYTORCH))} or newer: {REMEDY}"


def check_pytorch() -> None:
    """Imports PyTorch.

    Raises:
        PyTorchMissingError: PyTorch is too old, and would fail later with errors that blame the model.
    """
    import torch  # noqa: PLC0415 - servers have no PyTorch: at the top, commands that need none would fail there

    if fault := fault_of(torch.__version__):
        raise PyTorchMissingError(f"torch {torch.__version__} is installed; {fault}", name="torch")


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """:func:`lazy_loader.attach_stub`: ``__getattr__``, ``__dir__`` and ``__all__`` of ``package``."""
    load, list_names, names = lazy_loader.attach_stub(package, file)

    def load_name(name: str) -> Any:
        with needed_by(f"{package}.{name}"):
            return load(name)

    return load_name, list_names, names


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor. False if PyTorch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)

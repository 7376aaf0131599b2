"""Options of ONNX Runtime's sessions: arguments that exclude a caller's options, temporary changes, loading errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nnorm_export.errors import ModelFileError, NnormExportError

_changing = threading.Lock()  # threads may share the options of a caller


def refuse_beside_options(
    threads: int, config: Mapping[str, str] | None, optimize: bool | None, kernels: bool | None
) -> None:
    """Refuses arguments that the caller's ``session_options`` already include, or that would change them."""
    if config:
        raise NnormExportError("session_config: session_options are used unchanged; add the entries to them")
    if threads:
        raise NnormExportError("intra_op_num_threads: session_options are used unchanged; set it in them")
    if optimize:
        raise NnormExportError(
            "optimize: session_options are used unchanged; open a file that nnorm-export optimize wrote"
        )
    if kernels is not None:
        raise NnormExportError(
            "kernels: session_options are used unchanged; call nnorm_export.register(session_options) for kernels, or "
            "leave it out for bodies"
        )


@contextmanager
def changed(options: Any, changes: Mapping[str, Any], lock: threading.Lock = _changing) -> Iterator[None]:
    """Sets the attributes ``changes`` of ``options`` for the block, under a lock: by default, that of all callers."""
    with lock:
        unchanged = {name: getattr(options, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(options, name, value)
            yield
        finally:
            for name, value in unchanged.items():
                setattr(options, name, value)


@contextmanager
def loading(path: Path, version: str, reason: Callable[[Exception], str]) -> Iterator[None]:
    """Reports that ONNX Runtime ``version`` cannot load ``path``.

    Raises:
        ModelFileError: the block raised an exception; the message ends with its ``reason``.
    """
    try:
        yield
    except Exception as error:  # ONNX Runtime's own classes are not public and share no base
        raise ModelFileError(f"{path}: ONNX Runtime {version} cannot load it: {reason(error)}") from error

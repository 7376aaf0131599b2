"""The contexts in which the user's code runs: not those of the caller, and ``sys.exit`` does not end the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import torch

from nnorm_export.errors import NnormExportError

_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")


@contextmanager
def neutral() -> Iterator[None]:
    """A decorator of public functions, whose results then do not depend on the contexts of the caller.

    Autocast and inference mode are switched off for this thread: autocast would write its dtype into a file, and
    tensors of inference mode cannot be traced. Autocast within a model's own forward stays on. The default dtype stays,
    because the model's code makes its constants in it. A default device stays too, except ``meta``, which has no
    values. ``sys.exit`` in the model's code becomes an error of this package; KeyboardInterrupt passes.
    """
    with ExitStack() as stack:
        for device in _AUTOCAST:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(without_exit())
        yield


@contextmanager
def without_exit() -> Iterator[None]:
    """Turns a SystemExit of the user's code in the block into an error that names the place.

    Otherwise ``sys.exit(0)`` in a model would end a comparison with the exit code of success.
    """
    try:
        yield
    except SystemExit as error:
        raise NnormExportError(
            f"the model's code ended the program: sys.exit({'' if error.code is None else repr(error.code)}) in "
            f"{_place(error.__traceback__)}; raise an exception there instead, or remove the call"
        ) from error


def _place(traceback: TracebackType | None) -> str:
    """The module, file and line that the innermost frame of ``traceback`` runs."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return "an unknown place"
    frame = traceback.tb_frame
    module = frame.f_globals.get("__name__", "an unknown module")
    return f"module {module} ({Path(frame.f_code.co_filename).name}, line {traceback.tb_lineno})"

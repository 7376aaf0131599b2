"""The script ``nnorm-export``, and ``python -m nnorm_export``: the command line.

Its imports take 0.3 seconds and more, in which Ctrl-C ends the process without Python's traceback.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

from nnorm_export.errors import INTERRUPTED


def main() -> NoReturn:
    in_main_thread = threading.current_thread() is threading.main_thread()
    is_pythons = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_pythons:  # nothing has been written yet that would have to be removed
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from nnorm_export import cli  # noqa: PLC0415 - the imports that Ctrl-C may interrupt

    if is_pythons:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()

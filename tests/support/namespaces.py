"""A network of its own for programs that listen to every interface, as Ray does."""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import subprocess
from functools import lru_cache

# Of processes too: all of them end when the first one does.
_NAMESPACES = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


@lru_cache
def isolated() -> list[str]:
    """The command that runs a program in such namespaces; empty where there can be none."""
    for command in (["unshare", *_NAMESPACES], ["unshare", "--map-root-user", *_NAMESPACES]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], check=False).returncode == 0:
            return command
    return []


def bring_up_loopback() -> None:
    siocsifflags, up_and_running = 0x8914, 0x1 | 0x40
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        fcntl.ioctl(interface, siocsifflags, struct.pack("16sh14x", b"lo", up_and_running))

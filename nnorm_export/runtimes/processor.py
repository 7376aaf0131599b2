"""The name of this machine's CPU, which measured times go with, and the cores that a process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from nnorm_export.runtimes.onnxruntime.overflow import VNNI


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name; on x86 with family, model and instruction sets, because different CPUs share names.

    >>> processor()  # doctest: +SKIP
    'AMD EPYC (family 25, model 17; AVX-512, VNNI)'
    """
    unknown = platform.processor() or "unknown CPU"
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:  # not Linux
        return unknown
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = fields.get("model name", unknown)
    if "CPU part" in fields:  # Arm, whose processors have no names there
        return f"{name} (implementer {fields.get('CPU implementer')}, part {fields['CPU part']})"
    if "cpu family" not in fields:  # neither x86 nor Arm
        return name
    flags = fields["flags"].split()
    instructions = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "SSE2"
    if not VNNI.isdisjoint(flags):
        instructions += ", VNNI"
    return f"{name} (family {fields['cpu family']}, model {fields['model']}; {instructions})"


def cores_here() -> int:
    """The processor's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

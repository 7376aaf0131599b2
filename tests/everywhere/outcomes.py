"""Whether what a runtime computed is right, and in a few words why not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.domain import OPERATORS

# The greatest |y − reference| / (1 + |reference|) of a right file.
TOLERANCES = {"fp32": 1e-5, "fp16": 1e-2, "fp16io": 1e-2}
# From the best to the worst: an answer, an error in words, a process that ends, another answer.
OUTCOMES = ("right", "refused", "crashed", "wrong")
# Lines, and beginnings of lines, that say where a runtime is, not what it lacks.
_EMPTY_LINE = re.compile(
    r"Exception from |Check '|FrontEnd API|Model wasn't fully|Summary:|Error invoking|Error code:|Diagnostics:"
    r"|OpenCV\([\d.]+\) .*in function '\w+'$|Stack backtrace|Caused by|\d+: |While validating|$"
)
_BEGINNING = re.compile(r".*(Status Message:|ERROR_MESSAGE:|parse error:|error: \(-\d+:[\w ]+\)) ")
# Places in sources and files, addresses and names of nodes: equal reasons shall be equal texts.
_PLACE = re.compile(
    r"\w+\.(cc|cpp|hpp|mjs):\d+ \w+ |https?://\S+|(/[\w.+-]+){2,}(:\d+)*:?|0x[0-9a-f]+|\(onnx_node![^)]*\)"
)
_NAME = re.compile(r"'?\bnode_\w+'?|\"[^\"]{30,}\"|%\w+|Name:'[^']*'|#\d+")


def outcome_of(entry: Mapping[str, Any], report: Mapping[str, Any], folder: Path, out: Path) -> tuple[str, str]:
    """The outcome of a file, and the error or the reason."""
    for outcome in ("refused", "crashed"):
        if outcome in report:
            return outcome, reason_of(report[outcome])
    worst = 0.0
    for call, outputs in zip(entry["calls"], report["outputs"], strict=True):
        for expected, found in zip(call["outputs"], outputs, strict=True):
            if found["shape"] != expected["shape"]:
                return "wrong", f"its shape is {found['shape']}, not {expected['shape']}"
            y, reference = (_load(place, stored) for place, stored in ((out, found), (folder, expected)))
            if not np.isfinite(y).all():
                return "wrong", "not finite"
            worst = max(worst, float((np.abs(y - reference) / (1 + np.abs(reference))).max(initial=0.0)))
    return ("right", "") if worst <= TOLERANCES[entry["dtype"]] else ("wrong", f"{worst:.1e}")


def _load(folder: Path, stored: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.frombuffer((folder / stored["file"]).read_bytes(), stored["dtype"])
    return values.reshape(stored["shape"]).astype(np.float64)


def reason_of(message: str) -> str:
    """The line of a message that says what is wrong, without names of nodes and files: equal reasons, equal texts."""
    if any(operator in message for operator in OPERATORS):
        return "knows no functions"
    lines = [line.strip() for line in message.splitlines()]
    line = next((line for line in lines if not _EMPTY_LINE.match(line)), lines[0])
    line = _NAME.sub("…", _PLACE.sub("", _BEGINNING.sub("", line)))
    return " ".join(line.split())[:160]

"""The range of float16, and what is said of numbers beyond it."""

from __future__ import annotations

from collections.abc import Iterable

GREATEST = 65504.0
INFINITE = GREATEST + 16  # the least number that float16 rounds to infinity


def about_float16(causes: Iterable[str], *, fails: bool = True) -> str:
    """The text about ``causes``, which are beyond float16's range, with the cure if something fails; empty for none."""
    listed = "; ".join(dict.fromkeys(causes))
    if not listed or not fails:
        return listed and f"Beyond float16's range of ±{GREATEST:.0f}, and compared as infinity: {listed}"
    return (
        f"Beyond float16's range of ±{GREATEST:.0f}: {listed}. Scale inputs and weights down; write masks with "
        "torch.finfo(x.dtype).min; compute the rest in float32, x.float(); or export in float32 or bfloat16 "
        "(dtype='bf16', --dtype bf16)"
    )

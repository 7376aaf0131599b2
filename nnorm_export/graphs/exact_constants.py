"""onnxscript's rewriting without its tolerances.

It takes a constant for 0 that is within 1e-8 of it, and for 1 within 1e-5 of that, and removes the sum or the product.
The ε of a norm that is written by hand may be 1e-12: without it a constant row gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxscript.rewriter import _pattern_ir

from nnorm_export.process import LOCK

_TOLERANCES = ("_rel_tol", "_abs_tol")


@contextmanager
def exact_constants() -> Iterator[None]:
    """Within it, a pattern's constant matches only its own value, in the whole process."""
    with LOCK:
        if _TOLERANCES[0] in vars(_pattern_ir.Constant):  # within such a block
            yield
            return
        for name in _TOLERANCES:
            setattr(_pattern_ir.Constant, name, _exact(name))
        try:
            yield
        finally:
            for name in _TOLERANCES:
                delattr(_pattern_ir.Constant, name)


def _exact(name: str) -> property:
    """A property, which comes before the attributes of the instances: they keep what they are given, for later."""
    return property(lambda _: 0.0, lambda constant, value: vars(constant).__setitem__(name, value))

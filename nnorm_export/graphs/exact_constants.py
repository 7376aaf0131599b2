"""onnxscript's rewriting without its tolerances.

onnxscript takes a constant within 1e-8 of 0 for 0, and a constant within 1e-5 of 1 for 1, and removes the sum or the
product. The ε of a norm that is written by hand may be 1e-12. Without this ε a constant row gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxscript.rewriter import _pattern_ir

from nnorm_export.process import LOCK

_TOLERANCES = ("_rel_tol", "_abs_tol")


@contextmanager
def exact_constants() -> Iterator[None]:
    """In the block, a pattern's constant matches only its own value, in the whole process."""
    with LOCK:
        if _TOLERANCES[0] in vars(_pattern_ir.Constant):  # in an outer block
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
    """A property with the value 0, which hides the instances' own attributes without changing them."""
    return property(lambda _: 0.0, lambda constant, value: vars(constant).__setitem__(name, value))

"""onnxscript's rewriting without its tolerances.

It takes a constant for 0 that is within 1e-8 of it, and for 1 within 1e-5 of that, and removes the sum or the product.
The ε of a norm that is written by hand may be 1e-12: without it a constant row gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxscript.rewriter import _pattern_ir

_TOLERANCES = ("_rel_tol", "_abs_tol")
_EXACT = property(lambda _: 0.0, lambda _, value: None)  # comes before the attributes of the instances


@contextmanager
def exact_constants() -> Iterator[None]:
    """Within it, a pattern's constant matches only its own value."""
    for name in _TOLERANCES:
        setattr(_pattern_ir.Constant, name, _EXACT)
    try:
        yield
    finally:
        for name in _TOLERANCES:
            delattr(_pattern_ir.Constant, name)

"""Parity in a test suite: :func:`assert_parity`, and the pytest plugin."""

from nnorm_export.pytorch_missing import attach

# Imported when first used: pytest loads the plugin beside it in every run, and torch takes seconds.
__getattr__, __dir__, __all__ = attach(__name__, __file__)

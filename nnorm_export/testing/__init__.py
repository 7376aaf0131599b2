"""Parity in a test suite: :func:`assert_parity`, and the pytest plugin."""

from nnorm_export.pytorch_missing import attach

# Imported on first use: every run of pytest loads the plugin in this package, and importing torch takes seconds.
__getattr__, __dir__, __all__ = attach(__name__, __file__)

"""Parity in a test suite: :func:`assert_parity`, and the pytest plugin."""

import lazy_loader

# Imported when first used: pytest loads the plugin beside it in every run, and torch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

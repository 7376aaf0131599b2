"""Normality normalization at the price of plain normalization, from one file that runs everywhere."""

import lazy_loader

# ``__init__.pyi`` lists the public names once, for type checkers and for this.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

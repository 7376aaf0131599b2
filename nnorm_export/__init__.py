"""Normality normalization at the price of plain normalization, from one file that runs everywhere."""

from nnorm_export.pytorch_missing import attach

# ``__init__.pyi`` lists the public names once, for type checkers and for this.
__getattr__, __dir__, __all__ = attach(__name__, __file__)

"""From a training-time model to its eval-mode form; see :func:`freeze`."""

from nnorm_export.freezing import normal, plain, standard  # each adds its rows to the table of layers
from nnorm_export.freezing.freeze import freeze, frozen_copy
from nnorm_export.freezing.table import Row, register

__all__ = ["Row", "freeze", "frozen_copy", "normal", "plain", "register", "standard"]

"""Reading a model with its weights, so that it can be written elsewhere."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from nnorm_export.errors import ModelFileError


def load_whole(path: Path) -> ir.Model:
    """The model in ``path``, which is ONNX, with the weights of its external data in memory.

    Raises:
        ModelFileError: the external data is missing, or cut short.
    """
    model = ir.load(path)
    try:
        ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path}: its weights lie in other files, which cannot be read ({error}); they belong beside it"
        ) from error
    return model

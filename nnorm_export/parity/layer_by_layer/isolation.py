"""What bisect() and probe() share: models made from parts of a file, and inputs for an operator with an epilogue."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from nnorm_export.domain import Operator
from nnorm_export.dtypes import Array
from nnorm_export.errors import ModelFileError
from nnorm_export.runtimes import Runner, load


@contextmanager
def opened(model: onnx.ModelProto, runtime: str | None, **options: Any) -> Iterator[Runner]:
    """``model`` in a runtime, with options of it, from a temporary file that exists inside the block.

    Raises:
        ModelFileError: the runtime does not open it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.onnx"
        onnx.save_model(model, file)
        try:
            runner = load(file, runtime, **options)
        except ModelFileError as error:
            raise ModelFileError(str(error).replace(str(file), "a part of the file")) from error
        yield runner


def with_epilogue(operator: Operator, y: Array, float64: Array | None) -> tuple[list[Array], Array, Array | None]:
    """Returns operands for the epilogue of ``operator``, and the epilogue of ``y`` and of ``float64`` with them."""
    # y + max(−2y, 0) = |y|: a ReLU after the sum hides no element.
    operands = [np.maximum(-2 * y, 0).astype(y.dtype) for _ in operator.operands]
    wide = [operand.astype(np.float64) for operand in operands]
    return (
        operands,
        operator.apply_epilogue(y, *operands),
        None if float64 is None else operator.apply_epilogue(float64, *wide),
    )

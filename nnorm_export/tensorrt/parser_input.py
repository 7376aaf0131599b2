"""The ONNX file that TensorRT's parser gets, which settles what runs each normalization.

TensorRT's own choice between the body of a node and a plugin changes from version to version (10.7 and 10.15 changed
it). A normalization for a plugin is a node without a body: if the plugin is not loaded, the parser fails. The other
normalizations are inlined, as in the form ``primitives``, so that no plugin of the process can take them. So TensorRT
never uses one in place of the other.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from nnorm_export.errors import ModelFileError
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.forms import inline_bodies, strip_bodies
from nnorm_export.files.onnx_file import ModelFile, read_with_weights
from nnorm_export.files.staging import save
from nnorm_export.names import DOMAIN, DOMAIN_VERSION


def write_for_parser(file: ModelFile, op_types: frozenset[str], folder: Path) -> Path:
    """Writes ``file`` into ``folder`` for the parser: ``op_types`` without bodies, other normalizations inlined.

    Raises:
        ModelFileError: the weights of ``file`` cannot be read, a normalization is invalid, or one of ``op_types`` has
            an unknown body, which a plugin would run as something else.
    """
    if not file.normalizations:
        return file.path
    refuse_invalid(file)
    refuse_unknown_bodies(file, op_types)
    model = _with_weights(file.path)
    strip_bodies(model, op_types)
    if model.functions:
        inline_bodies(model)
    if op_types:
        model.opset_imports[DOMAIN] = DOMAIN_VERSION
    path = folder / "model.onnx"
    save(model, path, external_data=None)
    return path


def _with_weights(path: Path) -> ir.Model:
    try:
        model: ir.Model = ir.from_proto(read_with_weights(path))
    except ir.serde.SerdeError as error:
        raise ModelFileError(
            f"{path}: its graph is not valid ({error.__cause__ or error}); export the model again"
        ) from error
    return model

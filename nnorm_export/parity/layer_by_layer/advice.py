"""What to do about a file that differs: compare it layer by layer, where that is possible."""

from __future__ import annotations

from nnorm_export.files.inspection import describe
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.tensorrt import is_engine


def bisect_advice(path: str, command: str) -> str:
    """The advice to run the bisect ``command``, for the end of a message; empty if bisect cannot read ``path``."""
    if is_engine(path) or is_url(path):
        return ""
    description = describe(path)
    if description.quantization is not None:
        return (
            f". It is quantized ({description.quantization}), and roundings to 8 bits are greater than the error "
            "budget: let a metric decide, --criterion metric --metric NAME, give --rtol and --atol, or see what "
            "nnorm-export quantize reports with the model"
        )
    if description.format != "onnx" or DOMAIN not in description.nodes or description.optimized_for is not None:
        return ""
    return f". To find the layer that differs, run\n  {command}"

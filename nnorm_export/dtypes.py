"""The dtypes of tensors that enter and leave a model, with the name that each runtime and format has for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from nnorm_export.pytorch_missing import is_tensor

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]


@dataclass(frozen=True)
class Dtype:
    """A dtype by its names.

    Attributes:
        name: NumPy's name, which PyTorch shares: ``getattr(torch, name)``.
        onnx: its name in ``onnx.TensorProto``.
        kserve: its name in the KServe v2 protocol.
        tensorrt: its name in ``tensorrt.DataType``; None if TensorRT does not have it.
    """

    name: str
    onnx: str
    kserve: str
    tensorrt: str | None = None

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype, which for bfloat16 is that of ``ml_dtypes``."""
        return np.dtype(ml_dtypes.bfloat16 if self.name == "bfloat16" else self.name)

    @property
    def onnx_type(self) -> int:
        """The number of the dtype in ``onnx.TensorProto``."""
        return int(onnx.TensorProto.DataType.Value(self.onnx))

    @property
    def onnxruntime(self) -> str:
        """The type of an ONNX Runtime tensor: ``tensor(float)``."""
        return f"tensor({self.onnx.lower()})"

    @property
    def triton(self) -> str:
        """The name of the dtype in Triton's ``config.pbtxt``."""
        return f"TYPE_{self.kserve}"


FLOATS = (
    Dtype("float32", "FLOAT", "FP32", "FLOAT"),
    Dtype("float16", "FLOAT16", "FP16", "HALF"),
    Dtype("bfloat16", "BFLOAT16", "BF16", "BF16"),
    Dtype("float64", "DOUBLE", "FP64"),
)
DTYPES = {
    dtype.name: dtype
    for dtype in (
        *FLOATS,
        Dtype("int64", "INT64", "INT64", "INT64"),
        Dtype("int32", "INT32", "INT32", "INT32"),
        Dtype("int16", "INT16", "INT16"),
        Dtype("int8", "INT8", "INT8", "INT8"),
        Dtype("uint64", "UINT64", "UINT64"),
        Dtype("uint32", "UINT32", "UINT32"),
        Dtype("uint16", "UINT16", "UINT16"),
        Dtype("uint8", "UINT8", "UINT8", "UINT8"),
        Dtype("bool", "BOOL", "BOOL", "BOOL"),
    )
}


_FLOAT_NAMES = {dtype.name for dtype in FLOATS}
_BY_ONNX_TYPE = {dtype.onnx_type: dtype for dtype in DTYPES.values()}


def numpy_of_onnx(onnx_type: int) -> np.dtype[Any]:
    """The NumPy dtype of a dtype of ``onnx.TensorProto``; ``object`` for strings, unknown types and 0 (no tensor)."""
    if onnx_type in _BY_ONNX_TYPE:
        return _BY_ONNX_TYPE[onnx_type].numpy
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(onnx_type))
    except KeyError:  # 0 (no tensor), or a number that this version of onnx does not have
        return np.dtype(object)


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in _FLOAT_NAMES


def bits(array: Array) -> Array:
    """``array``, contiguous, with bfloat16 as uint16, for interfaces without bfloat16. ``view`` is the inverse."""
    plain = np.asarray(array, order="C")
    return plain.view(np.uint16) if plain.dtype == ml_dtypes.bfloat16 else plain


def to_numpy(tensor: Tensor) -> Array:
    """``tensor`` as a NumPy array, with bfloat16 as ``ml_dtypes.bfloat16``."""
    torch = sys.modules["torch"]  # imported, because there is a tensor
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(DTYPES["bfloat16"].numpy)
    return tensor.numpy()


def as_array(value: Any) -> Array:
    """``value``, a tensor or anything that NumPy converts, as an array."""
    return to_numpy(value) if is_tensor(value) else np.asarray(value)

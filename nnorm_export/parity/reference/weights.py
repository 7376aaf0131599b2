"""Was a file made from the weights that it is compared with? Asked after a comparison that failed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from nnorm_export._version import __version__
from nnorm_export.dtypes import Array, is_float, to_numpy
from nnorm_export.errors import FreezeError, ModelFileError
from nnorm_export.files.archive import is_archive
from nnorm_export.files.onnx_file import read_with_weights
from nnorm_export.freezing import frozen_copy
from nnorm_export.freezing.weights import weights_sha256
from nnorm_export.models.modules import deepcopy
from nnorm_export.parity.reference.file_inputs import dtype_of
from nnorm_export.parity.reference.pytorch_model import Passthrough
from nnorm_export.runtimes import Runner


def other_weights(file: str, runner: Runner, model: nn.Module, passthrough: Passthrough) -> str:
    """Says that ``file``, which ``runner`` runs, was made from other weights than those of ``model``; else empty.

    It is empty too if the file does not say: it is an engine or behind a URL, or another program wrote it, or another
    version of this package, which may freeze a model into other tensors.
    """
    digest = runner.noted.get("weights_sha256")
    if digest is None or runner.noted.get("version") != __version__:
        return ""
    frozen = list(_frozen(model, dtype_of(runner, model), passthrough))
    found = [weights_sha256(each) for each in frozen]
    if not found or digest in found or any(_holds_weights(file, each) for each in frozen):
        return ""
    return (
        f"{file} was made from other weights than this model has: their weights_sha256 is {digest[:16]}…, that of the "
        f"model {found[0][:16]}…. Give the checkpoint that the file was made from, or export this model"
    )


def frozen_state(model: nn.Module, dtype: torch.dtype | None, passthrough: Passthrough) -> dict[str, Tensor]:
    """The parameters and buffers of what a file of ``model`` is made from; none if the model cannot be frozen."""
    frozen = next(_frozen(model, dtype, passthrough), None)
    return {} if frozen is None else frozen.state_dict(keep_vars=True)


def _frozen(model: nn.Module, dtype: torch.dtype | None, passthrough: Passthrough) -> Iterator[nn.Module]:
    """What a file of ``model`` may have been made from: the frozen model in its own dtype, or in the file's."""
    passed = tuple(passthrough)
    if isinstance(model, torch.fx.GraphModule):  # of an exported program, which is frozen
        yield model
    exact = deepcopy(model).to(torch.float64) if dtype == torch.float64 else model
    try:
        frozen = frozen_copy(exact, passed)[0]
    except FreezeError:  # the comparison ran the model as it is
        return
    yield frozen
    if dtype is not None:
        yield deepcopy(frozen).to(dtype)


def _holds_weights(file: str, frozen: nn.Module) -> bool:
    """Whether the ONNX file ``file`` has all values of ``frozen``; the digest also depends on the names of layers.

    The elements of a tensor may be in another order: a matrix may be transposed.
    """
    tensors = (*frozen.parameters(), *frozen.buffers())
    wanted = {_values(to_numpy(tensor)) for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 1}
    if not wanted or is_archive(file):
        return False
    try:
        proto = read_with_weights(file)
        return wanted <= {_values(onnx.numpy_helper.to_array(tensor)) for tensor in proto.graph.initializer}
    except ModelFileError:  # it is an engine or behind a URL
        return False


def _values(array: Array) -> tuple[int, bytes]:
    """The number of elements, and a digest of the sorted values."""
    if not is_float(array.dtype):
        return array.size, b""
    return array.size, hashlib.sha256(np.sort(array.astype(np.float64), axis=None).tobytes()).digest()

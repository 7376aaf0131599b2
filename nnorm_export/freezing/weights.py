"""A digest of the weights of a frozen model. Every exported file contains this digest."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def weights_sha256(module: nn.Module) -> str:
    """A hash of the tensors that inference reads: parameters, buffers and tensors in plain attributes, by name.

    It leaves out the counters of batches, and constants in code: an exported program names them ``lifted_tensor_0``, …,
    and a module has no names for them.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for path, layer in module.named_modules():
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        tensors |= {f"{path}.{name}".lstrip("."): value for name, value in plain.items()}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if not name.rpartition(".")[2].startswith(("num_batches_tracked", "lifted_tensor_")):
            digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

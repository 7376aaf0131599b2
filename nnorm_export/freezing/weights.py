"""A digest of the weights of a frozen model, which every file of it carries."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def weights_sha256(module: nn.Module) -> str:
    """A hash of what inference reads: parameters, buffers and tensors that are plain attributes, by name.

    The batches that a norm has counted do not enter. An exported program names the constants that it finds within code
    ``lifted_tensor_0``, …; a module has no name for them, so they do not enter either.
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

"""Classes with nothing of the authors' layers but their names and attributes, as a user's own copy would have them.

Their forward raises, so a test that uses them runs what nnorm_export built from their attributes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class _Fake(nn.Module):
    def __init__(self, shape: tuple[int, ...], has_affine: bool, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        self.cache: dict[str, Any] = {"lmbda_estimate": None}
        for name, fill in (("bias", torch.zeros), ("weight", torch.ones)):
            self.register_parameter(name, nn.Parameter(fill(shape)) if has_affine else None)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the training-time layer ran where its eval-mode operator should have")


class _Batch(_Fake):
    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True, **others: Any) -> None:
        attributes = {"standardize": True, "track_running_stats": True, "momentum": 0.1, "num_batches_tracked": 0}
        shape = (num_features,)
        super().__init__(shape, affine, num_features=num_features, eps=eps, **{**attributes, **others})
        self.affine = affine
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))


class _BatchNormal(_Batch):
    def __init__(self, num_features: int, **kwargs: Any) -> None:
        super().__init__(num_features, **{"noise_train": 0.4, "order": 2, "alpha": 1.0, "iterations": 1, **kwargs})
        self.register_buffer("running_lmbda", torch.ones(num_features))
        self.register_buffer("running_norm", torch.full((num_features,), math.sqrt(2 / math.pi)))


class _Layer(_Fake):
    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        **others: Any,
    ) -> None:
        shape = torch.Size([normalized_shape] if isinstance(normalized_shape, int) else normalized_shape)
        others = {"normalized_shape": shape, "elementwise_affine": elementwise_affine, **others}
        super().__init__(shape, elementwise_affine, eps=eps, **others)


class _Group(_Fake):
    def __init__(
        self, num_channels: int, num_groups: int = 32, eps: float = 1e-5, affine: bool = True, **others: Any
    ) -> None:
        others = {"num_channels": num_channels, "num_groups": num_groups, "affine": affine, **others}
        super().__init__((num_channels,), affine, eps=eps, **others)


class _Instance(_Fake):
    def __init__(self, num_features: int, affine: bool = True, eps: float = 1e-5, **others: Any) -> None:
        super().__init__((num_features,), affine, num_features=num_features, affine=affine, eps=eps, **others)


_NOISE = {"noise_train": 0.4}


class BatchNormalNorm1d(_BatchNormal): ...


class BatchNormalNorm2d(_BatchNormal): ...


class LayerNormalNorm(_Layer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"noise_train": 1.0, **kwargs})


class GroupNormalNorm(_Group):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**_NOISE, **kwargs})


class InstanceNormalNorm2d(_Instance):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**_NOISE, **kwargs})


class BatchNorm1d(_Batch): ...


class BatchNorm2d(_Batch): ...


class LayerNorm(_Layer): ...


class GroupNorm(_Group): ...


class InstanceNorm2d(_Instance): ...


class Standardize(nn.Module):
    def __init__(self, mean: list[float] | float, std: list[float] | float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean))
        self.register_buffer("std", torch.as_tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the training-time layer ran where its eval-mode operator should have")

"""Small convolutional networks for the tests of optimize(), each with something of its own between convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from backends import needs_kernels
from small_network import randomized
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, GroupNormalNorm
from nnorm_export.runtimes.onnxruntime import optimized_files

HERE = optimized_files.this_machine(onnxruntime)
SKIPS = [
    needs_kernels,
    pytest.mark.skipif(HERE.block is None, reason="ONNX Runtime has no blocked layout for this machine's processor"),
]
SHAPE = (2, 3, 9, 7)  # odd extents


def conv(channels_in: int, channels_out: int, size: int = 3, **options: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, padding=size // 2, **options)


def conv_norm_relu(channels_in: int, channels_out: int, size: int = 3) -> nn.Sequential:
    return nn.Sequential(conv(channels_in, channels_out, size), BatchNormalNorm2d(channels_out), nn.ReLU())


class Block(nn.Module):
    """A residual block; its shortcut is the identity, a convolution with a norm, or plain padding."""

    def __init__(self, channels_in: int, channels_out: int, padded: bool = False) -> None:
        super().__init__()
        self.first = conv_norm_relu(channels_in, channels_out)
        self.conv, self.norm = conv(channels_out, channels_out), BatchNormalNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if padded:
            self.shortcut = nn.ConstantPad3d((0, 0, 0, 0, 0, channels_out - channels_in), 0.0)
        elif channels_in != channels_out:
            self.shortcut = nn.Sequential(conv(channels_in, channels_out, 1), BatchNormalNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(self.first(x))) + self.shortcut(x)).relu()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class InvertedResidual(nn.Module):
    """MobileNet's and EfficientNet's: a depthwise convolution, other activations than ReLU, a sum without any."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(16, 32, 1), BatchNormalNorm2d(32), activation(),
            conv(32, 32, groups=32), BatchNormalNorm2d(32), activation(),
            conv(32, 16, 1), BatchNormalNorm2d(16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Dense(nn.Module):
    """The output of a norm is the input of a convolution, and is concatenated with the convolution's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv_norm_relu(3, 32), conv_norm_relu(32, 16)
        self.pool, self.third = nn.MaxPool2d(2), conv_norm_relu(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.third(self.pool(torch.cat([y, self.second(y)], 1)))


class Outputs(nn.Module):
    """The output of a norm is an output of the model, and read by a convolution and by operators without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.conv = conv_norm_relu(3, 32), conv(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.features(x)
        return features, self.conv(features), features.flatten(1).cumsum(1)


class NormFirst(nn.Module):
    """A norm of the model's input, which a convolution reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.norm = conv(3, 32), BatchNormalNorm2d(3)
        self.join, self.last = conv(3, 32), BatchNormalNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.widen(x) + self.join(self.norm(x)))


class Shared(nn.Module):
    """One norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = conv(3, 16), BatchNormalNorm2d(16)
        self.convs = nn.ModuleList([conv(16, 16), conv(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.convs:
            x = layer(self.norm(x).relu())
        return x


class Series(nn.Module):
    """Convolutions along one axis, which ONNX Runtime has no blocks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(3, 16, 3), BatchNormalNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(2))


class Gated(nn.Module):
    """Squeeze and excitation: a product that broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = conv_norm_relu(3, 16), nn.Conv2d(16, 16, 1), conv_norm_relu(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y * self.gate(F.adaptive_avg_pool2d(y, 1)).sigmoid())


@dataclass(frozen=True)
class Case:
    """A network, how many reorders its optimized file has, and why any of its norms are left as they are."""

    build: Callable[[], nn.Module]
    reorders: int
    left: tuple[str, ...] = ()

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return randomized(self.build()).eval()


NO_GAIN, NO_MULTIPLE = "as many reorders in blocks as without", "are not a multiple of"

CASES = {
    "residual": Case(lambda: nn.Sequential(conv_norm_relu(3, 16), Block(16, 16), Block(16, 32), Mean()), 1),
    "padded shortcut": Case(
        lambda: nn.Sequential(conv_norm_relu(3, 16), Block(16, 32, padded=True), Block(32, 32), Mean()), 3
    ),
    "dense": Case(Dense, 1, (NO_GAIN,)),
    "outputs": Case(Outputs, 2),
    "norm first": Case(NormFirst, 1, (NO_GAIN, NO_MULTIPLE)),
    "shared": Case(Shared, 1),
    "relu6": Case(lambda: nn.Sequential(conv(3, 16), InvertedResidual(nn.ReLU6), conv(16, 16)), 1),
    "silu": Case(lambda: nn.Sequential(conv(3, 16), InvertedResidual(nn.SiLU), conv(16, 16)), 1),
    "hardswish": Case(lambda: nn.Sequential(conv(3, 16), InvertedResidual(nn.Hardswish), conv(16, 16)), 1),
    "gated": Case(Gated, 5, (NO_GAIN,)),
    "20 channels": Case(
        lambda: nn.Sequential(conv_norm_relu(3, 20), conv_norm_relu(20, 16), conv_norm_relu(16, 16)),
        3,
        (NO_MULTIPLE, NO_GAIN),
    ),
    "two kinds of norm": Case(
        lambda: nn.Sequential(conv_norm_relu(3, 16), conv(16, 16), GroupNormalNorm(16, 4), conv_norm_relu(16, 16)),
        3,
        ("there is no GroupNormalNorm for blocks", NO_GAIN),
    ),
    "series": Case(Series, 0, ("beside nothing in blocks",)),
}


def damaged(model: ir.Model, _: int | None) -> dict[ir.Node, str]:
    """In the place of use_blocks(): an edit that is wrong."""
    weight = next(value for name, value in model.graph.initializers.items() if name.endswith("bias"))
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() + np.float32(1e-3), name=weight.name)
    return {}

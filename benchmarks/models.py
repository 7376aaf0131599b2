"""The measured networks, and the published formulation of the layers as a baseline.

All networks take the class of their normalization, so that a network and its *twin* with the plain norm differ only in
this class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm

Norm = Callable[[int], nn.Module]
BATCH_NORMAL_NORMS = (BatchNormalNorm1d, BatchNormalNorm2d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, *BATCH_NORMAL_NORMS)


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), norm(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """ResNet18 in its shape for CIFAR: images [N, 3, 32, 32] to logits [N, 10]; 20 normalizations."""

    def __init__(
        self, norm: Norm, channels: Sequence[int] = (64, 128, 256, 512), blocks: int = 2, classes: int = 10
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels[0], 3, padding=1, bias=False), norm(channels[0]), nn.ReLU())
        stages = []
        for channels_in, channels_out in itertools.pairwise([channels[0], *channels]):
            for index in range(blocks):
                first = index == 0
                stride = 2 if first and stages else 1  # every stage but the first halves the map
                stages.append(ResidualBlock(channels_in if first else channels_out, channels_out, stride, norm))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class PreActivationBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(self.norm2(self.conv1(y)).relu()) + shortcut


class WideResNet(nn.Module):
    """WideResNet 28-2: images [N, 3, 32, 32] to logits [N, 10]; 25 normalizations, each before its convolution."""

    def __init__(self, norm: Norm, channels: Sequence[int] = (32, 64, 128), blocks: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        for channels_in, channels_out in itertools.pairwise([16, *channels]):
            for index in range(blocks):
                stride = 2 if index == 0 and len(stages) > 0 else 1
                stages.append(PreActivationBlock(channels_out if index else channels_in, channels_out, stride, norm))
        self.stages = nn.Sequential(*stages)
        self.norm = norm(channels[-1])
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(images))).relu().mean(dim=(2, 3)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """ViT of the paper's size: images [N, 3, 32, 32] to logits [N, 10]; 17 normalizations, 65 tokens."""

    def __init__(
        self,
        norm: Norm,
        depth: int = 8,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        patch: int = 4,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, hidden, norm) for _ in range(depth)))
        self.norm = norm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(images.shape[0], -1, -1)
        x = self.blocks(torch.cat([class_token, tokens], dim=1) + self.positions)
        return self.head(self.norm(x)[:, 0])


class MultilayerPerceptron(nn.Module):
    """Rows of numbers [N, 64] to logits [N, 10]; 6 normalizations. A run takes about 20 µs."""

    def __init__(self, norm: Norm, features: int = 64, width: int = 128, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.hidden = nn.Sequential()
        for index in range(depth):
            self.hidden.append(nn.Linear(width if index else features, width, bias=False))
            self.hidden.append(norm(width))
            self.hidden.append(nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.hidden(rows))


def build(network: Callable[..., nn.Module], norm: Norm, samples: Tensor, **sizes: Any) -> nn.Module:
    """A network in eval mode after :func:`randomize`, with the same seed for every norm."""
    torch.manual_seed(0)
    model = network(norm, **sizes).eval()
    randomize(model, samples)
    return model


@torch.no_grad()
def randomize(model: nn.Module, samples: Tensor) -> None:
    """Sets random affine parameters, λ in 0.5 to 1.5, and running statistics close to the statistics on ``samples``.

    Random statistics would let the activations overflow, because ψ grows faster than its argument for λ > 1.
    """

    def measure_statistics(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        variance, mean = torch.var_mean(inputs[0], dim=(0, *range(2, inputs[0].dim())))
        layer.running_mean.copy_(mean + 0.1 * variance.sqrt() * torch.randn_like(mean))
        layer.running_var.copy_(variance * (0.8 + 0.4 * torch.rand_like(variance)))

    hooks = []
    for layer in model.modules():
        if not isinstance(layer, (*BATCH_NORMS, nn.LayerNorm, LayerNormalNorm)):
            continue
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.normal_(layer.bias, std=0.1)
        if isinstance(layer, BATCH_NORMAL_NORMS):
            nn.init.uniform_(layer.running_lmbda, 0.5, 1.5)
        if isinstance(layer, BATCH_NORMS):
            hooks.append(layer.register_forward_pre_hook(measure_statistics))
    model(samples)
    for hook in hooks:
        hook.remove()


class MaskedBatchNormalNorm2d(BatchNormalNorm2d):
    """The published formulation at inference: signs, float32 masks and pow, as users of the authors' code export it.

    It has fewer nodes than the authors' code, 927 instead of 970 for ResNet18, so a comparison favors this baseline.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _masked_batch_normal_norm(self, x)


class MaskedBatchNormalNorm1d(BatchNormalNorm1d):
    """:class:`MaskedBatchNormalNorm2d` over rows of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return _masked_batch_normal_norm(self, x)


def _masked_batch_normal_norm(layer: Any, x: Tensor) -> Tensor:
    mean, variance, lmbda, weight, bias = (
        values.reshape(1, -1, *[1] * (x.dim() - 2))
        for values in (layer.running_mean, layer.running_var, layer.running_lmbda, layer.weight, layer.bias)
    )
    h = (x - mean) / torch.sqrt(variance + layer.eps)
    return _masked_power_transform(h, _sign_without_zero(h), lmbda, layer.delta) * weight + bias


class MaskedLayerNormalNorm(LayerNormalNorm):
    """The published formulation at inference; λ̂ is NN eq. 5–15, with the sign as a factor throughout."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        h = (x - mean) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + self.eps)
        sign = _sign_without_zero(h)
        return _masked_power_transform(h, sign, self._estimate(h, sign), self.delta) * self.weight + self.bias

    def _estimate(self, h: Tensor, sign: Tensor) -> Tensor:
        magnitude = h.abs()
        log = torch.log1p(magnitude)
        d = (1.0 + magnitude) * log - magnitude
        d_derivative = sign * ((1.0 + magnitude) * torch.square(log) - 2.0 * d)
        spread = torch.square(d - d.mean(-1, keepdim=True))
        first = 2.0 * (h * d).mean(-1, keepdim=True)
        second = 2.0 * (h * d_derivative + spread).mean(-1, keepdim=True)
        slope = 0.5 * first - (sign * log).mean(-1, keepdim=True)
        curvature = 0.5 * second - 0.5 * torch.square(first)
        return torch.ones(self.normalized_shape) - slope / (curvature + self.delta)


def _sign_without_zero(values: Tensor) -> Tensor:
    sign = torch.sign(values)
    sign[sign == 0] = 1.0
    return sign


def _masked_power_transform(h: Tensor, sign: Tensor, lmbda: Tensor, delta: float) -> Tensor:
    """ψ as the sum of both branches, each multiplied by its mask."""
    magnitude = h.abs()
    unshifted = 1.0 + sign * (lmbda - 1.0)
    exponent = unshifted + _sign_without_zero(unshifted) * delta
    power_branch = sign / exponent * (torch.pow(1.0 + magnitude, exponent) - 1.0)
    logarithmic_branch = sign * torch.log1p(magnitude)
    is_logarithmic = unshifted.abs() <= delta
    return (~is_logarithmic).to(torch.float32) * power_branch + is_logarithmic.to(torch.float32) * logarithmic_branch

"""The layers that random networks are made of. Each is drawn from a seed and fits the tensor that it is built for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz.networks_attention import attention, groups_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from nnorm_export import layers

Random = random.Random
Layer = Callable[[Random, Tensor], "nn.Module | None"]

# Without LogSigmoid: torch.onnx writes Log(Sigmoid(x)), which is -inf in ONNX Runtime for x below -88.
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.ReLU, nn.ReLU, lambda: nn.ReLU(inplace=True), nn.ReLU6, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU,
    nn.Sigmoid, nn.Tanh, lambda: nn.LeakyReLU(0.1), nn.ELU, nn.SELU, nn.Softplus, nn.Hardswish, nn.Mish, nn.PReLU,
    lambda: nn.CELU(1.3), nn.Hardsigmoid, lambda: nn.Hardtanh(-0.7, 1.1), nn.Softsign,
)  # fmt: skip
CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
TRANSPOSED = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d, 5: nn.ConvTranspose3d}
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 8, 11, 16, 16)


class Function(nn.Module):
    """A function of one tensor, with the text that describes it."""

    def __init__(self, text: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.text = text
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Whole(nn.Sequential):
    """Layers that are one step of a network."""


def activation(rng: Random, x: Tensor) -> nn.Module:
    return rng.choice(ACTIVATIONS)()


# Normalizations


def batch_normal(rng: Random, x: Tensor, standardize: bool | None = None) -> nn.Module | None:
    classes = {2: layers.BatchNormalNorm1d, 3: layers.BatchNormalNorm1d, 4: layers.BatchNormalNorm2d}
    cls = {**classes, 5: layers.BatchNormalNorm3d}.get(x.dim())
    whole = rng.random() < 0.85 if standardize is None else standardize
    variant = rng.choice(["reference", "reference", "paper"])
    options = {"eps": epsilon(rng), "affine": rng.random() < 0.8, "standardize": whole, "variant": variant}
    return cls and cls(x.shape[1], **options)  # type: ignore[return-value]


def layer_normal(rng: Random, x: Tensor) -> nn.Module | None:
    if x.dim() < 2:
        return None
    axes = rng.choice([1, 1, 1, x.dim() - 1])
    options = {"eps": epsilon(rng), "variant": rng.choice(["reference", "paper"])}
    return layers.LayerNormalNorm(list(x.shape[-axes:]), elementwise_affine=rng.random() < 0.8, **options)


def group_normal(rng: Random, x: Tensor) -> nn.Module | None:
    options = {"eps": epsilon(rng), "variant": rng.choice(["reference", "paper"]), "affine": rng.random() < 0.8}
    return layers.GroupNormalNorm(x.shape[1], groups_of(rng, x.shape[1]), **options)


def instance_normal(rng: Random, x: Tensor) -> nn.Module | None:
    classes = {3: layers.InstanceNormalNorm1d, 4: layers.InstanceNormalNorm2d, 5: layers.InstanceNormalNorm3d}
    cls = classes.get(x.dim())
    return cls and cls(x.shape[1], eps=epsilon(rng), affine=rng.random() < 0.6)  # type: ignore[return-value]


def epsilon(rng: Random) -> float:
    return rng.choice([1e-5, 1e-5, 1e-5, 1e-3, 1e-2])


def with_activation(norm: Layer) -> Layer:
    def built(rng: Random, x: Tensor) -> nn.Module | None:
        layer = norm(rng, x)
        return layer and Whole(layer, activation(rng, x))

    return built


def decorrelated(rng: Random, x: Tensor) -> nn.Module | None:
    """A whitening, after a layer that it can be folded into or not."""
    flat = {2: layers.DecorrelatedBatchNorm1d, 4: layers.DecorrelatedBatchNorm2d}
    normal = {2: layers.DecorrelatedBatchNormalNorm1d, 4: layers.DecorrelatedBatchNormalNorm2d}
    classes: dict[int, Any] = rng.choice([flat, normal])
    if x.dim() not in classes:
        return None
    running = rng.choice(["whitening", "covariance"])
    norm = classes[x.dim()](x.shape[1], groups_of(rng, x.shape[1]), running=running)
    if rng.random() < 0.5:
        linear = nn.Linear(x.shape[1], x.shape[1]) if x.dim() == 2 else nn.Conv2d(x.shape[1], x.shape[1], 1)
        return Whole(linear, norm)
    return norm


def related(rng: Random, x: Tensor) -> nn.Module | None:
    channels = x.shape[1]
    affine = rng.random() < 0.7
    choices: list[Callable[[], nn.Module | None]] = [
        lambda: layers.BMLV(channels, affine=affine),
        lambda: layers.LMBV(channels, affine=affine),
        lambda: layers.RegNorm(channels, affine=affine),
        lambda: layers.SwitchableNorm(channels, affine=affine),
        lambda: layers.EvoNormS0(channels, groups_of(rng, channels), affine=affine),
        lambda: (norm := batch_normal(rng, x)) and layers.ProxyNorm(norm, activation(rng, x)),
        lambda: (norm := group_normal(rng, x)) and layers.ProxyNorm(norm, nn.ReLU()),
        lambda: pre(rng, x),
        lambda: standardized_weight(rng, x),
        lambda: on_another_norm(rng, x),
    ]
    if x.dim() > 2:
        choices.append(lambda: layers.FilterResponseNorm(channels, learnable_eps=rng.random() < 0.5, affine=affine))
    return rng.choice(choices)()


def pre(rng: Random, x: Tensor) -> nn.Module | None:
    cls = rng.choice([layers.PreLayerNorm, layers.PreRegNorm])
    inner = convolution(rng, x) if x.dim() > 2 and rng.random() < 0.6 else linear(rng, x)
    return inner and cls(inner, affine=rng.random() < 0.7)  # type: ignore[return-value]


def standardized_weight(rng: Random, x: Tensor) -> nn.Module | None:
    inner = convolution(rng, x) if x.dim() > 2 else linear(rng, x)
    if inner is None or next(inner.parameters()).flatten(1).shape[1] < 2:  # one weight has no deviation
        return None
    return parametrize.register_parametrization(inner, "weight", layers.WeightStandardization())


def on_another_norm(rng: Random, x: Tensor) -> nn.Module | None:
    norm = batch_normal(rng, x, standardize=False)
    return norm and Whole(layers.BMLV(x.shape[1], affine=False), norm)


def torch_norm(rng: Random, x: Tensor) -> nn.Module | None:
    batch = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(x.shape[-1]),
        lambda: nn.GroupNorm(groups_of(rng, x.shape[1]), x.shape[1]),
    ]
    if x.dim() in batch:
        choices.append(lambda: batch[x.dim()](x.shape[1], momentum=rng.choice([0.1, None])))
    return rng.choice(choices)()


# Linear maps


def convolution(rng: Random, x: Tensor) -> nn.Module | None:
    cls = CONVOLUTIONS.get(x.dim())
    if cls is None:
        return None
    channels, width = x.shape[1], rng.choice(WIDTHS)
    if rng.random() < 0.2:
        width = channels * rng.choice([1, 2])  # depthwise, perhaps
    dilation = rng.choice([1, 1, 1, 2])
    kernel = [rng.choice([k for k in (1, 2, 3, 3, 3, 5) if k <= n + 2] or [1]) for n in x.shape[2:]]
    mode = rng.choice(["zeros"] * 5 + ["reflect", "replicate", "circular"])
    padding: Any = [rng.choice([0, 1, k // 2]) for k in kernel]
    if mode != "zeros":
        padding = [min(p, n - 1) for p, n in zip(padding, x.shape[2:], strict=True)]
    stride: Any = rng.choice([1, 1, 1, 2, 3])
    if stride == 1 and mode == "zeros" and rng.random() < 0.2:
        padding = "same"
    groups = groups_of(rng, channels, width) if rng.random() < 0.5 else 1
    room = [n + (2 * p if padding != "same" else k * dilation) for n, p, k in zip(
        x.shape[2:], padding if padding != "same" else kernel, kernel, strict=True)]  # fmt: skip
    if any(n < dilation * (k - 1) + 1 for n, k in zip(room, kernel, strict=True)):
        dilation, kernel, padding = 1, [1] * len(kernel), 0
    options = {"dilation": dilation, "groups": groups, "bias": rng.random() < 0.7, "padding_mode": mode}
    layer: nn.Module = cls(channels, width, tuple(kernel), stride=stride, padding=padding, **options)
    return layer


def transposed(rng: Random, x: Tensor) -> nn.Module | None:
    cls = TRANSPOSED.get(x.dim())
    if cls is None:
        return None
    channels, width, stride = x.shape[1], rng.choice(WIDTHS), rng.choice([1, 2])
    options = {"stride": stride, "output_padding": rng.choice([0, stride - 1]), "bias": rng.random() < 0.7}
    layer: nn.Module = cls(channels, width, rng.choice([2, 3]), padding=rng.choice([0, 1]),
                           groups=groups_of(rng, channels, width), **options)  # fmt: skip
    return layer


def linear(rng: Random, x: Tensor) -> nn.Module | None:
    return nn.Linear(x.shape[-1], rng.choice(WIDTHS), bias=rng.random() < 0.7)


def convolution_and_norm(rng: Random, x: Tensor) -> nn.Module | None:
    """A convolution of 8 or 16 channels and the norm and ReLU after it: what the kernels for blocks are for."""
    if x.dim() != 4:
        return None
    width = rng.choice([8, 16, 16])
    conv = nn.Conv2d(x.shape[1], width, rng.choice([1, 3]), padding=rng.choice([0, 1]), bias=rng.random() < 0.5)
    if min(conv.kernel_size) > min(x.shape[2:]):
        return None
    return Whole(conv, layers.BatchNormalNorm2d(width), rng.choice([nn.ReLU, nn.Identity, nn.SiLU])())


# Pooling and resampling


def pooling(rng: Random, x: Tensor) -> nn.Module | None:
    rank = x.dim() - 2
    if rank not in (1, 2, 3):
        return None
    kernel = rng.choice([2, 2, 3])
    if any(n < kernel for n in x.shape[2:]):
        kernel = 1
    padding, ceil = rng.choice([0, 0, kernel // 2]), rng.random() < 0.4
    stride = rng.choice([1, 2, kernel])
    average: Any = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[rank - 1]
    maximum: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1]
    if rng.random() < 0.5:
        dilation = 2 if all(n > 2 * kernel for n in x.shape[2:]) and rng.random() < 0.3 else 1
        layer: nn.Module = maximum(kernel, stride, padding, dilation, ceil_mode=ceil)
    else:
        layer = average(kernel, stride, padding, ceil_mode=ceil, count_include_pad=rng.random() < 0.5)
    return layer


def adaptive_pooling(rng: Random, x: Tensor) -> nn.Module | None:
    rank = x.dim() - 2
    if rank not in (1, 2, 3):
        return None
    average: Any = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[rank - 1]
    maximum: Any = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[rank - 1]
    size = tuple(rng.choice([1, 1, *(d for d in (2, 3) if n % d == 0)]) for n in x.shape[2:])
    if rng.random() < 0.1:
        size = tuple(rng.choice([1, 2, 3]) for _ in x.shape[2:])
    layer: nn.Module = rng.choice([average, average, maximum])(size if rank > 1 else size[0])
    return layer


def resampling(rng: Random, x: Tensor) -> nn.Module | None:
    modes = {3: ("nearest", "linear"), 4: ("nearest", "bilinear"), 5: ("nearest",)}.get(x.dim())
    if modes is None:
        return None
    mode = rng.choice(modes)
    return nn.Upsample(scale_factor=2, mode=mode, align_corners=rng.random() < 0.5 if mode != "nearest" else None)


# Shapes


def shape(rng: Random, x: Tensor) -> nn.Module | None:
    """A change of shape or order that keeps the batch first."""
    last = x.dim() - 1
    choices: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("x.flip(-1)", lambda x: x.flip(-1)),
        ("x.roll(1, -1)", lambda x: x.roll(1, -1)),
        ("x[..., ::2]", lambda x: x[..., ::2]),
        ("x.unsqueeze(1)", lambda x: x.unsqueeze(1)),
        ("x.unsqueeze(-1)", lambda x: x.unsqueeze(-1)),
        ("cat(chunk(x, 2, 1)[::-1], 1)", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        ("cat([x, 2x], -1)", lambda x: torch.cat([x, 2 * x], -1)),
        ("stack([x, -x], 1)", lambda x: torch.stack([x, -x], 1)),
        ("repeat_interleave(x, 2, 1)", lambda x: x.repeat_interleave(2, 1)),
    ]
    if last >= 2:
        choices += [
            ("x.transpose(1, -1)", lambda x: x.transpose(1, -1)),
            ("x.transpose(-1, -2)", lambda x: x.transpose(-1, -2)),
            ("x.flatten(1, 2)", lambda x: x.flatten(1, 2)),
            ("x.flatten(2)", lambda x: x.flatten(2)),
            ("x.flatten(1)", lambda x: x.flatten(1)),
            ("x.mean(-1)", lambda x: x.mean(-1)),
            ("x.amax(-1)", lambda x: x.amax(-1)),
            ("x.mean(2, keepdim=True)", lambda x: x.mean(2, keepdim=True)),
        ]
    if x.shape[1] % 2 == 0:
        half = x.shape[1] // 2
        choices.append((f"x.unflatten(1, (2, {half}))", lambda x: x.unflatten(1, (2, half))))
    if last == 3 and x.shape[1] % 4 == 0:
        choices.append(("pixel_shuffle(x, 2)", lambda x: F.pixel_shuffle(x, 2)))
    if x.dim() >= 6 or (x.dim() == 5 and rng.random() < 0.5):
        choices = [("x.flatten(2)", lambda x: x.flatten(2)), ("x.flatten(1, 2)", lambda x: x.flatten(1, 2))]
    return Function(*rng.choice(choices))


def arithmetic(rng: Random, x: Tensor) -> nn.Module | None:
    choices: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("x.softmax(-1)", lambda x: x.softmax(-1)),
        ("x.softmax(1)", lambda x: x.softmax(1)),
        ("x.log_softmax(-1)", lambda x: x.log_softmax(-1)),
        ("x.cumsum(-1)", lambda x: x.cumsum(-1)),
        ("x.clamp(-1, 1.5)", lambda x: x.clamp(-1.0, 1.5)),
        ("x.abs()", lambda x: x.abs()),
        ("x * x.sigmoid()", lambda x: x * x.sigmoid()),
        ("x - x.mean(1, keepdim=True)", lambda x: x - x.mean(1, keepdim=True)),
        ("where(x > 0, x, 0.5x)", lambda x: torch.where(x > 0, x, 0.5 * x)),
        ("normalize(x, dim=1)", lambda x: F.normalize(x, dim=1)),
        ("glu(cat([x, x], 1), 1)", lambda x: F.glu(torch.cat([x, 1 - x], 1), 1)),
        ("pad(x, (1, 2))", lambda x: F.pad(x, (1, 2), value=0.5)),
        ("(x @ x.mT)", lambda x: x @ x.mT if x.dim() > 2 else x * 3),
        ("x + 1 then relu", lambda x: (x + 1).relu()),
    ]
    return Function(*rng.choice(choices))


class Gate(nn.Module):
    """Squeeze and excitation: a product that broadcasts."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.linear(x.flatten(2).mean(2)).sigmoid()
        return x * gate.reshape(*gate.shape, *(1,) * (x.dim() - 2))


def gate(rng: Random, x: Tensor) -> nn.Module | None:
    return Gate(x.shape[1]) if x.dim() > 2 else None


CONDITIONS: dict[str, Callable[[torch.Size], bool]] = {
    "n > 2": lambda s: s[0] > 2,
    "n·c > 12": lambda s: s[0] * s[1] > 12,
    "n == c": lambda s: s[0] == s[1],
    "n > last": lambda s: s[0] > s[-1],
    "n·last is even": lambda s: s[0] * s[-1] % 2 == 0,
    "all > 40": lambda s: s.numel() > 40,
}


class Branch(nn.Module):
    """One of two paths, by a condition on lengths: a file is right on both sides of it, or refused."""

    def __init__(self, condition: str) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if CONDITIONS[self.condition](x.shape) else x - 1

    def extra_repr(self) -> str:
        return self.condition


def branch(rng: Random, x: Tensor) -> nn.Module:
    return Branch(rng.choice([*CONDITIONS]))


# kind of step -> (weight, its layer)
KINDS: dict[str, tuple[int, Layer]] = {
    "batch": (10, batch_normal),
    "batch+act": (8, with_activation(batch_normal)),
    "layer": (7, layer_normal),
    "layer+act": (2, with_activation(layer_normal)),
    "group": (6, group_normal),
    "group+act": (3, with_activation(group_normal)),
    "instance": (4, instance_normal),
    "decorrelated": (2, decorrelated),
    "related": (7, related),
    "torch": (3, torch_norm),
    "conv": (10, convolution),
    "conv+norm": (6, convolution_and_norm),
    "deconv": (2, transposed),
    "linear": (6, linear),
    "act": (4, activation),
    "pool": (4, pooling),
    "adaptive": (2, adaptive_pooling),
    "resample": (1, resampling),
    "shape": (6, shape),
    "math": (4, arithmetic),
    "attention": (6, attention),
    "gate": (1, gate),
    "branch": (1, branch),
}
NORMS = ("batch", "batch+act", "layer", "group", "instance", "related")

"""The normalizations that the papers compare with: an example of each, and its oracle in NumPy.

An oracle computes in float64 from the equations and shares nothing with the package. It takes the layer's state as
arrays, the input and whether it is training, and returns the output and the running statistics after the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import oracle
import torch
from scipy.special import erfinv
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nnorm_export import export, layers

Array = oracle.Array
State = Mapping[str, Array]
Oracle = Callable[[State, Array, bool], tuple[Array, dict[str, Array]]]

EPS, MOMENTUM = 1e-5, 0.1


@dataclass(frozen=True)
class Case:
    """A layer of four channels or features.

    Attributes:
        make: builds it.
        shape: of an input; odd lengths.
        oracle: see the module.
        network: makes a network for 8×8 images of it, from one with batch or group norms.
    """

    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    oracle: Oracle
    network: Callable[[], nn.Module]


def per_channel(values: Array, x: Array) -> Array:
    return values.reshape(-1, *(1,) * (x.ndim - 2))


def affine(state: State, y: Array) -> Array:
    return y * per_channel(state["weight"], y) + per_channel(state["bias"], y)


def batch_axes(x: Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def sample_axes(x: Array) -> tuple[int, ...]:
    return tuple(range(1, x.ndim))


def sample_deviation(x: Array, axes: tuple[int, ...]) -> Array:
    return np.sqrt(x.var(axis=axes, keepdims=True) + EPS)


def moved(old: Array, batch: Array) -> Array:
    return MOMENTUM * batch.reshape(old.shape) + (1 - MOMENTUM) * old


def filter_response(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    nu = (x**2).mean(axis=tuple(range(2, x.ndim)), keepdims=True)
    y = affine(state, x / np.sqrt(nu + 1e-6 + np.abs(state.get("eps_learned", 0.0))))
    return np.maximum(y, per_channel(state["tau"], x)), {}


def evo_norm_s0(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    groups = x.reshape(x.shape[0], 2, -1)
    sigma = np.repeat(np.sqrt(groups.var(axis=2) + EPS), x.shape[1] // 2, axis=1)
    swish = x / (1 + np.exp(-per_channel(state["v"], x) * x))
    return affine(state, swish / sigma.reshape(*x.shape[:2], *(1,) * (x.ndim - 2))), {}


def bmlv(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    running = state["running_mean"]
    mean = x.mean(axis=batch_axes(x)) if training else running
    y = affine(state, (x - per_channel(mean, x)) / sample_deviation(x, sample_axes(x)))
    return y, {"running_mean": moved(running, mean)} if training else {}


def lmbv(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    running = state["running_var"]
    variance = x.var(axis=batch_axes(x)) if training else running
    y = (x - x.mean(axis=sample_axes(x), keepdims=True)) / np.sqrt(per_channel(variance, x) + EPS)
    count = x.size / x.shape[1]
    return affine(state, y), {"running_var": moved(running, variance * count / (count - 1))} if training else {}


def reg_norm(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    return affine(state, x / sample_deviation(x, sample_axes(x))), {}


def pre_layer_norm(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    z = (x - x.mean(axis=-1, keepdims=True)) @ state["linear.weight"].T
    return z / sample_deviation(z, (-1,)) * state["weight"] + state["bias"], {}


def pre_layer_norm_conv(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    kernel = state["linear.weight"]
    centered = np.pad(x - x.mean(axis=sample_axes(x), keepdims=True), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(centered, kernel.shape[2:], axis=(2, 3))
    z = np.einsum("nchwij,ocij->nohw", windows, kernel)
    return affine(state, z / sample_deviation(z, sample_axes(z))), {}


def proxy_norm(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    groups = x.reshape(x.shape[0], 2, -1)
    h = (groups - groups.mean(axis=2, keepdims=True)) / np.sqrt(groups.var(axis=2, keepdims=True) + EPS)
    weight, bias = state["norm.weight"], state["norm.bias"]
    y = np.sqrt(2) * erfinv(2 * (np.arange(256) + 0.5) / 256 - 1)[:, None]
    y = y * (1 + state["proxy_weight"]) + state["proxy_bias"]
    proxy = np.maximum(weight * y + bias, 0)
    activated = np.maximum(h.reshape(x.shape) * per_channel(weight, x) + per_channel(bias, x), 0)
    z = (activated - per_channel(proxy.mean(axis=0), x)) / np.sqrt(per_channel(proxy.var(axis=0), x) + 0.03)
    return z, {}


def standardized_conv(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    kernel = state["parametrizations.weight.original"]
    axes = tuple(range(1, kernel.ndim))
    kernel = (kernel - kernel.mean(axis=axes, keepdims=True)) / np.sqrt(kernel.var(axis=axes, keepdims=True) + 1e-10)
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, kernel) + per_channel(state["bias"], x), {}


def switchable(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    def softmax(logits: Array) -> Array:
        return np.asarray(np.exp(logits) / np.exp(logits).sum())

    kept = {}
    mean, variance = state["running_mean"], state["running_var"]
    if training:
        count = x.size / x.shape[1]
        batch_mean, batch_variance = x.mean(axis=batch_axes(x)), x.var(axis=batch_axes(x))
        kept["running_mean"] = moved(mean, batch_mean)
        kept["running_var"] = moved(variance, batch_variance * count / (count - 1))
        mean, variance = batch_mean, batch_variance
    spatial = tuple(range(2, x.ndim))
    means = [x.mean(axis=axes, keepdims=True) for axes in (spatial, sample_axes(x))] + [per_channel(mean, x)]
    variances = [x.var(axis=axes, keepdims=True) for axes in (spatial, sample_axes(x))] + [per_channel(variance, x)]
    center = sum(w * value for w, value in zip(softmax(state["mean_logits"]), means, strict=True))
    spread = sum(w * value for w, value in zip(softmax(state["var_logits"]), variances, strict=True))
    return affine(state, (x - center) / np.sqrt(spread + EPS)), kept


def decorrelated(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    """Group by group, sample by sample."""
    size = x.shape[1] // 2
    values = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    result = np.empty_like(values)
    kept: dict[str, Any] = {"running_mean": state["running_mean"].copy()}
    matrices = "running_covariance" if "running_covariance" in state else "running_whitening"
    kept[matrices] = state[matrices].copy()
    for g in range(2):
        rows = slice(g * size, (g + 1) * size)
        if training:
            mean = values[rows].mean(axis=1)
            covariance = np.cov(values[rows], bias=True)
            whitening = zca(covariance)
            new = np.cov(values[rows]) if matrices == "running_covariance" else whitening
            kept["running_mean"][rows] = moved(state["running_mean"][rows], mean)
            kept[matrices][g] = moved(state[matrices][g], new)
        else:
            mean = state["running_mean"][rows]
            whitening = zca(state[matrices][g]) if matrices == "running_covariance" else state[matrices][g]
        result[rows] = whitening @ (values[rows] - mean[:, None])
    y = np.moveaxis(result.reshape(x.shape[1], x.shape[0], *x.shape[2:]), 0, 1)
    return (affine(state, y) if "weight" in state else y), kept if training else {}


def zca(covariance: Array) -> Array:
    values, vectors = np.linalg.eigh(covariance + EPS * np.eye(len(covariance)))
    return np.asarray(vectors @ np.diag(values**-0.5) @ vectors.T)


def decorrelated_normal(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    whiten = {name.removeprefix("whiten."): value for name, value in state.items() if name.startswith("whiten.")}
    h, kept = decorrelated(whiten, x, training)
    lmbda = None if training else state["gaussianize.running_lmbda"]
    y = oracle.batch_normal_norm(
        h,
        eps=EPS,
        delta=EPS**0.5,
        standardize=False,
        lmbda=lmbda,
        weight=state["gaussianize.weight"],
        bias=state["gaussianize.bias"],
    )
    return y, {f"whiten.{name}": value for name, value in kept.items()}


def on_top(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    """BatchNormalNorm without standardization on a BMLV without affine."""
    bmlv_state = {"running_mean": state["0.running_mean"], "weight": np.ones(4), "bias": np.zeros(4)}
    h, kept = bmlv(bmlv_state, x, training)
    lmbda = None if training else state["1.running_lmbda"]
    y = oracle.batch_normal_norm(
        h, eps=EPS, delta=EPS**0.5, standardize=False, lmbda=lmbda, weight=state["1.weight"], bias=state["1.bias"]
    )
    return y, {f"0.{name}": value for name, value in kept.items()}


def batch_norm_eq_49(state: State, x: Array, training: bool) -> tuple[Array, dict[str, Array]]:
    """y = γ/√(Var + ε)·x + (β − γ·E/√(Var + ε)), with Var = m/(m − 1)·E_B[σ²_B] and E = E_B[μ_B] (BN eq. 47–49)."""
    count, batches = x.size / x.shape[1], int(state["num_batches_tracked"])
    if training:
        mean, variance = x.mean(axis=batch_axes(x)), x.var(axis=batch_axes(x))
        kept = {
            "running_mean": (state["running_mean"] * batches + mean) / (batches + 1),
            "running_var": (state["running_var"] * batches + variance * count / (count - 1)) / (batches + 1),
        }
    else:
        mean, variance, kept = state["running_mean"], state["running_var"], {}
    scale = state["weight"] / np.sqrt(variance + EPS)
    return per_channel(scale, x) * x + per_channel(state["bias"] - scale * mean, x), kept


# --- networks ---


def convolutional(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(4)) -> nn.Sequential:
    """For 8×8 images in ten classes: four channels, so that every case fits."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        norm(),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        norm(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 10),
    )


def grouped() -> nn.Sequential:
    return convolutional(lambda: nn.GroupNorm(2, 4))


def swapped(to: Any, network: Callable[[], nn.Module] = convolutional, **options: Any) -> Callable[[], nn.Module]:
    return lambda: layers.convert_norm(network(), to, **options)


def normal_on_bmlv(**options: Any) -> nn.Module:
    return nn.Sequential(
        layers.BMLV(4, affine=False, **options),
        layers.BatchNormalNorm2d(4, standardize=False, noise_train=0.0, **options),
    )


def standardized(**options: Any) -> nn.Module:
    conv = nn.Conv2d(4, 4, 3, **options)
    parametrize.register_parametrization(conv, "weight", layers.WeightStandardization())
    return conv


def proxied(**options: Any) -> nn.Module:
    return layers.ProxyNorm(nn.GroupNorm(2, 4, **options), nn.ReLU())


IMAGE = (3, 4, 5, 3)
CASES: dict[str, Case] = {
    "FilterResponseNorm": Case(
        lambda **options: layers.FilterResponseNorm(4, learnable_eps=True, **options),
        IMAGE,
        filter_response,
        swapped(layers.FilterResponseNorm),
    ),
    "EvoNormS0": Case(
        lambda **options: layers.EvoNormS0(4, 2, **options), IMAGE, evo_norm_s0, swapped(layers.EvoNormS0, num_groups=2)
    ),
    "BMLV": Case(lambda **options: layers.BMLV(4, **options), IMAGE, bmlv, swapped(layers.BMLV)),
    "LMBV": Case(lambda **options: layers.LMBV(4, **options), IMAGE, lmbv, swapped(layers.LMBV)),
    "RegNorm": Case(lambda **options: layers.RegNorm(4, **options), IMAGE, reg_norm, swapped(layers.RegNorm)),
    "PreLayerNorm": Case(
        lambda **options: layers.PreLayerNorm(nn.Linear(5, 4, bias=False, **options)),
        (3, 2, 5),
        pre_layer_norm,
        swapped(layers.PreLayerNorm),
    ),
    "PreRegNorm": Case(
        lambda **options: layers.PreRegNorm(nn.Conv2d(3, 4, 3, padding=1, bias=False, **options)),
        (3, 3, 5, 3),
        pre_layer_norm_conv,
        swapped(layers.PreRegNorm),
    ),
    "ProxyNorm": Case(proxied, IMAGE, proxy_norm, swapped(layers.ProxyNorm, grouped)),
    "WeightStandardization": Case(
        standardized, (3, 4, 5, 4), standardized_conv, swapped(layers.WeightStandardization, grouped)
    ),
    "SwitchableNorm": Case(
        lambda **options: layers.SwitchableNorm(4, **options), IMAGE, switchable, swapped(layers.SwitchableNorm)
    ),
    "DecorrelatedBatchNorm1d": Case(
        lambda **options: layers.DecorrelatedBatchNorm1d(4, 2, **options),
        (17, 4),
        decorrelated,
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), layers.DecorrelatedBatchNorm1d(4, 2), nn.Linear(4, 10)),
    ),
    "DecorrelatedBatchNorm2d": Case(
        lambda **options: layers.DecorrelatedBatchNorm2d(4, 2, running="covariance", **options),
        IMAGE,
        decorrelated,
        swapped(layers.DecorrelatedBatchNorm2d, num_groups=2, running="covariance"),
    ),
    "DecorrelatedBatchNormalNorm2d": Case(
        lambda **options: layers.DecorrelatedBatchNormalNorm2d(4, 2, noise_train=0.0, **options),
        IMAGE,
        decorrelated_normal,
        swapped(layers.DecorrelatedBatchNormalNorm2d, num_groups=2),
    ),
    "BMLV, BatchNormalNorm2d": Case(normal_on_bmlv, IMAGE, on_top, lambda: convolutional(normal_on_bmlv)),
    "BatchNorm2d, cumulative": Case(
        lambda **options: nn.BatchNorm2d(4, momentum=None, **options),
        IMAGE,
        batch_norm_eq_49,
        lambda: convolutional(lambda: nn.BatchNorm2d(4, momentum=None)),
    ),
}


def make(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """The layer with random parameters and running statistics, and an input of it."""
    case = CASES[name]
    layer = case.make(**options)
    with torch.no_grad():
        for key, value in layer.state_dict().items():
            if key.endswith(("running_whitening", "running_covariance")):
                root = torch.randn_like(value)
                value.copy_(root @ root.mT + 0.5 * torch.eye(value.shape[-1]))
            elif key.endswith(("running_var", "running_lmbda")):
                value.uniform_(0.5, 1.8)
            elif value.is_floating_point():
                value.normal_()
    return layer, torch.randn(case.shape, dtype=options.get("dtype") or torch.float32)


def state_of(layer: nn.Module) -> dict[str, Array]:
    return {name: value.detach().numpy().astype(np.float64) for name, value in layer.state_dict().items()}


def nodes(model: nn.Module, images: Tensor, path: Path) -> Counter[str]:
    """Operators of the exported graph, counted."""
    graph = onnx.load(export(model, images[:3], path).path).graph
    return Counter(node.op_type for node in graph.node)

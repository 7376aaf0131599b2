"""Recognizes the normalization of torch.nn that a layer of the user computes, by running the layer.

Libraries have their own norms: subclasses that add an activation, layer norms over the channels of a map, norms with
frozen statistics. Neither their names nor their base classes say what they compute. A copy of the layer in float64,
with random parameters and statistics, runs on small inputs. The candidates are computed with torch's own functions,
followed by the layer's submodules. The first candidate with the same results is the answer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

Kind = Literal["batch", "instance", "layer", "channels", "group", "rms"]

_STATISTICS = ("running_mean", "running_var")
# Allowed differences in shares of the greatest value. Some layers compute in float32 whatever the input.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_MOMENTUM_TOLERANCE = 1e-4
_LARGEST_EPSILON = 0.1
# Candidates for a layer whose code has ε as a constant. The last one is nn.RMSNorm's own.
_USUAL_EPSILONS = (1e-5, 1e-6, 1e-3, 1e-12, torch.finfo(torch.float32).eps)
_RUNNING_VARIANCE = 1e-4  # small, so that the usual ε change the results
_SPATIAL_SIZES = ((3, 4), (), (5,), (2, 3, 2))  # the axes after the channels, the likeliest first


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """A normalization y = tail(norm(x)·weight + bias).

    Attributes:
        kind: the kind of the norm; ``channels`` is a layer norm over axis 1 of [N, C, *spatial].
        epsilon: ε, added to the variance, or to the mean square of ``rms``.
        shape: the shape of the parameters: the channels, or the normalized shape.
        spatial: the numbers of axes after the channels that a batch or instance norm accepts, the likeliest first.
        groups: the number of groups of a group norm.
        weight, bias: the names of these tensors in the layer; None without one.
        weight_offset: added to the weight of ``rms``: 1 in Gemma's networks.
        tail: the names of the submodules after the norm.
        is_frozen: whether a batch norm uses its running statistics in training too.
        momentum: m of the running statistics of a batch norm, new = m·batch + (1 − m)·old; None for the cumulative
            average.
        moves_otherwise: whether the running mean is not updated with a constant m; ``momentum`` is then the layer's
            attribute.
    """

    kind: Kind
    epsilon: float
    shape: tuple[int, ...]
    spatial: tuple[int, ...] = ()
    groups: int = 1
    weight: str | None = None
    bias: str | None = None
    weight_offset: float = 0.0
    tail: tuple[str, ...] = ()
    is_frozen: bool = False
    momentum: float | None = 0.1
    moves_otherwise: bool = False

    def compute(self, layer: nn.Module, x: Tensor, training: bool) -> Tensor:
        """The output of this normalization for ``x``, with the tensors and submodules of ``layer``."""
        y = self._norm(layer, x, training and not self.is_frozen)
        for name in self.tail:
            y = layer.get_submodule(name)(y)
        return y

    def _norm(self, layer: nn.Module, x: Tensor, training: bool) -> Tensor:
        weight, bias = (
            None if name is None else getattr(layer, name).reshape(self.shape) for name in (self.weight, self.bias)
        )
        if self.kind == "layer":
            return F.layer_norm(x, self.shape, weight, bias, self.epsilon)
        if self.kind == "rms":
            scale = None if weight is None else weight + self.weight_offset
            return F.rms_norm(x, self.shape, scale, self.epsilon)
        if self.kind == "channels":
            return F.layer_norm(x.movedim(1, -1), self.shape, weight, bias, self.epsilon).movedim(-1, 1)
        if self.kind == "group":
            return F.group_norm(x, self.groups, weight, bias, self.epsilon)
        if self.kind == "instance":
            return F.instance_norm(x, None, None, weight, bias, use_input_stats=True, eps=self.epsilon)
        mean, variance = (getattr(layer, name, None) for name in _STATISTICS)
        if training:  # without the running statistics, which this call would update
            mean = variance = None
        return F.batch_norm(x, mean, variance, weight, bias, training=mean is None, eps=self.epsilon)


_TORCH_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)


def looks_like_norm(layer: nn.Module) -> bool:
    """Whether ``layer`` derives from a norm of torch.nn, or has "norm" in its class name and contains no linear maps.

    A layer that keeps a λ is a normality normalization already.
    """
    if isinstance(layer, torch.jit.ScriptModule):
        return False
    if any("lmbda" in name for name in (*layer._buffers, *layer._parameters, *vars(layer))):
        return False
    if isinstance(layer, _TORCH_NORMS):
        return True
    if "norm" not in type(layer).__name__.lower():
        return False
    inside = [tensor for child in layer.children() for tensor in child.parameters()]
    is_block = any(isinstance(tensor, UninitializedParameter) or tensor.dim() > 1 for tensor in inside)
    return not is_block and bool(layer._parameters or layer._buffers or not layer._modules)


class Recognizer:
    """:func:`recognize` for the layers of one model. Equal layers are recognized once."""

    def __init__(self) -> None:
        self._known: dict[object, Recognized | None] = {}

    def __call__(self, layer: nn.Module) -> Recognized | None:
        key = _kind_of(layer)
        if key not in self._known:
            self._known[key] = recognize(layer)
        return self._known[key]


def _kind_of(layer: nn.Module) -> object:
    """A key that is equal for layers with the same classes, settings and shapes, which compute the same function."""
    parts: list[object] = []
    for path, module in layer.named_modules():
        settings = {name: value for name, value in vars(module).items() if name not in _ATTRIBUTES_OF_MODULE}
        tensors = {**module._parameters, **module._buffers}
        shapes = [(name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in tensors.items()]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        # Values other than numbers and texts, functions for example, are compared by identity.
        known = [(name, value if isinstance(value, _BY_VALUE) else id(value)) for name, value in settings.items()]
        parts.append((path, type(module), tuple(shapes), tuple(known), id(module) if hooks else 0))
    return tuple(parts)


_BY_VALUE = (int, float, str, tuple, type(None))
_ATTRIBUTES_OF_MODULE = frozenset(vars(nn.Module()))


def recognize(layer: nn.Module) -> Recognized | None:
    """The norm of torch.nn, followed by the layer's submodules, that ``layer`` computes; None if there is none."""
    if isinstance(layer, nn.SyncBatchNorm):
        layer = _of_one_process(layer)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # Some layers convert the input to float32 and fail with parameters in float64.
        return next(filter(None, (_recognize_in(dtype, layer) for dtype in _TOLERANCE)), None)


def _recognize_in(dtype: torch.dtype, layer: nn.Module) -> Recognized | None:
    try:
        copied = _copy_with_random_tensors(layer, dtype)
    except Exception:  # the user's own code makes the copy and may raise any error: the layer is kept and reported
        return None
    fitting = (candidate for candidate in _candidates(layer) if _agrees(candidate, copied, dtype))
    found = next(fitting, None)
    if found is None or found.kind != "batch":
        return found
    # A layer may accept inputs of several ranks, and computes the same for each rank.
    of_norm = replace(found, spatial=())
    spatial = (*found.spatial, *(c.spatial[0] for c in fitting if replace(c, spatial=()) == of_norm))
    own = getattr(layer, "momentum", 0.1)
    found = replace(found, spatial=spatial, momentum=own if isinstance(own, (float, int, type(None))) else 0.1)
    return _with_momentum(found, layer, dtype)


def _with_momentum(found: Recognized, layer: nn.Module, dtype: torch.dtype) -> Recognized:
    """``found`` with the momentum measured on two batches, because a layer's attribute may be m, 1 − m or anything."""
    copied = _copy_with_random_tensors(layer, dtype).train()
    if getattr(copied, _STATISTICS[0], None) is None:
        return found
    *_, x = _inputs(found, dtype)
    steps = []
    for batch in (x + 4.0, x + 9.0):  # far from the running mean
        old = getattr(copied, _STATISTICS[0]).flatten().clone()
        copied(batch)
        mean = batch.transpose(0, 1).flatten(1).mean(1)
        steps.append((getattr(copied, _STATISTICS[0]).flatten() - old) / (mean - old))
    first, second = (float(step.mean()) for step in steps)
    is_even = all(float((step - step.mean()).abs().max()) <= _MOMENTUM_TOLERANCE for step in steps)
    if is_even and abs(first - 1.0) <= _MOMENTUM_TOLERANCE and abs(second - 0.5) <= _MOMENTUM_TOLERANCE:
        return replace(found, momentum=None)
    if not is_even or abs(first - second) > _MOMENTUM_TOLERANCE:
        return replace(found, moves_otherwise=True)
    if first == 0.0 or (found.momentum is not None and abs(first - found.momentum) <= _MOMENTUM_TOLERANCE * abs(first)):
        return found  # the statistics are frozen, or the attribute is m
    return replace(found, momentum=round(first, 6))


def _of_one_process(layer: nn.SyncBatchNorm) -> nn.Module:
    """``layer`` without communication, because the other processes do not run this code. A group cannot be copied."""
    alone = copy.copy(layer)
    alone.process_group = None
    # A subclass's call of SyncBatchNorm.forward by super() reaches the class after it in the order of bases.
    cls = type(layer)
    alone.__class__ = _AloneBatchNorm if cls is nn.SyncBatchNorm else type(cls.__name__, (cls, _AloneBatchNorm), {})
    return alone


class _AloneBatchNorm(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return _BatchNorm.forward(self, input)


def _copy_with_random_tensors(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU in ``dtype`` with random tensors, so that each tensor changes the results."""
    copied = copy.deepcopy(layer)
    is_meta = any(tensor.is_meta for tensor in _tensors(copied))
    copied = (copied.to_empty(device="cpu") if is_meta else copied.cpu()).to(dtype)
    generator = torch.Generator().manual_seed(0)
    named = {id(tensor): name for name, tensor in (*copied.named_parameters(), *copied.named_buffers())}
    for tensor in _tensors(copied):
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)  # positive, as a variance has to be
            tensor.mul_(_RUNNING_VARIANCE if named[id(tensor)].endswith(_STATISTICS[1]) else 1.0)
        else:
            tensor.zero_()
    return copied


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _candidates(layer: nn.Module) -> Iterator[Recognized]:
    """The normalizations that ``layer`` may compute, by its attributes and the shapes of its tensors."""
    own = {
        name: tensor
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if tensor is not None and tensor.is_floating_point()
    }
    small = [value for value in vars(layer).values() if type(value) is float and 0 <= value <= _LARGEST_EPSILON]
    own_epsilon = getattr(layer, "eps", None)
    epsilons = [own_epsilon, *small] if small or isinstance(own_epsilon, (float, int)) else _USUAL_EPSILONS
    affine = [name for name in own if name not in _STATISTICS]
    tails = [tuple(layer._modules)] if layer._modules else [()]
    for kind, shape, spatial, groups in _forms(layer, own):
        for epsilon, (weight, bias), tail in itertools.product(
            dict.fromkeys(value for value in epsilons if isinstance(value, (float, int))), _roles(affine), tails
        ):
            if any(name is not None and own[name].numel() != torch.Size(shape).numel() for name in (weight, bias)):
                continue
            if kind == "rms" and bias is not None:
                continue
            may_be_frozen = (False, True) if kind == "batch" and _STATISTICS[0] in own else (False,)
            offsets = (0.0, 1.0) if kind == "rms" and weight is not None else (0.0,)
            for is_frozen, offset in itertools.product(may_be_frozen, offsets):
                yield Recognized(
                    kind=kind, epsilon=epsilon, shape=shape, spatial=(spatial,), groups=groups,
                    weight=weight, bias=bias, weight_offset=offset, tail=tail, is_frozen=is_frozen,
                )  # fmt: skip


def _forms(layer: nn.Module, own: dict[str, Tensor]) -> Iterator[tuple[Kind, tuple[int, ...], int, int]]:
    """Yield (kind, shape of the parameters, spatial axes, groups)."""
    channels = _channels(layer, own)
    if isinstance(normalized := getattr(layer, "normalized_shape", None), Sequence):
        yield "layer", tuple(normalized), 0, 1
        yield "rms", tuple(normalized), 0, 1
    if not channels:
        return
    spatial = [len(axes) for axes in _SPATIAL_SIZES if _takes(layer, len(axes))]
    if _STATISTICS[0] in own or isinstance(layer, _BatchNorm):
        yield from (("batch", (channels,), axes, 1) for axes in spatial)
        return
    if isinstance(layer, _InstanceNorm):
        yield from (("instance", (channels,), axes, 1) for axes in spatial if axes)
        return
    groups = getattr(layer, "num_groups", None)
    if isinstance(groups, int) and groups > 0 and channels % groups == 0:
        yield "group", (channels,), 2, groups
        return
    yield "layer", (channels,), 0, 1
    yield "channels", (channels,), 2, 1
    yield "group", (channels,), 2, 1
    yield "rms", (channels,), 0, 1


def _channels(layer: nn.Module, own: dict[str, Tensor]) -> int:
    """The number of channels; 0 if the layer's tensors have no size or several sizes."""
    sizes = {tensor.numel() for tensor in own.values()}
    if not sizes:
        names = ("num_features", "num_channels")
        sizes = {size for name in names if isinstance(size := getattr(layer, name, None), int)}
    return sizes.pop() if len(sizes) == 1 else 0


def _takes(layer: nn.Module, spatial: int) -> bool:
    """Whether the base class of ``layer`` in torch.nn, if it has one, accepts this number of spatial axes."""
    ranks: dict[type[nn.Module], tuple[int, ...]] = {
        nn.BatchNorm1d: (0, 1), nn.BatchNorm2d: (2,), nn.BatchNorm3d: (3,),
        nn.InstanceNorm1d: (1,), nn.InstanceNorm2d: (2,), nn.InstanceNorm3d: (3,),
    }  # fmt: skip
    return next((spatial in axes for cls, axes in ranks.items() if isinstance(layer, cls)), True)


def _roles(names: list[str]) -> list[tuple[str | None, str | None]]:
    """The possible (weight, bias) among the tensors ``names``, the usual names first."""
    if not names:
        return [(None, None)]
    if len(names) == 1:
        return [(names[0], None), (None, names[0])]
    if len(names) == 2:
        ordered = sorted(names, key=lambda name: "bias" in name or "beta" in name)
        return [(ordered[0], ordered[1]), (ordered[1], ordered[0])]
    return []


def _agrees(candidate: Recognized, copied: nn.Module, dtype: torch.dtype) -> bool:
    """Whether ``copied`` and ``candidate`` give the same results, in both modes."""
    for x in _inputs(candidate, dtype):
        for training in (False, True):
            try:
                copied.train(training)
                actual = copied(x.clone())  # training may update the running statistics, which training does not read
                again = copied(x.clone()) if training else actual
                expected = candidate.compute(copied, x.clone(), training)
            except Exception:  # the layer's own code may raise any error, or refuse the shape
                return False
            if not isinstance(actual, Tensor) or actual.shape != expected.shape:
                return False
            if training and not torch.equal(actual, again):
                continue  # dropout: only the results in eval mode are compared
            if not bool((actual - expected).abs().max() <= _TOLERANCE[dtype] * expected.abs().max()):
                return False
    return True


def _inputs(candidate: Recognized, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of the shapes that the layer must accept, in scales at which ε changes the results."""
    if candidate.kind in ("layer", "rms"):
        shapes: list[tuple[int, ...]] = [(3, *candidate.shape), (2, 3, *candidate.shape)]
    else:
        shapes = [(2, *candidate.shape, *next(axes for axes in _SPATIAL_SIZES if len(axes) == candidate.spatial[0]))]
    generator = torch.Generator().manual_seed(1)
    scales = (candidate.epsilon**0.5, 1.0)
    return [
        (torch.randn(shape, dtype=torch.float64, generator=generator) * scale + 0.5 * scale).to(dtype)
        for shape, scale in itertools.product(shapes, scales)
    ]

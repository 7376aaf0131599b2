r"""y = (ψ(h; λ̂) + z·ξ·s̄)·weight + bias of a training layer as one operator, with its gradient (NN eq. 2–15).

    y, statistics, seed = torch.ops.nnorm_export.normal_norm(x, weight, bias, …)

autograd, ``torch.compile``, ``torch.fx`` and AMP see one node. It keeps x, the weight and a few numbers of each sample
set for the backward pass; the formulas keep ten tensors of x's shape. ``docs/how_it_works.md`` derives the gradient.

The operator runs on CPUs, by the kernels of :mod:`.library`. The kernels draw the noise from a seed, which comes from
PyTorch's generator, so that ``torch.manual_seed`` reproduces it; the backward pass draws the noise again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nnorm_export.layers.fused import library
from nnorm_export.mathematics import gaussianize, mean_absolute_deviation, standardize_over

_HALVES = (torch.float16, torch.bfloat16)
_GREATEST_SEED = 2**63 - 1
_CACHE_LINE = 64  # in bytes
_SIZES = 3  # the settings that are sizes
_TENSORS = (Tensor, nn.Parameter, FakeTensor)
# PyTorch 2.6 does not tell whether it exports, and has no tags here: its compiled graphs have the formulas' operators.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
_HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_SEEDED: dict[str, Any] = {"tags": (torch.Tag.nondeterministic_seeded,)} if _HAS_TAGS else {}


class Settings(NamedTuple):
    """The arguments of the operator after x, weight and bias.

    Attributes:
        length: the number n of elements of a sample set, which is a row; 0 if the channels of axis 1 are the sets.
        period, run: rows after which the weights repeat, and neighboring elements that share one weight; unused if
            the channels are the sets.
        eps, delta, order, alpha: see :func:`nnorm_export.mathematics.newton_step`.
        standardize: False for h = x.
        least, greatest: the range of λ̂; infinite for none.
        noise: ξ; 0 for none.
        deviation: whether s̄ is computed although there is no noise.
    """

    length: int
    period: int
    run: int
    eps: float
    delta: float
    order: int = 2
    alpha: float = 1.0
    standardize: bool = True
    least: float = -math.inf
    greatest: float = math.inf
    noise: float = 0.0
    deviation: bool = False

    @property
    def lmbda_range(self) -> tuple[float, float] | None:
        return (self.least, self.greatest) if math.isfinite(self.least) else None


def can_run(x: Tensor) -> bool:
    """Whether the operator takes ``x``: on the CPU, and outside of transforms that need the formulas."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64, *_HALVES) or not _is_available():
        return False
    # Other classes of tensors, as DTensor, know the operators of PyTorch alone. The parameters may be transformed
    # although x is not.
    if type(x) not in _TENSORS or torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():  # a program for other runtimes has the formulas' operators
        return not _is_exporting()
    return not (torch.jit.is_tracing() or torch.autograd.forward_ad._current_level >= 0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not annotate it
def _is_available() -> bool:
    return library.is_available()


class _Layout(NamedTuple):
    """The members of the problem that say where a sample set is."""

    sets: int
    segments: int
    segment_length: int
    set_stride: int
    segment_stride: int
    element_stride: int
    period: int
    run: int
    parts: int

    @property
    def weights(self) -> int:
        return self.period * (self.segments * self.segment_length // self.run)


def _layout(x: Tensor, settings: Settings) -> _Layout:
    n = settings.length
    if n:
        sets = x.numel() // n
        return _Layout(sets, 1, n, n, 0, 1, settings.period, settings.run, min(sets, library.MOST_PARTS))
    samples, channels, extent = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    length = samples * extent
    if _has_channels_last(x):
        # The kernels read a cache line of channels at a time, so that more parts than lines or threads only cost time.
        parts = max(-(-channels * x.element_size() // _CACHE_LINE), min(channels, torch.get_num_threads()))
        return _Layout(channels, 1, length, 1, 0, channels, channels, length, min(parts, library.MOST_PARTS))
    parts = min(channels, library.MOST_PARTS)
    return _Layout(channels, samples, extent, extent, channels * extent, 1, channels, length, parts)


def _has_channels_last(x: Tensor) -> bool:
    """Whether the channels of an element lie side by side: [N, C], or a map whose channels are last."""
    return x.movedim(1, -1).is_contiguous()


def _for_kernel(x: Tensor, settings: Settings) -> Tensor:
    """``x`` in the kernels' arithmetic and in a layout that they read."""
    x = x.float() if x.dtype in _HALVES else x
    return x if not settings.length and _has_channels_last(x) else x.contiguous()


def _laid_out_like(like: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype and the layout that ``torch.empty_like(like)`` has."""
    result = torch.empty_like(like)
    is_same = tensor.dtype == result.dtype and tensor.stride() == result.stride()
    return tensor if is_same else result.copy_(tensor)


def _problem(layout: _Layout, settings: Settings, seed: Tensor, **tensors: Tensor | None) -> library.Problem:
    fields: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    problem = library.Problem(
        **fields,
        **layout._asdict(),
        epsilon=settings.eps,
        delta=settings.delta,
        alpha=settings.alpha,
        least_lmbda=settings.least,
        greatest_lmbda=settings.greatest,
        noise=settings.noise,
        seed=int(seed) if settings.noise else 0,
        order=settings.order,
        standardizes=settings.standardize,
        has_range=settings.lmbda_range is not None,
        computes_deviation=settings.deviation or settings.noise != 0,
    )
    problem.tensors = tuple(tensor for tensor in tensors.values() if tensor is not None)
    return problem


def _parameter(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype).contiguous()


def _require_parameters(x: Tensor, parameters: Sequence[Tensor | None], number: int) -> None:
    for parameter in parameters:  # of which the kernels read `number` elements
        if parameter is not None and (parameter.device != x.device or parameter.numel() != number):
            raise RuntimeError(
                f"weight and bias must have {number} elements on the device of the input, {x.device}, "
                f"got {parameter.numel()} on {parameter.device}"
            )


@torch.library.custom_op("nnorm_export::normal_norm", mutates_args=(), **_SEEDED)
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    length: int,
    period: int,
    run: int,
    eps: float,
    delta: float,
    order: int,
    alpha: float,
    standardize: bool,
    least: float,
    greatest: float,
    noise: float,
    deviation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(length, period, run, eps, delta, order, alpha, standardize, least, greatest, noise, deviation)
    of_kernel = _for_kernel(x, settings)
    layout = _layout(of_kernel, settings)
    _require_parameters(x, (weight, bias), layout.weights)
    y = torch.empty_like(of_kernel)
    statistics = y.new_empty((library.STATISTICS, layout.sets))
    seed = torch.randint(_GREATEST_SEED, ()) if noise else torch.tensor(0)
    tensors = {
        "x": of_kernel,
        "weight": _parameter(weight, of_kernel),
        "bias": _parameter(bias, of_kernel),
        "y": y,
        "statistics": statistics,
    }
    library.run(_problem(layout, settings, seed, **tensors), y.dtype, library.Pass.FORWARD)
    return _laid_out_like(x, y), statistics, seed


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, length: int, period: int, run: int, *settings: Any
) -> tuple[Tensor, ...]:
    _require_parameters(x, (weight, bias), period * (length // run) if length else x.shape[1])
    sets = x.numel() // length if length else x.shape[1]
    dtype = torch.float32 if x.dtype in _HALVES else x.dtype
    return torch.empty_like(x), x.new_empty((library.STATISTICS, sets), dtype=dtype), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("nnorm_export::normal_norm_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    seed: Tensor,
    sizes: Sequence[int],
    settings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    of = _settings(sizes, settings)
    of_kernel = _for_kernel(x, of)
    layout = _layout(of_kernel, of)
    _require_parameters(x, (weight,), layout.weights)
    gradient_x = torch.empty_like(of_kernel)
    parts = layout.parts if layout.sets > layout.period else 1
    of_weight, of_bias = of_kernel.new_zeros((2, parts, layout.weights))
    tensors = {
        "x": of_kernel,
        "weight": _parameter(weight, of_kernel),
        "statistics": statistics,
        "gradient": _laid_out_like(of_kernel, gradient),
        "gradient_x": gradient_x,
        "gradient_weight": of_weight,
        "gradient_bias": of_bias,
    }
    library.run(_problem(layout, of, seed, **tensors), gradient_x.dtype, library.Pass.BACKWARD)
    return _laid_out_like(x, gradient_x), of_weight.sum(0), of_bias.sum(0)


@_backward.register_fake
def _(gradient: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, statistics, _, (length, period, run), _ = others
    weights = period * (length // run) if length else x.shape[1]
    return torch.empty_like(x), statistics.new_empty(weights), statistics.new_empty(weights)


def _settings(sizes: Sequence[int], numbers: Sequence[float]) -> Settings:
    """The settings from the lists that the operator of the backward pass takes."""
    types = (type(value) for value in Settings(0, 0, 0, 0.0, 0.0)[_SIZES:])
    return Settings._make([*sizes, *(of(number) for of, number in zip(types, numbers, strict=True))])


def noise_of(x: Tensor, settings: Settings, seed: Tensor) -> Tensor | None:
    """z, as the kernels add it to ψ(h) of ``x``; None without noise."""
    if settings.noise == 0:
        return None
    z: Tensor = _noise(x, seed, settings[:_SIZES])
    return z


@torch.library.custom_op("nnorm_export::normal_norm_noise", mutates_args=())
def _noise(x: Tensor, seed: Tensor, sizes: Sequence[int]) -> Tensor:
    """An operator, because second derivatives are traced too."""
    length, period, run = sizes
    settings = Settings(length, period, run, 0.0, 0.0, noise=1.0)
    z = torch.empty_like(_for_kernel(x, settings))
    library.run(_problem(_layout(z, settings), settings, seed, y=z), z.dtype, library.Pass.NOISE)
    return _laid_out_like(x, z)


@_noise.register_fake
def _(x: Tensor, seed: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *settings = inputs
    _, statistics, seed = output
    ctx.save_for_backward(x, weight, statistics, seed)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.sizes = settings[:_SIZES]  # may be symbols of torch.compile
    ctx.settings = [float(value) for value in settings[_SIZES:]]
    ctx.mark_non_differentiable(statistics, seed)


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, statistics, seed = ctx.saved_tensors
    of_x, of_weight, of_bias = _backward(gradient, x, weight, statistics, seed, ctx.sizes, ctx.settings)
    shaped_weight = None if weight is None else of_weight.reshape(weight.shape).to(weight.dtype)
    shaped_bias = None if ctx.bias_shape is None else of_bias.reshape(ctx.bias_shape).to(ctx.bias_dtype)
    return of_x, shaped_weight, shaped_bias, *([None] * len(Settings._fields))


_forward.register_autograd(_differentiate, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gradient, x, weight, _, seed, ctx.sizes, ctx.settings = inputs
    ctx.save_for_backward(gradient, x, weight, seed)


def _differentiate_twice(ctx: Any, *of_gradients: Tensor) -> tuple[Tensor | None, ...]:
    """By the formulas, because second derivatives are rare."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, because the gradient of y may depend on x. They lead third derivatives on to the tensors.
        tensors = [None if tensor is None else _alias(tensor) for tensor in ctx.saved_tensors[:3]]
    gradient, x, weight = tensors
    assert gradient is not None
    assert x is not None
    of = _settings(ctx.sizes, ctx.settings)
    with torch.enable_grad():
        ones = weight if weight is not None else x.new_ones(_layout(x, of).weights)
        zeros = torch.zeros_like(ones, requires_grad=True)
        ones = ones if weight is not None else ones.requires_grad_()
        y = formula(x, ones, zeros, of, noise_of(x.detach(), of, ctx.saved_tensors[3]))
        first = torch.autograd.grad(y, (x, ones, zeros), gradient, create_graph=True)
        first = tuple(each.reshape(of_each.shape) for each, of_each in zip(first, of_gradients, strict=True))
        wanted = [tensor for tensor in (gradient, x, weight) if tensor is not None]
        second = iter(torch.autograd.grad(first, wanted, of_gradients, allow_unused=True, create_graph=create_graph))
    results = [None if tensor is None else next(second) for tensor in tensors]
    return *results, None, None, None, None


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


_backward.register_autograd(_differentiate_twice, setup_context=_save_backward)


def formula(x: Tensor, weight: Tensor, bias: Tensor, settings: Settings, z: Tensor | None) -> Tensor:
    """The operator by :mod:`nnorm_export.mathematics`, for second derivatives, and for tests."""
    by_set = _by_set(x, settings)
    wide = by_set.float() if x.dtype in _HALVES else by_set
    dim = [2, 3]
    h = standardize_over(wide, dim, settings.eps) if settings.standardize else wide
    y, _ = gaussianize(h, dim, settings.delta, settings.order, settings.alpha, settings.lmbda_range)
    if z is not None:
        y = y + _by_set(z, settings) * mean_absolute_deviation(y, dim) * settings.noise
    shape = (by_set.shape[1], by_set.shape[2], 1)
    y = y * weight.reshape(shape) + bias.reshape(shape)
    if settings.length:
        return y.reshape(x.shape).to(x.dtype)
    return y.reshape(x.movedim(1, 0).shape).movedim(0, 1).to(x.dtype)


def _by_set(x: Tensor, settings: Settings) -> Tensor:
    """[rows, period, weights of a set, elements of a weight]."""
    if settings.length:
        return x.reshape(-1, settings.period, settings.length // settings.run, settings.run)
    return x.movedim(1, 0).reshape(1, x.shape[1], 1, -1)


def normal_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """Returns y and the statistics of the sample sets; :mod:`.library` names the rows of these."""
    y, statistics, _ = _forward(x, weight, bias, *settings)
    return y, statistics

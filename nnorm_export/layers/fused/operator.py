r"""y = (ψ(h; λ̂) + z·ξ·s̄)·weight + bias of a training layer as one operator, with its gradient (NN eq. 2–15).

    y, statistics, seed = torch.ops.nnorm_export.normal_norm(x, weight, bias, sizes, numbers)

autograd, ``torch.compile``, ``torch.fx`` and AMP see one node. It keeps x, the weight and a few numbers of each sample
set for the backward pass; the formulas keep ten tensors of x's shape. ``docs/how_it_works.md`` derives the gradient.

:mod:`.cpu` and :mod:`.gpu` have the kernels. These draw the noise from a seed, which comes from PyTorch's generator of
the device, so that ``torch.manual_seed`` reproduces it; the backward pass draws the noise again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nnorm_export.layers.fused import cpu, gpu
from nnorm_export.layers.fused.formulas import by_formulas
from nnorm_export.layers.fused.settings import (
    HALVES,
    STATISTICS,
    Settings,
    arithmetic_of,
    lists_of,
    sets_of,
    settings_of,
    settings_of_sizes,
    weights_of,
)
from nnorm_export.layers.fused.trial import passes_trial

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_GREATEST_SEED = 2**63 - 1
_TENSORS = (Tensor, nn.Parameter, FakeTensor)
_DTYPES = (torch.float32, torch.float64, *HALVES)
# PyTorch 2.6 does not tell whether it exports, and has no tags here: its compiled graphs have the formulas' operators.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
_HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters


def _operator(name: str, *tags: torch.Tag) -> Callable[[Callable[..., object]], CustomOpDef]:
    """An operator for all layouts: the compiler lays maps out for convolutions, and copies none for this operator."""
    tagged: dict[str, Any] = {"tags": (torch.Tag.flexible_layout, *tags)} if _HAS_TAGS else {}
    return torch.library.custom_op(f"nnorm_export::{name}", mutates_args=(), **tagged)


# The modules with the kernels for each type of device; AMD's GPUs are "cuda" too.
KERNELS = {"cpu": cpu, "cuda": gpu}


def can_run(x: Tensor) -> bool:
    """Whether the operator takes ``x``: no transform needs the formulas, and there are kernels for it."""
    # Other classes of tensors, as DTensor, know the operators of PyTorch alone. The parameters may be transformed
    # although x is not.
    if x.dtype not in _DTYPES or type(x) not in _TENSORS or torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():
        if _is_exporting():  # a program for other runtimes has the formulas' operators
            return False
    elif torch.jit.is_tracing() or torch.autograd.forward_ad._current_level >= 0:
        return False
    has_kernels: bool = _has_kernels(x.device.type, x.device.index)
    return has_kernels


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not annotate it
def _has_kernels(device_type: str, index: int | None) -> bool:
    kernels = KERNELS.get(device_type)
    if kernels is None or not kernels.is_available():
        return False
    # Those for CPUs are tested for each set of instructions.
    return kernels is cpu or passes_trial(kernels, torch.device(device_type, index or 0))


def _require_parameters(x: Tensor, parameters: Sequence[Tensor | None], number: int) -> None:
    for parameter in parameters:  # of which the kernels read `number` elements
        if parameter is not None and (parameter.device != x.device or parameter.numel() != number):
            raise RuntimeError(
                f"weight and bias must have {number} elements on the device of the input, {x.device}, "
                f"got {parameter.numel()} on {parameter.device}"
            )


@_operator("normal_norm", torch.Tag.nondeterministic_seeded)
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sizes: Sequence[int],
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    settings = settings_of(sizes, numbers)
    _require_parameters(x, (weight, bias), weights_of(x, settings))
    seed = torch.randint(_GREATEST_SEED, (), device=x.device) if settings.noise else x.new_zeros((), dtype=torch.int64)
    y, statistics = KERNELS[x.device.type].forward(x, weight, bias, seed, settings)
    return y, statistics, seed


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: Sequence[int], _: Sequence[float]
) -> tuple[Tensor, ...]:
    settings = settings_of_sizes(sizes)
    _require_parameters(x, (weight, bias), weights_of(x, settings))
    statistics = x.new_empty((STATISTICS, sets_of(x, settings)), dtype=arithmetic_of(x.dtype))
    return torch.empty_like(x), statistics, x.new_empty((), dtype=torch.int64)


@_operator("normal_norm_backward")
def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    seed: Tensor,
    sizes: Sequence[int],
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    of = settings_of(sizes, numbers)
    _require_parameters(x, (weight,), weights_of(x, of))
    of_x, of_weight, of_bias = KERNELS[x.device.type].backward(gradient, x, weight, statistics, seed, of)
    return of_x, of_weight, of_bias


@_backward.register_fake
def _(gradient: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, statistics, _, sizes, _ = others
    weights = weights_of(x, settings_of_sizes(sizes))
    return torch.empty_like(x), statistics.new_empty(weights), statistics.new_empty(weights)


def noise_of(x: Tensor, settings: Settings, seed: Tensor) -> Tensor | None:
    """z, as the kernels add it to ψ(h) of ``x``; None without noise."""
    if settings.noise == 0:
        return None
    z: Tensor = _noise(x, seed, lists_of(settings)[0])
    return z


@_operator("normal_norm_noise")
def _noise(x: Tensor, seed: Tensor, sizes: Sequence[int]) -> Tensor:
    """An operator, because second derivatives are traced too."""
    z: Tensor = KERNELS[x.device.type].noise(x, seed, settings_of_sizes(sizes, noise=1.0))
    return z


@_noise.register_fake
def _(x: Tensor, seed: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.sizes, ctx.numbers = inputs
    _, statistics, seed = output
    ctx.save_for_backward(x, weight, statistics, seed)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.mark_non_differentiable(statistics, seed)


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, statistics, seed = ctx.saved_tensors
    of_x, of_weight, of_bias = _backward(gradient, x, weight, statistics, seed, ctx.sizes, ctx.numbers)
    shaped_weight = None if weight is None else of_weight.reshape(weight.shape).to(weight.dtype)
    shaped_bias = None if ctx.bias_shape is None else of_bias.reshape(ctx.bias_shape).to(ctx.bias_dtype)
    return of_x, shaped_weight, shaped_bias, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gradient, x, weight, _, seed, ctx.sizes, ctx.numbers = inputs
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
    of = settings_of(ctx.sizes, ctx.numbers)
    with torch.enable_grad():
        ones = weight if weight is not None else x.new_ones(weights_of(x, of))
        zeros = torch.zeros_like(ones, requires_grad=True)
        ones = ones if weight is not None else ones.requires_grad_()
        y = by_formulas(x, ones, zeros, of, noise_of(x.detach(), of, ctx.saved_tensors[3]))
        first = torch.autograd.grad(y, (x, ones, zeros), gradient, create_graph=True)
        first = tuple(each.reshape(of_each.shape) for each, of_each in zip(first, of_gradients, strict=True))
        wanted = [tensor for tensor in (gradient, x, weight) if tensor is not None]
        second = iter(torch.autograd.grad(first, wanted, of_gradients, allow_unused=True, create_graph=create_graph))
    results = [None if tensor is None else next(second) for tensor in tensors]
    return *results, None, None, None, None


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


_backward.register_autograd(_differentiate_twice, setup_context=_save_backward)


def normal_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """Returns y and the statistics of the sample sets; :mod:`.settings` names the rows of these."""
    y, statistics, _ = _forward(x, weight, bias, *lists_of(settings))
    return y, statistics

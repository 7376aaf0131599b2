"""Decorrelated batch normalization: whitening of groups of channels, with or without the power transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nnorm_export.layers._base import Variant
from nnorm_export.layers._running import RunningStatistics
from nnorm_export.layers.batch import BatchNormalNorm1d, BatchNormalNorm2d
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.related._standard import ChannelNorm, Kind, channels_of, settings_of
from nnorm_export.mathematics import in_dtype

Running = Literal["whitening", "covariance"]


class _InverseSquareRoot(torch.autograd.Function):
    """Σ ↦ Σ^(−1/2) for symmetric matrices, with a derivative that does not divide by differences of eigenvalues.

    Eigenvalues are clamped from below to ``least``, the damping ε, and to the rounding of the greatest eigenvalue.
    There is no second derivative, because the derivatives of the roots and vectors would divide by these differences.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(covariance: Tensor, least: float) -> tuple[Tensor, Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(covariance)
        rounding = torch.finfo(values.dtype).eps * values[..., -1:].abs()
        roots = torch.sqrt(torch.maximum(values, rounding.clamp(min=max(least, torch.finfo(values.dtype).tiny))))
        return (vectors / roots[..., None, :]) @ vectors.mT, roots, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, roots, vectors = output
        ctx.mark_non_differentiable(roots, vectors)
        ctx.save_for_backward(roots, vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        roots, vectors = ctx.saved_tensors
        rows, columns = roots[..., :, None], roots[..., None, :]
        # (f(a) − f(b))/(a − b) for f(a) = a^(−1/2), with √a and √b: Daleckii and Krein
        quotient = -1.0 / (rows * columns * (rows + columns))
        symmetric = 0.5 * (gradient + gradient.mT)
        inner: Tensor = vectors @ (quotient * (vectors.mT @ symmetric @ vectors)) @ vectors.mT
        return inner, None


def whitening_matrix(covariance: Tensor, epsilon: float, iterations: int | None) -> Tensor:
    """(Σ + ε·I)^(−1/2) by eigenvectors (ZCA), or by ``iterations`` Newton steps (IterNorm, algorithm 1)."""
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    covariance = covariance + epsilon * identity
    if iterations is None:
        # torch declares no type for Function.apply. It has the type of forward.
        inverse_square_root: Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]] = _InverseSquareRoot.apply
        return inverse_square_root(covariance, epsilon)[0]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    normalized = covariance / trace
    matrix = identity.expand_as(covariance)
    for _ in range(iterations):
        matrix = 1.5 * matrix - 0.5 * (matrix @ matrix @ matrix) @ normalized
    return matrix / torch.sqrt(trace)


class _DecorrelatedBatchNorm(RunningStatistics, ChannelNorm):
    r"""y = Σ^(−1/2)·(x − μ)·weight + bias with the covariance Σ of each group of channels.

    Huang et al., *Decorrelated Batch Normalization* (CVPR 2018), cited as DBN: ZCA whitening, with statistics of the
    batch in training and running statistics at inference. At inference the layer is a grouped 1×1 convolution.

    Args:
        num_features: the number C of channels.
        num_groups: the number of groups, which divides C; the channels of a group are whitened together.
        eps: ε, added to the diagonal of Σ.
        momentum: m of the running statistics; None for the cumulative average.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: False freezes the running statistics.
        running: ``"whitening"`` keeps the average of Σ^(−1/2), as DBN does, ``"covariance"`` that of Σ (unbiased).
        iterations: None for the eigenvectors of Σ, or the number of Newton steps (Huang et al., *Iterative
            Normalization*, CVPR 2019, use 5).

    State: ``running_mean`` [C] and ``running_whitening`` or ``running_covariance`` [groups, C/groups, C/groups].

    Raises:
        ValueError: wrong number of axes or channels; ``num_groups`` does not divide C; one value per channel in
            training.
    """

    _input_ndims: ClassVar[tuple[int, ...]]

    running_mean: Tensor

    def __init__(
        self,
        num_features: int,
        num_groups: int = 1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        running: Running = "whitening",
        iterations: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_groups < 1 or num_features % num_groups:
            raise ValueError(f"num_features ({num_features}) must be divisible by num_groups ({num_groups})")
        if running not in get_args(Running):
            raise ValueError(f"running must be 'whitening' or 'covariance', got {running!r}")
        super().__init__(num_features, eps, affine, device, dtype)
        self.num_groups = num_groups
        self.running = running
        self.iterations = iterations
        size = num_features // num_groups
        shapes = {"running_mean": (num_features,), f"running_{running}": (num_groups, size, size)}
        self._init_running_stats(shapes, momentum, track_running_stats, device, dtype)

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        matrix: Tensor = getattr(self, f"running_{self.running}")
        matrix.copy_(torch.eye(matrix.shape[-1], device=matrix.device))
        self.num_batches_tracked.zero_()

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in self._input_ndims:
            expected = " or ".join(f"{ndim}D" for ndim in self._input_ndims)
            raise ValueError(
                f"expected {expected} input (got {x.dim()}D input); reshape it, or use the layer for that rank"
            )
        super()._check_input(x)

    def _normalize(self, x: Tensor) -> Tensor:
        groups = x.transpose(0, 1).reshape(self.num_groups, self.num_features // self.num_groups, -1)
        if self.training and x.numel():
            mean = groups.mean(2, keepdim=True)
            centered = groups - mean
            covariance = centered @ centered.mT / groups.shape[2]
            whitening = whitening_matrix(covariance, self.eps, self.iterations)
            if self.track_running_stats:
                self._update(mean, covariance * (groups.shape[2] / (groups.shape[2] - 1)), whitening)
        else:
            centered = groups - self.running_mean.to(x.dtype).reshape(*groups.shape[:2], 1)
            # A copy: the gradient of x needs it, and a later batch changes the buffer in place.
            whitening = self.running_whitening_matrix(x.dtype).clone()
        y = (whitening @ centered).reshape(x.transpose(0, 1).shape).transpose(0, 1)
        return self._apply_affine(y, x.dim() - 2)

    @torch.no_grad()
    def _update(self, mean: Tensor, covariance: Tensor, whitening: Tensor) -> None:
        self._move("running_mean", mean)
        self._move(f"running_{self.running}", whitening if self.running == "whitening" else covariance)

    def running_whitening_matrix(self, dtype: torch.dtype) -> Tensor:
        """Σ^(−1/2) of each group at inference."""
        matrix: Tensor = getattr(self, f"running_{self.running}").to(dtype)
        return matrix if self.running == "whitening" else whitening_matrix(matrix, self.eps, self.iterations)

    def frozen(self) -> nn.Module:
        with torch.no_grad():
            matrix = self.running_whitening_matrix(torch.float64)
            mean = self._double("running_mean").reshape(*matrix.shape[:2], 1)
            bias = -(matrix @ mean).flatten()
            rows = matrix.flatten(0, 1)
            if self.weight is not None:
                rows, bias = rows * self._double("weight")[:, None], bias * self._double("weight")
            if self.bias is not None:
                bias = bias + self._double("bias")
        return FrozenWhitening({"weight": rows, "bias": bias}, self._arithmetic, self.num_groups)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, num_groups={self.num_groups}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, running={self.running!r}, iterations={self.iterations}"
        )


class DecorrelatedBatchNorm1d(_DecorrelatedBatchNorm):
    __doc__ = _DecorrelatedBatchNorm.__doc__
    _input_ndims = (2, 3)


class DecorrelatedBatchNorm2d(_DecorrelatedBatchNorm):
    __doc__ = _DecorrelatedBatchNorm.__doc__
    _input_ndims = (4,)


class FrozenWhitening(FrozenModule):
    """y = W·x + b with a matrix for each group of channels: a 1×1 convolution."""

    if TYPE_CHECKING:
        weight: Tensor  # [C, C/groups]
        bias: Tensor

    def __init__(self, tensors: dict[str, Tensor | None], arithmetic: torch.dtype, num_groups: int) -> None:
        super().__init__(tensors, arithmetic)
        self.num_groups = num_groups
        self.is_folded = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_folded:
            return x
        values = in_dtype(x, self.weight.dtype)
        kernel = self.weight.unsqueeze(2)
        if x.dim() == 4:
            y = nn.functional.conv2d(values, kernel.unsqueeze(3), self.bias, groups=self.num_groups)
        elif x.dim() == 3:
            y = nn.functional.conv1d(values, kernel, self.bias, groups=self.num_groups)
        else:
            y = nn.functional.conv1d(values.unsqueeze(2), kernel, self.bias, groups=self.num_groups).squeeze(2)
        return in_dtype(y, x.dtype)

    def fold_into(self, linear: nn.Module) -> bool:
        """Fold this layer into the convolution or linear map before it: W·(V·x + c) + b.

        Returns:
            False if it cannot be folded, because the channels of a group come from several groups of the convolution.
        """
        weight, bias = linear.weight, linear.bias
        assert isinstance(weight, nn.Parameter)
        size = self.weight.shape[1]
        if (weight.shape[0] // int(getattr(linear, "groups", 1))) % size:
            return False
        matrix = self.weight.double().view(self.num_groups, size, size)
        rows = matrix @ weight.double().view(self.num_groups, size, -1)
        shift = self.bias.double()
        if isinstance(bias, Tensor):
            shift = shift + (matrix @ bias.double().view(self.num_groups, size, 1)).flatten()
        linear.weight = nn.Parameter(rows.view_as(weight).to(weight.dtype), requires_grad=False)
        linear.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
        self.is_folded = True
        return True


class _DecorrelatedBatchNormalNorm(nn.Module):
    r"""y = ψ(Σ^(−1/2)·(x − μ); λ)·weight + bias: whitening instead of the standardization (NN; DBN).

    Two layers: ``whiten``, without affine, and ``gaussianize``, a BatchNormalNorm without standardization. Frozen they
    are a grouped 1×1 convolution and the operator BatchNormalNorm.

    Args:
        num_features, num_groups, running, iterations: see :class:`DecorrelatedBatchNorm2d`.
        eps, momentum, affine, noise_train, order, alpha, variant, lmbda_range: see :class:`BatchNormalNorm2d`; ε is
            that of both layers.
    """

    replaces: ClassVar[tuple[Kind, ...]] = ("norm",)
    _whiten: ClassVar[type[_DecorrelatedBatchNorm]]
    _gaussianize: ClassVar[type[BatchNormalNorm1d | BatchNormalNorm2d]]

    def __init__(
        self,
        num_features: int,
        num_groups: int = 1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        noise_train: float = 0.4,
        order: int = 2,
        alpha: float = 1.0,
        running: Running = "whitening",
        iterations: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant = "reference",
        lmbda_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"eps": eps, "momentum": momentum, "device": device, "dtype": dtype}
        self.num_features = num_features
        self.whiten = self._whiten(
            num_features, num_groups, affine=False, running=running, iterations=iterations, **where
        )
        self.gaussianize = self._gaussianize(
            num_features,
            order,
            alpha,
            standardize=False,
            affine=affine,
            noise_train=noise_train,
            variant=variant,
            lmbda_range=lmbda_range,
            **where,
        )

    @classmethod
    def counterpart(cls, replaced: Sequence[nn.Module], **options: Any) -> nn.Module:
        return cls(channels_of(replaced[0]), **{**settings_of(replaced[0], "eps", "momentum"), **options})

    def reset_parameters(self) -> None:
        """Set the parameters and statistics of both layers to those of new ones."""
        self.whiten.reset_parameters()
        self.gaussianize.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Whiten, transform and scale ``x``; shape and dtype of the output are those of the input."""
        y: Tensor = self.gaussianize(self.whiten(x))
        return y


class DecorrelatedBatchNormalNorm1d(_DecorrelatedBatchNormalNorm):
    __doc__ = _DecorrelatedBatchNormalNorm.__doc__
    _whiten = DecorrelatedBatchNorm1d
    _gaussianize = BatchNormalNorm1d


class DecorrelatedBatchNormalNorm2d(_DecorrelatedBatchNormalNorm):
    __doc__ = _DecorrelatedBatchNormalNorm.__doc__
    _whiten = DecorrelatedBatchNorm2d
    _gaussianize = BatchNormalNorm2d

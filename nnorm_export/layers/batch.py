"""Batch normality normalization: statistics of the batch in training, frozen statistics at inference."""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from nnorm_export.layers._base import NormalNorm, Variant
from nnorm_export.layers._normalization import require_flag, require_number
from nnorm_export.layers._running import RunningStatistics
from nnorm_export.layers._synchronized import PartOfBatch, SharedGroup
from nnorm_export.layers.fused.settings import DEVIATION, EXACT_MEAN, LMBDA, VARIANCE, Settings
from nnorm_export.mathematics import (
    expand_trailing,
    gaussianize,
    gaussianize_part,
    mean_absolute_deviation,
    standardize,
)


class _BatchNormalNorm(RunningStatistics, NormalNorm):
    r"""y = ψ((x − μ)/√(σ² + ε); λ)·weight + bias, per channel (NN eq. 2, 3 and Algorithm 1).

    Training computes μ, the biased σ² and λ̂ (NN eq. 5–15, with gradient) from the batch, over N and all spatial axes,
    adds noise to ψ, and updates the running statistics: new = m·batch + (1 − m)·old. Evaluation uses the running
    statistics and is an elementwise function.

    Args:
        num_features: the number C of channels.
        order: 2 for a Newton step towards λ̂, 1 for a gradient step.
        alpha: the size α of that step.
        iterations: has no effect, as in the authors' implementation, which takes one step; warns if not 1.
        standardize: False omits the standardization (h = x) and does not update the running mean and variance.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: False does not update the running statistics; evaluation uses the running statistics too.
        momentum: m; None for the cumulative average, m = 1/``num_batches_tracked``.
        noise_train, eps, variant: see :class:`~nnorm_export.layers.NormalNorm`.
        sync: whether the statistics and λ̂ of a training batch are over the batches of all processes, as in
            torch.nn.SyncBatchNorm. Without an initialized process group, or with one process, it has no effect.
        process_group: the processes, with ``sync``; None for all of them.
        lmbda_range: (least, greatest) λ̂ of a batch, with least ≤ 1 ≤ greatest: a λ̂ outside becomes the nearer bound,
            and no gradient flows through it, as in torch.clamp. The running λ is an average of such λ̂ and 1, and stays
            within. Evaluation and files use the running λ. None, the default, is the authors' code. Only the batch
            layers have a range: the other layers estimate λ at inference too, where the operators of the files do not
            clamp it.

    State: ``running_mean``, ``running_var`` (unbiased), ``running_lmbda``, ``running_norm`` (mean absolute deviation
    of ψ's output), ``num_batches_tracked``. The last may be missing from a state dict: the authors' have none.

    Raises:
        ValueError: wrong number of axes; one value per channel in training; ``order`` not 1 or 2; ``lmbda_range``
            without 1.
        RuntimeError: wrong number of channels.
    """

    lmbda_range: tuple[float, float] | None = None  # of the class too, for layers that were pickled without it
    _input_ndims: tuple[int, ...]  # convert_normal_norm adds ranks to an instance that replaces a layer for several

    running_lmbda: Tensor
    running_mean: Tensor
    running_var: Tensor
    running_norm: Tensor
    _shared_group: SharedGroup | None

    def __init__(
        self,
        num_features: int,
        order: int = 2,
        alpha: float = 1.0,
        iterations: int = 1,
        standardize: bool = True,
        affine: bool = True,
        track_running_stats: bool = True,
        momentum: float | None = 0.1,
        noise_train: float = 0.4,
        eps: float = 1e-05,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant = "reference",
        sync: bool = False,
        process_group: dist.ProcessGroup | None = None,
        lmbda_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(eps, noise_train, variant)
        if order not in (1, 2):
            raise ValueError(
                f"order must be 1 or 2, got {order}; give eps and momentum by name: their places differ from those in "
                "torch.nn.BatchNorm"
            )
        require_flag("standardize", standardize)
        require_flag("sync", sync)
        if process_group is not None and not sync:
            raise ValueError("process_group has no effect without sync=True; pass sync=True")
        if iterations != 1:
            warnings.warn(
                f"iterations={iterations} has no effect: like the reference implementation, "
                f"{type(self).__name__} takes one step towards lambda. Pass iterations=1.",
                UserWarning,
                stacklevel=2,
            )
        if lmbda_range is not None:
            self.lmbda_range = _range_around_one(lmbda_range)
        self.num_features = num_features
        self.order = order
        self.alpha = alpha
        self.iterations = iterations
        self.standardize = standardize
        self.affine = affine
        self.sync = sync
        self.process_group = process_group
        names = ("running_lmbda", "running_mean", "running_var", "running_norm")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (num_features,))
        self._init_running_stats(shapes, momentum, track_running_stats, device, dtype)
        self._init_affine((num_features,), affine, device, dtype)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The processes that compute the statistics of a training batch together, with ``sync``; None for all."""
        return None if self._shared_group is None else self._shared_group.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self._shared_group = None if group is None else SharedGroup(group)

    @property
    def _has_part_of_batch(self) -> bool:
        """Whether other processes have the rest of this training batch."""
        return (
            self.sync
            and self.training
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size(self.process_group) > 1
        )

    def reset_running_stats(self) -> None:
        """Set λ = 1, mean 0, variance 1, and √(2/π), the mean absolute deviation of a standard normal variable."""
        self.running_lmbda.fill_(1.0)
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.running_norm.fill_(math.sqrt(2.0 / math.pi))
        self.num_batches_tracked.zero_()

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in self._input_ndims:
            expected = " or ".join(f"{ndim}D" for ndim in self._input_ndims)
            raise ValueError(
                f"expected {expected} input (got {x.dim()}D input); reshape it, or use the layer for that rank"
            )
        if x.shape[1] != self.num_features:
            raise RuntimeError(
                f"{type(self).__name__}: running_mean should contain {x.shape[1]} elements not {self.num_features} "
                f"(expected {self.num_features} channels, got input of size {list(x.shape)})"
            )
        if self.training and math.prod(x.shape) == self.num_features and not self._has_part_of_batch:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape}; "
                "use a larger batch, or call eval()"
            )

    def _has_sample_sets(self, x: Tensor) -> bool:
        return super()._has_sample_sets(x) and not self._has_part_of_batch

    def _settings(self, x: Tensor) -> Settings:
        settings = self._settings_of_sets(0, self.num_features, 0)
        return settings._replace(
            order=self.order, alpha=self.alpha, standardize=self.standardize, deviation=self.track_running_stats
        )

    def _keep(self, statistics: Tensor, x: Tensor) -> None:
        if self.track_running_stats:
            mean, variance, lmbda, norm = (statistics[row] for row in (EXACT_MEAN, VARIANCE, LMBDA, DEVIATION))
            self._update_running_stats(mean, variance, lmbda, norm, x.numel() // self.num_features)

    def _normalize(self, x: Tensor) -> Tensor:
        trailing = x.dim() - 2
        # An empty batch has no statistics: the running statistics do not change, and the output is empty.
        if self._has_part_of_batch:
            x = self._transform_with_synchronized_statistics(x)
        elif self._has_sample_sets(x):
            x = self._transform_with_batch_statistics(x)
        else:
            h = self._standardize(x, self._running("mean", x), self._running("var", x))
            x = self._transform(h, self._running("lmbda", x))
        return self._apply_affine(x, trailing)

    def _transform_with_batch_statistics(self, x: Tensor) -> Tensor:
        dim = [0, *range(2, x.dim())]
        variance, mean = torch.var_mean(x, dim, correction=0, keepdim=True)
        h = self._standardize(x, mean, variance)
        count = x.numel() // self.num_features
        x, lmbda = gaussianize(h, dim, self.delta, self.order, self.alpha, self._lmbda_bounds())
        norm = mean_absolute_deviation(x, dim)
        if self.track_running_stats:
            self._update_running_stats(mean, variance, lmbda, norm, count)
        return self._add_noise(x, norm) if self._adds_noise else x

    def _transform_with_synchronized_statistics(self, x: Tensor) -> Tensor:
        """The same for a batch of which other processes have parts: two sums over them with gradients, two without."""
        batch = PartOfBatch(x, self.process_group)
        h = self._standardize(x, batch.mean, batch.variance)
        dim, step = [0, *range(2, x.dim())], (self.delta, self.order, self.alpha, self._lmbda_bounds())
        x, lmbda = gaussianize_part(h, dim, *step, batch.means_of_all)
        if not (self.track_running_stats or self._adds_noise):
            return x  # s̄ takes two more sums over the processes
        norm = batch.mean_absolute_deviation(x)
        if self.track_running_stats and not batch.is_empty:
            # A batch of one value has no variance and no deviation, so that its divisor n − 1 does not matter.
            self._update_running_stats(batch.mean, batch.variance, lmbda, norm, batch.count.clamp(min=2.0))
        return self._add_noise(x, norm) if self._adds_noise else x

    def _lmbda_bounds(self) -> tuple[float, float] | None:
        return super()._lmbda_bounds() if self.lmbda_range is None else self.lmbda_range

    def _standardize(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return standardize(x, mean, variance, self.eps) if self.standardize else x

    def _running(self, name: str, x: Tensor) -> Tensor:
        buffer: Tensor = getattr(self, f"running_{name}")
        return expand_trailing(buffer, x.dim() - 2).to(x.dtype)

    @torch.no_grad()
    def _update_running_stats(
        self, mean: Tensor, variance: Tensor, lmbda: Tensor, norm: Tensor, count: int | Tensor
    ) -> None:
        unbiased = count / (count - 1)
        self._move("running_lmbda", lmbda)
        self._move("running_norm", norm * unbiased)
        if self.standardize:
            self._move("running_mean", mean)
            self._move("running_var", variance * unbiased)

    def extra_repr(self) -> str:
        lmbda_range = "" if self.lmbda_range is None else f", lmbda_range={self.lmbda_range}"
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, order={self.order}, alpha={self.alpha}, "
            f"standardize={self.standardize}, noise_train={self.noise_train}, variant={self.variant!r}"
            f"{', sync=True' if self.sync else ''}{lmbda_range}"
        )


def _range_around_one(lmbda_range: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(lmbda_range, (tuple, list)) or len(lmbda_range) != 2:
        raise ValueError(f"lmbda_range must be two numbers or None, got {lmbda_range!r}; for example (-1.0, 3.0)")
    for bound in lmbda_range:
        require_number("lmbda_range", bound)
    least, greatest = lmbda_range
    if not -math.inf < least <= 1.0 <= greatest < math.inf:
        raise ValueError(
            f"lmbda_range must be finite and contain 1, at which λ starts, got {lmbda_range!r}; for example (-1.0, 3.0)"
        )
    return float(least), float(greatest)


class BatchNormalNorm1d(_BatchNormalNorm):
    __doc__ = _BatchNormalNorm.__doc__
    _input_ndims = (2, 3)  # (N, C) or (N, C, L), as torch.nn.BatchNorm1d


class BatchNormalNorm2d(_BatchNormalNorm):
    __doc__ = _BatchNormalNorm.__doc__
    _input_ndims = (4,)  # (N, C, H, W)


class BatchNormalNorm3d(_BatchNormalNorm):
    __doc__ = _BatchNormalNorm.__doc__
    _input_ndims = (5,)  # (N, C, D, H, W)

"""PreLayerNorm, RegNorm and PreRegNorm: division by the deviation of each sample; its mean is not subtracted.

Source: Rao and Sohl-Dickstein, *Is Batch Norm Unique?* (2020), table 1, cited as RS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nnorm_export.layers._normalization import Normalization
from nnorm_export.layers._running import in_recomputation
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.related._standard import ChannelNorm, Freezable, channels_of, settings_of
from nnorm_export.layers.related.mixed import sample_axes
from nnorm_export.mathematics import affine_per_channel, centered_over, deviation_over, in_dtype
from nnorm_export.models.modules import deepcopy


def pairwise_regularizer(z: Tensor) -> Tensor:
    """E_{a≠b}[Σ((z̃ᵃ + z̃ᵇ)² − 2)] over the pairs of different samples of a batch, Σ over a sample's values (RS table 1).

    The regularizer is least if samples are opposite on average, and so replaces the subtraction of the batch mean. It
    is 0 for a batch of one sample, which has no pairs.
    """
    count = z.shape[0]
    if count < 2:
        return z.sum() * 0.0
    rows = z.flatten(1)
    squares = torch.square(rows).sum()
    # Σ_{a≠b} |zᵃ + zᵇ|² = 2(n − 2)·Σ|zᵃ|² + 2·|Σ zᵃ|²
    pairs = 2.0 * (count - 2) * squares + 2.0 * torch.square(rows.sum(0)).sum()
    return pairs / (count * (count - 1)) - 2.0 * rows.shape[1]


class _Regularized(nn.Module):
    """A layer that keeps the regularizer of its last training batch."""

    _regularizer: Tensor | None = None

    @property
    def regularizer(self) -> Tensor | None:
        """The loss term of the last call in training, with its gradient; None before the first call and in eval mode.

        If a layer is called more than once in a forward pass, the last call counts. Activation checkpointing with
        ``use_reentrant=True`` runs the forward pass without gradients, so the term has none.
        """
        return self._regularizer

    def _regularize(self, z: Tensor) -> Tensor:
        regularizer = pairwise_regularizer(z) if self.training else None
        # A repetition computes it, because backward needs its operators, and does not keep it: the loss has been added.
        if not in_recomputation():
            self._regularizer = regularizer
        return z

    def train(self, mode: bool = True) -> _Regularized:
        """Set the mode. Leaving the training mode deletes the regularizer of the last training batch."""
        if not mode:
            self._regularizer = None
        super().train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A tensor with a gradient cannot be copied or saved.
        return {name: value for name, value in self.__dict__.items() if name != "_regularizer"}


def regularization_loss(module: nn.Module) -> Tensor:
    """The sum of :attr:`regularizer` over the layers in ``module``, to be scaled and added to the loss (RS table 1).

    Raises:
        ValueError: no layer in ``module`` has been trained on a batch.
    """
    terms = [layer.regularizer for layer in module.modules() if isinstance(layer, _Regularized)]
    found = [term for term in terms if term is not None]
    if not found:
        raise ValueError("no RegNorm or PreRegNorm has run in training mode; call it after the forward pass")
    return torch.stack(found).sum()


class RegNorm(_Regularized, ChannelNorm):
    r"""y = x/√(var_i x + ε)·weight + bias, var_i over the channels and space of each sample (RS table 1).

    No mean is subtracted; :attr:`regularizer` is added to the loss instead (see :func:`regularization_loss`).

    Args:
        num_features: the number C of channels.
        eps: ε.
        affine: whether there are ``weight`` and ``bias``.

    Shape: (N, C, \*spatial), any spatial axes or none. The deviation comes from the input, at inference too.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        z = self._regularize(scaled(x, False, self.eps))
        return self._apply_affine(z, x.dim() - 2)

    def frozen(self) -> nn.Module:
        return FrozenRegNorm(self._affine, self._arithmetic, self.eps)


class FrozenRegNorm(FrozenModule):
    if TYPE_CHECKING:
        weight: Tensor | None
        bias: Tensor | None
        arithmetic: Tensor

    def __init__(self, tensors: dict[str, Tensor | None], arithmetic: torch.dtype, epsilon: float) -> None:
        super().__init__({**tensors, "arithmetic": torch.empty(0)}, arithmetic)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        values = in_dtype(x, self.arithmetic.dtype)
        y = scaled(values, False, self.epsilon)
        return in_dtype(affine_per_channel(y, self.weight, self.bias), x.dtype)


class PreLayerNorm(Normalization, Freezable):
    r"""y = z/√(var_i z + ε)·weight + bias with z = W(x − mean_i x): the linear map is part of the layer (RS table 1).

    Args:
        linear: W, an nn.Linear or nn.Conv; its bias, if it has one, is part of z.
        eps: ε.
        affine: whether there are ``weight`` and ``bias``, one for each channel or feature of z.

    Shape: that of ``linear``. With nn.Linear the statistics are over the features, the last axis; with a convolution
    over the channels and space of each sample. The statistics come from the input, at inference too.

    Raises:
        TypeError: ``linear`` is neither of these.
    """

    replaces = ("linear", "norm")

    def __init__(self, linear: nn.Module, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(eps)
        if not isinstance(linear, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            raise TypeError(
                f"{type(self).__name__} takes an nn.Linear or nn.Conv, got {type(linear).__name__}; "
                "pass the linear map before the normalization"
            )
        features = linear.out_features if isinstance(linear, nn.Linear) else linear.out_channels
        weight = next(linear.parameters())
        self.linear = linear
        # Stored here, because the map may later be wrapped or quantized, and has another class then.
        self._by_last_axis = isinstance(linear, nn.Linear)
        self.affine = affine
        self._init_affine((features,), affine, weight.device, weight.dtype)

    @classmethod
    def counterpart(cls, replaced: Sequence[nn.Module], **options: Any) -> PreLayerNorm:
        channels_of(replaced[1])
        return cls(replaced[0], **{**settings_of(replaced[1], "eps"), **options})

    def _check_input(self, x: Tensor) -> None:
        """Do nothing: :attr:`linear` checks its input."""

    def _normalize(self, x: Tensor) -> Tensor:
        parameter = next(self.linear.parameters(), x)  # a quantized map has no parameters
        z = self.linear(centered(x, self._by_last_axis).to(parameter.dtype)).to(x.dtype)
        z = self._with_regularizer(scaled(z, self._by_last_axis, self.eps))
        return self._apply_affine(z, 0 if self._by_last_axis else z.dim() - 2)

    def _with_regularizer(self, z: Tensor) -> Tensor:
        return z

    def frozen(self) -> nn.Module:
        tensors: dict[str, Tensor | None] = {"weight": self.weight, "bias": self.bias}
        return FrozenPreLayerNorm(deepcopy(self.linear), tensors, self._arithmetic, self._by_last_axis, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, affine={self.affine}"


class PreRegNorm(_Regularized, PreLayerNorm):
    r""":class:`PreLayerNorm` with the :attr:`regularizer` of :class:`RegNorm` (RS table 1)."""

    def _with_regularizer(self, z: Tensor) -> Tensor:
        return self._regularize(z)

    def frozen(self) -> nn.Module:
        # Overridden, because freeze() refuses a class that overrides other methods and inherits frozen(). The
        # regularizer is used in training only.
        return super().frozen()


def centered(x: Tensor, by_last_axis: bool) -> Tensor:
    return centered_over(x, [-1] if by_last_axis else sample_axes(x))


def scaled(z: Tensor, by_last_axis: bool, epsilon: float) -> Tensor:
    return z / deviation_over(z, [-1] if by_last_axis else sample_axes(z), epsilon)


class FrozenPreLayerNorm(FrozenModule):
    """:class:`PreLayerNorm` at inference: the linear map in the model's dtype, statistics in float32 or float64."""

    if TYPE_CHECKING:
        weight: Tensor | None
        bias: Tensor | None
        arithmetic: Tensor

    def __init__(
        self,
        linear: nn.Module,
        tensors: dict[str, Tensor | None],
        arithmetic: torch.dtype,
        by_last_axis: bool,
        epsilon: float,
    ) -> None:
        super().__init__({**tensors, "arithmetic": torch.empty(0)}, arithmetic)
        self.linear = linear
        self.by_last_axis = by_last_axis
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(in_dtype(centered(in_dtype(x, self.arithmetic.dtype), self.by_last_axis), x.dtype))
        z = scaled(in_dtype(z, self.arithmetic.dtype), self.by_last_axis, self.epsilon)
        if not self.by_last_axis:
            z = affine_per_channel(z, self.weight, self.bias)
        else:
            if self.weight is not None:
                z = z * self.weight
            if self.bias is not None:
                z = z + self.bias
        return in_dtype(z, x.dtype)

"""Layer normality normalization: statistics over the trailing axes of each sample."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nnorm_export.layers._base import NormalNorm, Variant
from nnorm_export.layers._normalization import require_flag
from nnorm_export.layers.fused.settings import Settings


class LayerNormalNorm(NormalNorm):
    r"""y = ψ((x − mean x)/√(var x + ε); λ̂)·weight + bias over the trailing ``normalized_shape`` (NN eq. 2–15).

    The statistics and λ̂ come from the input, in training and in evaluation; λ̂ takes a full Newton step (order 2,
    α = 1). Training adds noise.

    Args:
        normalized_shape: the trailing axes to normalize over; an int for the last one.
        elementwise_affine: whether there are ``weight`` and ``bias``, both of shape ``normalized_shape``.
        bias: False for no ``bias``.
        eps, noise_train, variant: see :class:`~nnorm_export.layers.NormalNorm`.

    Shape: (\*, \*normalized_shape), any leading axes; a nested tensor, whose samples have that shape.

    Raises:
        ValueError: ``normalized_shape`` is empty.
        RuntimeError: the input's trailing axes are not ``normalized_shape``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-05,
        elementwise_affine: bool = True,
        noise_train: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant = "reference",
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(eps, noise_train, variant)
        shape = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        self.normalized_shape = tuple(operator.index(size) for size in shape)
        if not self.normalized_shape:
            raise ValueError(
                "normalized_shape must name at least one axis, got (); pass the lengths of the trailing axes"
            )
        require_flag("elementwise_affine", elementwise_affine)
        self.elementwise_affine = elementwise_affine
        self._init_affine(self.normalized_shape, elementwise_affine, device, dtype, bias=bias)

    def _check_input(self, x: Tensor) -> None:
        shape = list(self.normalized_shape)
        if list(x.shape[-len(shape) :]) != shape:
            expected = ", ".join(["*", *map(str, shape)])
            raise RuntimeError(
                f"Given normalized_shape={shape}, expected input with shape [{expected}], "
                f"but got input of size{list(x.shape)}"
            )

    def _forward_nested(self, x: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([self(sample) for sample in x.unbind()], layout=x.layout)

    def _normalize(self, x: Tensor) -> Tensor:
        return self._apply_affine(self._gaussianize_samples(x, range(-len(self.normalized_shape), 0)))

    def _settings(self, x: Tensor) -> Settings:
        return self._settings_of_sets(math.prod(self.normalized_shape), 1, 1)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}, noise_train={self.noise_train}, variant={self.variant!r}"
        )


class ChannelsFirst(nn.Module):
    r"""norm(x) over the channels of x of shape [N, C, \*spatial], for a ``norm`` over the last axis.

    Libraries call this LayerNorm2d: the statistics are over the channels at each spatial position.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        x: Tensor = self.norm(input.movedim(1, -1))
        return x.movedim(-1, 1)

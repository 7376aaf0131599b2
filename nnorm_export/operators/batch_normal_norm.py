"""BatchNormalNorm: y = weight·ψ(scale·x + shift) + bias per channel, with frozen exponents η₊ and η₋ (NN eq. 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nnorm_export import mathematics
from nnorm_export.domain.batch_normal_norm import BATCH_NORMAL_NORM
from nnorm_export.mathematics import in_dtype, per_channel
from nnorm_export.operators import aten, inductor
from nnorm_export.operators.spec import FrozenOperator, TracedOperator


def _computed_by(power_transform: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def batch_normal_norm(
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        exponent_pos: Tensor,
        exponent_neg: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """y = weight·ψ(scale·x + shift) + bias per channel; ψ with exponents η₊ (h ≥ 0) and η₋ (h < 0), NN eq. 3.

        Args:
            x: [N, C, *spatial], float16, bfloat16, float32 or float64; any N, 0 included.
            scale: 1/√(σ² + ε), [C]; ``shift``: −μ·scale, [C].
            exponent_pos, exponent_neg: η₊ and η₋, [C]; 0 is the logarithmic branch.
            weight, bias: [C].

        Returns:
            y, shape and dtype of ``x``. The arithmetic has the parameters' dtype and rounds once, on output.
        """
        # A product and a sum apart, which TorchScript and Inductor fold into a convolution before them.
        h = in_dtype(x, scale.dtype) * per_channel(scale, x) + per_channel(shift, x)
        psi = power_transform(h, per_channel(exponent_pos, x), per_channel(exponent_neg, x), per_channel(weight, x))
        return in_dtype(psi.add_(per_channel(bias, x)), x.dtype)

    return batch_normal_norm


def _weighted_power_transform(h: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor) -> Tensor:
    return mathematics.power_transform(h, exponent_pos, exponent_neg) * weight


batch_normal_norm = _computed_by(aten.weighted_power_transform_)


class FrozenBatchNormalNorm(FrozenOperator):
    """BatchNormalNorm with frozen statistics; see :func:`batch_normal_norm` for the parameters.

    Attributes:
        offset: [C], subtracted from x in the dtype of the parameters before the operator; None is 0.
    """

    if TYPE_CHECKING:
        offset: Tensor | None
        scale: Tensor
        shift: Tensor
        exponent_pos: Tensor
        exponent_neg: Tensor

    operator = TracedOperator.register(
        BATCH_NORMAL_NORM,
        batch_normal_norm,
        _computed_by(inductor.weighted_power_transform),
        _computed_by(_weighted_power_transform),
        near_zero_function=_computed_by(aten.weighted_power_transform),
        frozen_exponents=("exponent_pos", "exponent_neg"),
    )

    def __init__(self, parameters: dict[str, Tensor], record: dict[str, Any], offset: Tensor | None = None) -> None:
        super().__init__({**parameters, "offset": offset}, record)

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.scale, self.shift, self.exponent_pos, self.exponent_neg, self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        self._require_input(x)
        if self.offset is None:
            return self._compute(x)
        centred = in_dtype(x, self.offset.dtype) - per_channel(self.offset, x)
        return in_dtype(self._compute(centred), x.dtype)

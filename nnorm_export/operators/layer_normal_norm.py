"""LayerNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from the trailing axes of each sample (NN eq. 3, 5–15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nnorm_export import mathematics
from nnorm_export.domain.layer_normal_norm import LAYER_NORMAL_NORM
from nnorm_export.mathematics import Gaussianize, in_dtype, standardize_over
from nnorm_export.operators import aten, inductor
from nnorm_export.operators.spec import FrozenOperator, TracedOperator


def _computed_by(gaussianize: Gaussianize) -> Callable[..., Tensor]:
    def layer_normal_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, delta: float) -> Tensor:
        """y = weight·ψ(h; λ̂) + bias with h = (x − mean)/√(var + ε) over the trailing axes, λ̂ by NN eq. 5–15.

        Args:
            x: [*, *normalized_shape], float16, bfloat16, float32 or float64.
            weight, bias: [*normalized_shape], float32 or float64.
            epsilon: ε, added to the biased variance.
            delta: the exponent shift and Newton damping: √ε in the reference variant, 0 in the paper's.

        Returns:
            y, shape and dtype of ``x``. The arithmetic has the parameters' dtype and rounds once, on output.
        """
        normalized = [axis - weight.dim() for axis in range(weight.dim())]
        h = standardize_over(in_dtype(x, weight.dtype), normalized, epsilon)
        psi, _ = gaussianize(h, normalized, delta)
        return in_dtype(psi.mul_(weight).add_(bias), x.dtype)

    return layer_normal_norm


layer_normal_norm = _computed_by(aten.gaussianize)


class FrozenLayerNormalNorm(FrozenOperator):
    """LayerNormalNorm without its noise; see :func:`layer_normal_norm` for the parameters."""

    operator = TracedOperator.register(
        LAYER_NORMAL_NORM, layer_normal_norm, _computed_by(inductor.gaussianize), _computed_by(mathematics.gaussianize)
    )

    def __init__(self, parameters: dict[str, Tensor], record: dict[str, Any], epsilon: float, delta: float) -> None:
        super().__init__(parameters, record)
        self.eps, self.delta = epsilon, delta

    def _arguments(self) -> tuple[Tensor, Tensor, float, float]:
        return self.weight, self.bias, self.eps, self.delta

"""LayerNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from the trailing axes of each sample (NN eq. 3, 5–15)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnorm_export.domain.layer_normal_norm import LAYER_NORMAL_NORM
from nnorm_export.mathematics import in_dtype
from nnorm_export.operators import inductor
from nnorm_export.operators.aten import normal_norm_over
from nnorm_export.operators.spec import OPSET, FrozenOperator, TracedOperator


def layer_normal_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, delta: float) -> Tensor:
    """y = weight·ψ(h; λ̂) + bias with h = (x − mean)/√(var + ε) over the trailing axes, λ̂ by NN eq. 5–15.

    Args:
        x: [*, *normalized_shape], float16, bfloat16, float32 or float64.
        weight, bias: [*normalized_shape], float32 or float64.
        epsilon: ε, added to the biased variance.
        delta: the exponent shift and Newton damping: √ε in the reference form, 0 in the paper's.

    Returns:
        y, shape and dtype of ``x``. The arithmetic has the parameters' dtype and rounds once, on output.
    """
    normalized = [axis - weight.dim() for axis in range(weight.dim())]
    psi = normal_norm_over(in_dtype(x, weight.dtype), normalized, epsilon, delta)
    return in_dtype(psi.mul_(weight).add_(bias), x.dtype)


def _for_inductor(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, delta: float) -> Tensor:
    normalized = [axis - weight.dim() for axis in range(weight.dim())]
    psi = inductor.normal_norm_over(x.to(weight.dtype), normalized, epsilon, delta)
    return (psi * weight + bias).to(x.dtype)


_OP = torch.library.custom_op(
    "nnorm::layer_normal_norm",
    layer_normal_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, float epsilon, float delta) -> Tensor",
)


@_OP.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, delta: float) -> Tensor:
    return torch.empty_like(x)


def _translate(X: Any, weight: Any, bias: Any, epsilon: float, delta: float) -> Any:
    axis = -len(weight.shape)
    return OPSET.LayerNormalNorm(X, weight, bias, axis=axis, epsilon=epsilon, delta=delta)


class FrozenLayerNormalNorm(FrozenOperator):
    """LayerNormalNorm without its noise; see :func:`layer_normal_norm` for the parameters."""

    operator = TracedOperator(
        declaration=LAYER_NORMAL_NORM,
        torch_op=torch.ops.nnorm.layer_normal_norm.default,
        aten_function=layer_normal_norm,
        inductor_function=_for_inductor,
        translate=_translate,
    )

    def __init__(self, parameters: dict[str, Tensor], record: dict[str, Any], epsilon: float, delta: float) -> None:
        super().__init__(parameters, record, f"[*, {', '.join(map(str, parameters['weight'].shape))}]")
        self.eps, self.delta = epsilon, delta

    def forward(self, x: Tensor) -> Tensor:
        normalized = x.dim() - self.weight.dim()
        self._require_input(normalized >= 0 and x.shape[normalized:] == self.weight.shape, x)
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            y = layer_normal_norm(x, self.weight, self.bias, self.eps, self.delta)
        else:
            y = torch.ops.nnorm.layer_normal_norm(x, self.weight, self.bias, self.eps, self.delta)
        return y

"""BatchNormalNorm: y = weight·ψ(scale·x + shift) + bias per channel, with frozen exponents η₊ and η₋ (NN eq. 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnorm_export.domain.batch_normal_norm import BATCH_NORMAL_NORM
from nnorm_export.mathematics import in_dtype, per_channel
from nnorm_export.operators import inductor
from nnorm_export.operators.aten import mean_and_half_difference, power_transform_
from nnorm_export.operators.spec import OPSET, FrozenOperator, TracedOperator


def batch_normal_norm(
    x: Tensor, scale: Tensor, shift: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor, bias: Tensor
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
    # Apart, as TorchScript and Inductor fold such a product and such a sum into a convolution before them.
    h = in_dtype(x, scale.dtype) * per_channel(scale, x) + per_channel(shift, x)
    mean_exponent, half_difference = mean_and_half_difference(exponent_pos, exponent_neg)
    sign = torch.sign(h)
    log = h.abs_().log1p_()
    psi = power_transform_(sign, log, per_channel(mean_exponent, x), per_channel(half_difference, x))
    return in_dtype(psi.mul_(per_channel(weight, x)).add_(per_channel(bias, x)), x.dtype)


def _for_inductor(
    x: Tensor, scale: Tensor, shift: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    h = x.to(scale.dtype) * per_channel(scale, x) + per_channel(shift, x)
    pos, neg, gain = (per_channel(value, x) for value in (exponent_pos, exponent_neg, weight))
    psi = inductor.power_transform(h, inductor.log2_1p(h.abs()), pos, neg, gain)
    return (psi + per_channel(bias, x)).to(x.dtype)


_OP = torch.library.custom_op(
    "nnorm::batch_normal_norm",
    batch_normal_norm,
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor scale, Tensor shift, Tensor exponent_pos, Tensor exponent_neg, Tensor weight, Tensor bias)"
        " -> Tensor"
    ),
)


@_OP.register_fake
def _(x: Tensor, *parameters: Tensor) -> Tensor:
    return torch.empty_like(x)


def _translate(X: Any, scale: Any, shift: Any, exponent_pos: Any, exponent_neg: Any, weight: Any, bias: Any) -> Any:
    return OPSET.BatchNormalNorm(X, scale, shift, exponent_pos, exponent_neg, weight, bias)


class FrozenBatchNormalNorm(FrozenOperator):
    """BatchNormalNorm with frozen statistics; see :func:`batch_normal_norm` for the parameters."""

    if TYPE_CHECKING:
        scale: Tensor
        shift: Tensor
        exponent_pos: Tensor
        exponent_neg: Tensor

    operator = TracedOperator(
        declaration=BATCH_NORMAL_NORM,
        torch_op=torch.ops.nnorm.batch_normal_norm.default,
        aten_function=batch_normal_norm,
        inductor_function=_for_inductor,
        translate=_translate,
    )

    def __init__(self, parameters: dict[str, Tensor], record: dict[str, Any]) -> None:
        super().__init__(parameters, record, f"[N, {len(parameters['scale'])}, *spatial]")

    def forward(self, x: Tensor) -> Tensor:
        self._require_input(x.dim() >= 2 and x.shape[1] == self.scale.shape[0], x)
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            y = batch_normal_norm(
                x, self.scale, self.shift, self.exponent_pos, self.exponent_neg, self.weight, self.bias
            )
        else:
            y = torch.ops.nnorm.batch_normal_norm(
                x, self.scale, self.shift, self.exponent_pos, self.exponent_neg, self.weight, self.bias
            )
        return y

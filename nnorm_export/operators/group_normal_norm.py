"""GroupNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from groups of channels of each sample (NN eq. 3, 5–15).

InstanceNormalNorm is GroupNormalNorm with one channel a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnorm_export.domain.group_normal_norm import GROUP_NORMAL_NORM
from nnorm_export.mathematics import in_dtype, per_channel
from nnorm_export.operators import inductor
from nnorm_export.operators.aten import normal_norm_over
from nnorm_export.operators.spec import OPSET, FrozenOperator, TracedOperator


def group_normal_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, epsilon: float, delta: float) -> Tensor:
    """y = weight·ψ(h; λ̂) + bias with h = (x − mean)/√(var + ε) over a group's channels and extent, λ̂ by NN eq. 5–15.

    Args:
        x: [N, C, *spatial], float16, bfloat16, float32 or float64; any N, 0 included.
        weight, bias: [C], float32 or float64.
        num_groups: a divisor of C; C itself for instance normalization.
        epsilon: ε, added to the biased variance.
        delta: the exponent shift and Newton damping: √ε in the reference form, 0 in the paper's.

    Returns:
        y, shape and dtype of ``x``. The arithmetic has the parameters' dtype and rounds once, on output.
    """
    psi = normal_norm_over(_rows(in_dtype(x, weight.dtype), num_groups), [-1], epsilon, delta).reshape(x.shape)
    return in_dtype(psi.mul_(per_channel(weight, x)).add_(per_channel(bias, x)), x.dtype)


def _rows(x: Tensor, num_groups: int) -> Tensor:
    samples = x.flatten(1)
    return samples.reshape([x.shape[0], num_groups, samples.shape[1] // num_groups])


def _for_inductor(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, epsilon: float, delta: float) -> Tensor:
    psi = inductor.normal_norm_over(_rows(x.to(weight.dtype), num_groups), [-1], epsilon, delta).reshape(x.shape)
    return (psi * per_channel(weight, x) + per_channel(bias, x)).to(x.dtype)


_OP = torch.library.custom_op(
    "nnorm::group_normal_norm",
    group_normal_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, int num_groups, float epsilon, float delta) -> Tensor",
)


@_OP.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, epsilon: float, delta: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _translate(X: Any, weight: Any, bias: Any, num_groups: int, epsilon: float, delta: float) -> Any:
    return OPSET.GroupNormalNorm(X, weight, bias, num_groups=num_groups, epsilon=epsilon, delta=delta)


class FrozenGroupNormalNorm(FrozenOperator):
    """GroupNormalNorm or InstanceNormalNorm without its noise; see :func:`group_normal_norm` for the parameters.

    Attributes:
        batch_rank: the rank of a batched input where an unbatched one is allowed too (instance norms), else 0.
    """

    operator = TracedOperator(
        declaration=GROUP_NORMAL_NORM,
        torch_op=torch.ops.nnorm.group_normal_norm.default,
        aten_function=group_normal_norm,
        inductor_function=_for_inductor,
        translate=_translate,
    )

    def __init__(
        self,
        parameters: dict[str, Tensor],
        record: dict[str, Any],
        num_groups: int,
        epsilon: float,
        delta: float,
        batch_rank: int = 0,
    ) -> None:
        super().__init__(parameters, record, f"[N, {len(parameters['weight'])}, *spatial]")
        self.num_groups, self.eps, self.delta, self.batch_rank = num_groups, epsilon, delta, batch_rank

    def forward(self, x: Tensor) -> Tensor:
        unbatched = x.dim() == self.batch_rank - 1
        batched = x.unsqueeze(0) if unbatched else x
        self._require_input(batched.dim() >= 2 and batched.shape[1] == self.weight.shape[0], x)
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            y = group_normal_norm(batched, self.weight, self.bias, self.num_groups, self.eps, self.delta)
        else:
            y = torch.ops.nnorm.group_normal_norm(
                batched, self.weight, self.bias, self.num_groups, self.eps, self.delta
            )
        return y.squeeze(0) if unbatched else y

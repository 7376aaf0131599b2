"""GroupNormalNorm: y = weight·ψ(h; λ̂) + bias, h and λ̂ from groups of channels of each sample (NN eq. 3, 5–15).

InstanceNormalNorm is GroupNormalNorm with one channel a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nnorm_export import mathematics
from nnorm_export.domain.group_normal_norm import GROUP_NORMAL_NORM
from nnorm_export.mathematics import Gaussianize, in_dtype, per_channel, standardize_over
from nnorm_export.operators import aten, inductor
from nnorm_export.operators.spec import FrozenOperator, TracedOperator


def _computed_by(gaussianize: Gaussianize) -> Callable[..., Tensor]:
    def group_normal_norm(
        x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, epsilon: float, delta: float
    ) -> Tensor:
        """y = weight·ψ(h; λ̂) + bias with h = (x − mean)/√(var + ε) over a group's channels and extent (NN eq. 5–15).

        Args:
            x: [N, C, *spatial], float16, bfloat16, float32 or float64; any N, 0 included.
            weight, bias: [C], float32 or float64.
            num_groups: a divisor of C; C itself for instance normalization.
            epsilon: ε, added to the biased variance.
            delta: the exponent shift and Newton damping: √ε in the reference variant, 0 in the paper's.

        Returns:
            y, shape and dtype of ``x``. The arithmetic has the parameters' dtype and rounds once, on output.
        """
        samples = in_dtype(x, weight.dtype).flatten(1)
        rows = samples.reshape([x.shape[0], num_groups, samples.shape[1] // num_groups])
        psi, _ = gaussianize(standardize_over(rows, [-1], epsilon), [-1], delta)
        return in_dtype(psi.reshape(x.shape).mul_(per_channel(weight, x)).add_(per_channel(bias, x)), x.dtype)

    return group_normal_norm


group_normal_norm = _computed_by(aten.gaussianize)


class FrozenGroupNormalNorm(FrozenOperator):
    """GroupNormalNorm or InstanceNormalNorm without its noise; see :func:`group_normal_norm` for the parameters.

    Attributes:
        batch_rank: the rank of a batched input where an unbatched one is allowed too (instance norms), else 0.
    """

    operator = TracedOperator.register(
        GROUP_NORMAL_NORM,
        group_normal_norm,
        _computed_by(inductor.gaussianize),
        _computed_by(mathematics.gaussianize),
        memory_format=torch.contiguous_format,
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
        super().__init__(parameters, record)
        self.num_groups, self.eps, self.delta, self.batch_rank = num_groups, epsilon, delta, batch_rank

    def _arguments(self) -> tuple[Tensor, Tensor, int, float, float]:
        return self.weight, self.bias, self.num_groups, self.eps, self.delta

    def _takes(self, x: Tensor) -> bool:
        axis = 0 if x.dim() == self.batch_rank - 1 else 1
        return x.dim() > axis and x.shape[axis] == self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        self._require_input(x)
        unbatched = x.dim() == self.batch_rank - 1
        y = self._compute(x.unsqueeze(0) if unbatched else x)
        return y.squeeze(0) if unbatched else y

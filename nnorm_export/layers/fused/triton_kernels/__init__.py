"""The training kernels for GPUs, in the language Triton.

A pass has a stage for each sum over the whole set. With one part, a program runs all stages (``stage`` is -1). With
several parts, each stage is a launch: a program writes the sums of its part to ``partials``, and each program of the
next launch adds up those of all parts in the same order. So the bits of a result depend on shape, layout and dtype
alone, and those of a row not on other rows.
"""

from nnorm_export.layers.fused.triton_kernels.backward_pass import backward
from nnorm_export.layers.fused.triton_kernels.forward_pass import PARTIAL_SUMS, draw_noise, forward

__all__ = ["PARTIAL_SUMS", "backward", "draw_noise", "forward"]

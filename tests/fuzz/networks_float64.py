"""What a network computes in float64, and how far each element of its results moves when roundings are moved.

The rounding error of an element is the greatest distance from float64 in several runs, in which the inputs, the weights
and the result of every operator are moved by at most one rounding of the dtype under test, at random (stochastic
arithmetic). An element that cancellation makes uncertain has a great rounding error; its neighbors keep theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Array = NDArray[Any]

ALLOWED = 32.0  # an element may be this many rounding errors from its result in float64
RUNS, MORE_RUNS = 6, 60  # the second where an element seems wrong: few runs may miss how far it can move
FLOOR = 1e-3  # no element is held to less than this share of a rounding of the greatest element
# float64 is held to a quarter of float32's rounding: attributes of ONNX operators, such as epsilon, are float32.
ROUNDING = {"float64": 2.0**-26, "float32": 2.0**-24, "float16": 2.0**-11}

# Operators that move values and round nothing.
_EXACT = {
    "clone", "_to_copy", "cat", "stack", "index", "index_select", "constant_pad_nd", "full", "zeros", "ones", "empty",
    "arange", "lift_fresh", "scalar_tensor", "where", "relu", "relu_", "copy_", "max_pool2d_with_indices", "embedding",
    "max_pool3d_with_indices", "flip", "roll", "repeat_interleave", "reflection_pad1d", "reflection_pad2d", "full_like",
    "zeros_like", "ones_like", "amax", "_adaptive_max_pool2d", "neg", "abs", "masked_fill", "fill_", "zero_", "sign",
}  # fmt: skip

# Operators that are approximated, or whose last step cancels: their error goes with the argument.
_OF_ARGUMENT = {
    "gelu", "silu", "silu_", "mish", "elu", "elu_", "softplus", "hardswish", "hardswish_", "hardsigmoid", "sigmoid",
    "tanh", "_log_softmax",
}  # fmt: skip

# Operators that write scale·x + (shift − mean·scale) for a group of values, mean and scale being their other results.
_OF_MEAN = {"native_group_norm", "native_batch_norm", "native_layer_norm"}


class _Moved(TorchDispatchMode):
    """Moves the result of every operator by at most ``rounding``, relatively.

    Half of the runs move each element on its own. The others move a tensor as a whole: elements that are equal stay
    equal, and their spread, which a normalization divides by, stays 0.
    """

    def __init__(self, rounding: float, generator: torch.Generator) -> None:
        super().__init__()
        self.rounding, self.generator, self.as_a_whole = rounding, generator, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        argument = args[0].clone() if name in _OF_ARGUMENT else None  # a copy: the operator may work in place
        if name in ("elu", "elu_"):  # runtimes compute exp(x) − 1, and SELU makes 1.76 times that of it
            argument = argument.abs().clamp(min=2)
        if name == "glu":
            argument = args[0].chunk(2, *args[1:])[0]
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if argument is not None:
            value = out[0] if isinstance(out, tuple) else out
            value.add_(self._noise(value.shape) * argument)
        if name.startswith("upsample") and "nearest" not in name:  # its coordinates along an axis are rounded too
            across = args[0].abs().amax(dim=tuple(range(2, args[0].dim())), keepdim=True)
            out.add_(self._noise(out.shape) * across * max(args[0].shape[2:]))
        if name in _OF_MEAN and out[1].numel():
            value, mean, scale = out[:3]
            groups = value.view(*mean.shape, -1) if name != "native_layer_norm" else value
            moved = (mean * scale).view(*mean.shape, *(1,) * (groups.dim() - mean.dim()))
            groups.add_(self._noise(groups.shape) * moved)
        if not is_view and name not in _EXACT:
            for value in pytree.tree_leaves(out):
                if isinstance(value, Tensor) and value.dtype == torch.float64:
                    self.move(value)
        return out

    def move(self, value: Tensor) -> None:
        value.mul_(1.0 + self._noise(value.shape))

    def _noise(self, shape: torch.Size) -> Tensor:
        size = (1,) * len(shape) if self.as_a_whole else tuple(shape)
        return self.rounding * torch.empty(size, dtype=torch.float64).uniform_(-1.0, 1.0, generator=self.generator)


class Float64Results:
    """The results of ``model`` on ``feed`` in float64, and their rounding errors for ``dtype``."""

    def __init__(self, model: nn.Module, feed: list[Tensor], dtype: str) -> None:
        self._model, self._rounding = model, ROUNDING[dtype]
        self._feed = [value.double() if value.is_floating_point() else value for value in feed]
        self._weights = [p.data for p in model.parameters()]
        self._weights += [b for b in model.buffers() if b.is_floating_point()]
        self._generator = torch.Generator().manual_seed(0)
        self.results = self._run()
        self._moved = [np.zeros_like(result) for result in self.results]
        self._runs = 0

    def _run(self) -> list[Array]:
        with torch.no_grad():
            result = self._model(*(value.clone() for value in self._feed))
        return [leaf.numpy().copy() for leaf in pytree.tree_leaves(result)]

    def _move(self, runs: int) -> None:
        kept = [weight.clone() for weight in self._weights]
        feed = self._feed
        moving = _Moved(self._rounding, self._generator)
        try:
            while self._runs < runs:
                self._runs += 1
                moving.as_a_whole = self._runs % 2 == 0
                self._feed = [value.clone() for value in feed]
                for value in (*self._weights, *(value for value in self._feed if value.is_floating_point())):
                    moving.move(value)
                with moving:
                    moved = self._run()
                for greatest, now, true in zip(self._moved, moved, self.results, strict=True):
                    np.maximum(greatest, np.where(np.isfinite(now), np.abs(now - true), np.inf), out=greatest)
                for weight, value in zip(self._weights, kept, strict=True):
                    weight.copy_(value)
        finally:
            self._feed = feed

    def rounding_errors(self, runs: int = RUNS) -> list[Array]:
        with torch.no_grad():
            self._move(runs)
        return [
            np.maximum(moved, self._rounding * np.maximum(np.abs(true), FLOOR * np.abs(true).max(initial=0.0)))
            for moved, true in zip(self._moved, self.results, strict=True)
        ]

    @property
    def unstable(self) -> bool:
        """Whether roundings alone move a result by so much that it shows nothing."""
        errors = self.rounding_errors()
        limit = 2.0**12 * self._rounding if self._rounding < 1e-4 else 0.05
        return any(
            float(y.max(initial=0.0)) > limit * max(float(np.abs(t).max(initial=0.0)), 1e-3)
            for y, t in zip(errors, self.results, strict=True)
        )

    def use(self, results: list[Array]) -> float:
        """The greatest distance of ``results`` from float64 in rounding errors; more than ALLOWED is wrong."""
        shapes, true_shapes = [r.shape for r in results], [t.shape for t in self.results]
        if shapes != true_shapes:
            raise AssertionError(f"shapes {shapes}, float64 has {true_shapes}")
        use = self._use(results, RUNS)
        return self._use(results, MORE_RUNS) if use > ALLOWED else use

    def _use(self, results: list[Array], runs: int) -> float:
        uses = [0.0]
        for result, true, rounding in zip(results, self.results, self.rounding_errors(runs), strict=True):
            error = np.where(np.isfinite(result), np.abs(result.astype(np.float64) - true), np.inf)
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = np.where((error == 0) | np.isinf(rounding), 0.0, error / rounding)
            uses.append(float(shares.max(initial=0.0)))
        return max(uses)

"""The bases of layers that become standard ONNX operators with frozen constants at inference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from nnorm_export.layers._normalization import Normalization
from nnorm_export.layers._running import RunningStatistics
from nnorm_export.layers.frozen_module import arithmetic_of

Kind = Literal["linear", "norm", "activation"]


class Freezable(nn.Module):
    """A layer that declares its form at inference, :meth:`frozen`, and the kinds of layers that it replaces.

    Attributes:
        replaces: the kinds of successive layers that :func:`nnorm_export.layers.convert_norm` replaces by this one.
    """

    replaces: ClassVar[tuple[Kind, ...]] = ("norm",)

    @abstractmethod
    def frozen(self) -> nn.Module:
        """Return the layer in eval mode: standard operators and folded constants, without training code."""

    @classmethod
    @abstractmethod
    def counterpart(cls, replaced: Sequence[nn.Module]) -> Freezable:
        """Return the layer that replaces ``replaced``, layers of the kinds in :attr:`replaces`."""

    def sample_size(self, shape: Sequence[int]) -> int | None:
        """The number of values of an input of ``shape`` in one variance; None if no variance is computed."""
        return None

    @property
    def _arithmetic(self) -> torch.dtype:
        """The dtype in which the frozen layer computes."""
        return arithmetic_of((*self.parameters(), *self.buffers()))

    def _double(self, name: str) -> Tensor:
        """The parameter or buffer ``name`` in float64, the dtype in which constants are folded."""
        value: Tensor = getattr(self, name)
        return value.detach().to(torch.float64)


class ChannelNorm(Normalization, Freezable):
    """A normalization of [N, C, \\*spatial] with an affine per channel.

    Args:
        num_features: the number C of channels.
        eps: ε.
        affine: whether there are ``weight`` and ``bias``.

    Raises:
        ValueError: fewer than two axes, another number of channels; with running statistics, one value per channel in
            training.
    """

    def __init__(
        self,
        num_features: int,
        eps: float,
        affine: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(eps)
        self.num_features = num_features
        self.affine = affine
        self._init_affine((num_features,), affine, device, dtype)

    @classmethod
    def counterpart(cls, replaced: Sequence[nn.Module], **options: Any) -> ChannelNorm:
        names = ("eps", "momentum") if issubclass(cls, RunningStatistics) else ("eps",)
        return cls(channels_of(replaced[0]), **{**settings_of(replaced[0], *names), **options})

    def _check_input(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__}: expected an input of shape [N, {self.num_features}, *spatial], "
                f"got {list(x.shape)}; set num_features to the input's channels"
            )
        if self.training and isinstance(self, RunningStatistics) and x.numel() == self.num_features:
            raise ValueError(
                f"expected more than 1 value per channel when training, got input size {list(x.shape)}; "
                "use a larger batch, or call eval()"
            )

    @property
    def _affine(self) -> dict[str, Tensor | None]:
        return {"weight": self.weight, "bias": self.bias}

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


def channels_of(norm: nn.Module) -> int:
    """The number of channels of a normalization of torch.nn or of this package."""
    for name in ("num_features", "num_channels"):
        if isinstance(count := getattr(norm, name, None), int):
            return count
    raise ValueError(f"{type(norm).__name__} does not say how many channels it has; give it num_features")


def settings_of(norm: nn.Module, *names: str) -> dict[str, Any]:
    """The settings ``names`` of ``norm``, as far as it has them, for the layer that replaces it."""
    return {name: getattr(norm, name) for name in names if hasattr(norm, name)}

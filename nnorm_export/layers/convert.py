"""Replace the normalizations of a model by their normality-normalizing counterparts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from nnorm_export.layers._base import Form, NormalNorm
from nnorm_export.layers.batch import BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d
from nnorm_export.layers.group import GroupNormalNorm, InstanceNormalNorm1d, InstanceNormalNorm2d, InstanceNormalNorm3d
from nnorm_export.layers.layer import LayerNormalNorm
from nnorm_export.models.modules import keep_norms_from_fusion

_BATCH: dict[type[nn.Module], Callable[..., NormalNorm]] = {
    nn.BatchNorm1d: BatchNormalNorm1d,
    nn.BatchNorm2d: BatchNormalNorm2d,
    nn.BatchNorm3d: BatchNormalNorm3d,
}
_INSTANCE: dict[type[nn.Module], Callable[..., NormalNorm]] = {
    nn.InstanceNorm1d: InstanceNormalNorm1d,
    nn.InstanceNorm2d: InstanceNormalNorm2d,
    nn.InstanceNorm3d: InstanceNormalNorm3d,
}
_TORCH_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)


def convert_normal_norm(module: nn.Module, *, noise_train: float | None = None, form: Form = "reference") -> nn.Module:
    r"""Replace each torch.nn BatchNorm, LayerNorm, GroupNorm and InstanceNorm by its normality-normalizing counterpart.

    (x − μ)/√(σ² + ε)·w + b becomes ψ((x − μ)/√(σ² + ε); λ)·w + b (NN eq. 3). The new layers take over
    the Parameter objects and running statistics, and keep eps, momentum, mode, device and dtype; running λ starts at 1.
    A layer that occurs several times is replaced by one layer. A layer without bias gets one of zeros, so build
    the optimizer after converting. The fused inference path of nn.TransformerEncoderLayer always computes a plain
    LayerNorm, so it is switched off where a norm of such a layer is replaced.

    The counterpart of a BatchNorm with ``track_running_stats=False`` has that too, and evaluates with the initial
    statistics, whereas torch's layer takes those of the batch.

    Args:
        module: the model, changed in place, or a single normalization.
        noise_train: ξ of the new layers; None for each layer's default.
        form: ``"reference"`` or ``"paper"``.

    Returns:
        ``module``, or its replacement if it is itself a normalization.

    Raises:
        ValueError: naming the layer's path, for a SyncBatchNorm, an uninitialised lazy layer and an InstanceNorm with
            frozen statistics. The model is then unchanged.

    Warns:
        UserWarning: for a subclass of a torch.nn normalization, which is not replaced.
    """
    options: dict[str, Any] = {"form": form} if noise_train is None else {"form": form, "noise_train": noise_train}
    # All layers are built before any is placed, so that an error leaves the model unchanged.
    replacements: dict[int, NormalNorm] = {}
    for path, layer in module.named_modules():
        replacement = _counterpart(layer, path or "the module itself", module, options)
        if replacement is not None:
            replacements[id(layer)] = replacement
    modules = list(module.modules())
    for parent in modules:
        for name, child in list(parent._modules.items()):
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])
    keep_norms_from_fusion(module, NormalNorm)
    return replacements.get(id(module), module)


def _counterpart(layer: nn.Module, path: str, root: nn.Module, options: dict[str, Any]) -> NormalNorm | None:
    cls = type(layer)
    if not isinstance(layer, _TORCH_NORMS):
        return None
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(f"{path}: {cls.__name__} has no shape yet. Run the model once on an example, then convert it.")
    if isinstance(layer, nn.SyncBatchNorm):
        raise ValueError(
            f"{path}: {cls.__name__} shares statistics between processes, which BatchNormalNorm does not. "
            "Convert before calling convert_sync_batchnorm, or use torch.nn.BatchNorm2d there."
        )
    options = {**options, "eps": layer.eps, **placement(layer, root)}
    if cls in _BATCH:
        new = _BATCH[cls](
            layer.num_features,
            affine=layer.affine,
            track_running_stats=layer.track_running_stats,
            momentum=layer.momentum,
            **options,
        )
    elif cls in _INSTANCE:
        if layer.track_running_stats:
            raise ValueError(
                f"{path}: {cls.__name__} has track_running_stats=True, but InstanceNormalNorm always takes its "
                "statistics from the input. Set track_running_stats=False there, or convert a copy without it."
            )
        new = _INSTANCE[cls](layer.num_features, affine=layer.affine, **options)
    elif type(layer) is nn.LayerNorm:
        new = LayerNormalNorm(layer.normalized_shape, elementwise_affine=layer.elementwise_affine, **options)
    elif type(layer) is nn.GroupNorm:
        new = GroupNormalNorm(layer.num_channels, layer.num_groups, affine=layer.affine, **options)
    else:
        warnings.warn(
            f"{path}: {cls.__name__} is a subclass of a torch.nn normalization and may compute something else, so it "
            "is not replaced. Replace it yourself if it should normalise to normality.",
            UserWarning,
            stacklevel=3,
        )
        return None
    _take_over_state(new, layer)
    return new.train(layer.training)


def _take_over_state(new: NormalNorm, old: nn.Module) -> None:
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        # Where torch's layer has None or no attribute (a bias, untracked statistics), the initial value stays.
        value = getattr(old, name, None)
        if value is not None:
            setattr(new, name, value)


def placement(layer: nn.Module, root: nn.Module) -> dict[str, Any]:
    """Device and dtype of the layer's tensors, or of the model's if it has none; {} if the model has none either."""
    for tensor in (*_tensors(layer), *_tensors(root)):
        if tensor.is_floating_point():
            return {"device": tensor.device, "dtype": tensor.dtype}
    return {}


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()

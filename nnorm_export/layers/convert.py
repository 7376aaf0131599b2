"""Replace the normalizations of a model by their normality-normalizing counterparts."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from nnorm_export.errors import InputError
from nnorm_export.layers._base import NormalNorm, Variant
from nnorm_export.layers._normalization import Normalization
from nnorm_export.layers.batch import BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d
from nnorm_export.layers.conversion_report import ConversionReport, Converted, Kept
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.group import (
    AcrossBatch,
    GroupNormalNorm,
    InstanceNormalNorm1d,
    InstanceNormalNorm2d,
    InstanceNormalNorm3d,
)
from nnorm_export.layers.held import places_of_layers
from nnorm_export.layers.layer import ChannelsFirst, LayerNormalNorm
from nnorm_export.layers.recognition import Recognized, Recognizer, looks_like_norm
from nnorm_export.layers.warm_start import estimate_over
from nnorm_export.models.modules import keep_norms_from_fusion, require_module

_BATCH: tuple[type[BatchNormalNorm1d | BatchNormalNorm2d | BatchNormalNorm3d], ...] = (
    BatchNormalNorm1d, BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d,
)  # fmt: skip
_INSTANCE: tuple[Callable[..., NormalNorm], ...] = (
    InstanceNormalNorm1d, InstanceNormalNorm1d, InstanceNormalNorm2d, InstanceNormalNorm3d,
)  # fmt: skip
_NOTE_FOR_SYNC = (
    "SyncBatchNorm computes the statistics of a training batch over all processes, and its counterpart without running "
    "statistics over its own process's part; set track_running_stats=True, or give each process enough samples"
)
_NOTE_FOR_FROZEN = (
    "it used its running statistics in training too, and BatchNormalNorm uses the statistics of the batch in training "
    "and updates the running ones; call eval() of these layers after train() of the model, or name them in skip="
)
_NOTE_FOR_MOMENTUM = (
    "its running statistics are not updated with a constant momentum, and those of BatchNormalNorm are; set its "
    "momentum, which is {}"
)
_NOTE_FOR_RMS = (
    "RMSNorm subtracts no mean, and LayerNormalNorm does, so the network computes something else until it is trained, "
    "also where λ = 1"
)
_NO_COUNTERPART = (
    "it computes neither BatchNorm, LayerNorm, GroupNorm nor InstanceNorm, alone or followed by its submodules, so it "
    "has no normality counterpart"
)
_KEPT_RMS = (
    "it computes RMSNorm, which subtracts no mean, and LayerNormalNorm does; rms_norms=True puts a LayerNormalNorm in "
    "its place, and the network must then be trained"
)
Chosen = Iterable[str | type[nn.Module]]


@overload
def convert_normal_norm(
    module: nn.Module,
    *,
    noise_train: float | None = ...,
    variant: Variant = ...,
    only: Chosen | None = ...,
    skip: Chosen = ...,
    strict: bool = ...,
    rms_norms: bool = ...,
    warm_start: Iterable[Any] | None = ...,
    return_report: Literal[False] = ...,
) -> nn.Module: ...
@overload
def convert_normal_norm(
    module: nn.Module,
    *,
    noise_train: float | None = ...,
    variant: Variant = ...,
    only: Chosen | None = ...,
    skip: Chosen = ...,
    strict: bool = ...,
    rms_norms: bool = ...,
    warm_start: Iterable[Any] | None = ...,
    return_report: Literal[True],
) -> tuple[nn.Module, ConversionReport]: ...
def convert_normal_norm(
    module: nn.Module,
    *,
    noise_train: float | None = None,
    variant: Variant = "reference",
    only: Chosen | None = None,
    skip: Chosen = (),
    strict: bool = False,
    rms_norms: bool = False,
    warm_start: Iterable[Any] | None = None,
    return_report: bool = False,
) -> nn.Module | tuple[nn.Module, ConversionReport]:
    r"""Replace each BatchNorm, LayerNorm, GroupNorm and InstanceNorm by its normality-normalizing counterpart.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> type(convert_normal_norm(model)[1]).__name__
    'BatchNormalNorm2d'

    (x − μ)/√(σ² + ε)·w + b becomes ψ((x − μ)/√(σ² + ε); λ)·w + b (NN eq. 3). The new layers take over the Parameter
    objects and running statistics, and keep eps, momentum, mode, device and dtype. The running λ starts at 1, where ψ
    is the identity, except for the exponent shift √ε of the variant ``reference``. So a pretrained network with batch
    norms computes almost the same as before, and can be fine-tuned. A shared layer is replaced by one shared layer. A
    layer without bias gets a bias of zeros, so build the optimizer after converting. The fused inference path of
    nn.TransformerEncoderLayer always computes a plain LayerNorm, so it is switched off if a norm of such a layer is
    replaced.

    A layer of another library or of your own is replaced if it computes a norm of torch.nn, alone or followed by the
    layer's submodules (timm's ``BatchNormAct2d`` and ``LayerNorm2d``, torchvision's ``FrozenBatchNorm2d``). To find
    out, a copy of the layer with random weights is run. The submodules, an activation for example, then follow the new
    norm in an nn.Sequential. Other normalizations are kept, and one warning names them.

    A BatchNorm with ``track_running_stats=False`` uses the statistics of the batch in evaluation too. Its counterpart
    does the same, and also computes λ from the batch. The counterpart of a SyncBatchNorm has ``sync=True`` and its
    process group. A warning names layers whose counterpart trains differently: the counterpart of a norm with frozen
    statistics uses the statistics of the batch, and that of a SyncBatchNorm with ``track_running_stats=False`` those of
    its own process's part of the batch. A lazy norm is kept until it has a shape. A norm is kept if its forward takes a
    second argument, or if a plain list, dict or function of the model refers to it too and would still call it.

    Args:
        module: the model, changed in place, or a single normalization.
        noise_train: ξ of the new layers; None for each layer's default.
        variant: ``"reference"`` or ``"paper"``.
        only: the layers to replace, by path (``"blocks.*"``, with the wildcards of :mod:`fnmatch`; a path includes all
            layers below it) or class. None for all layers. A shared layer is chosen by any of its paths.
        skip: the layers to keep, by path or class.
        strict: whether a normalization without a counterpart is an error.
        rms_norms: whether an RMSNorm, x/√(mean x² + ε)·w or ·(1 + w) (Gemma), becomes a LayerNormalNorm without a bias.
            Its weight is w or 1 + w. LayerNormalNorm subtracts the mean, which RMSNorm does not: the results change.
        warm_start: a few batches, from which the statistics and λ of the new batch norms are estimated; a tensor or a
            sequence whose first element is the input (a DataLoader over images and labels), or a dict of arguments.
        return_report: whether to return a report of the converted and the kept normalizations too.

    Returns:
        ``module``, or its replacement if ``module`` is a normalization; with ``return_report``, (module, report).

    Raises:
        ValueError: ``module`` is not a torch.nn.Module; ``only`` or ``skip`` fits no layer of the model;
            ``warm_start`` is a tensor; with ``strict``, a normalization is kept (the message has its path and the
            reason). The model is then unchanged. Also if ``warm_start`` is empty.

    Warns:
        UserWarning: once, naming the kept normalizations and the reasons, and how counterparts behave differently.
    """
    require_module("convert_normal_norm", module)
    if isinstance(warm_start, Tensor):
        raise InputError("warm_start takes batches, got a tensor; write [tensor] for one batch")
    options: dict[str, Any] = (
        {"variant": variant} if noise_train is None else {"variant": variant, "noise_train": noise_train}
    )
    is_chosen = _choice(module, only, skip)
    # All layers are built before the first is put into the model, so that an error leaves the model unchanged.
    replacements: dict[int, nn.Module] = {}
    converted: list[Converted] = []
    kept: list[Kept] = []
    recognize = Recognizer()
    held = places_of_layers(module)
    for path, layer in _norms(module, is_chosen):
        recognized = _recognized(layer, held, recognize, rms_norms)
        if isinstance(recognized, str):
            kept.append(Kept(path, type(layer).__name__, recognized))
            continue
        made = _counterpart(recognized, layer, module, options)
        replacements[id(layer)] = made
        norm = _norm_in(made)
        converted.append(Converted(path, type(layer).__name__, type(norm).__name__, _note(recognized, layer, norm)))
    report = ConversionReport(tuple(converted), tuple(kept))
    if kept and strict:
        raise ValueError(f"{report.text_of_kept()}. Name them in skip= to leave them as they are, or drop strict=True")
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])
    keep_norms_from_fusion(module, NormalNorm)
    result = replacements.get(id(module), module)
    if kept or report.text_of_notes():
        warnings.warn(str(report), UserWarning, stacklevel=2)
    if warm_start is not None:
        norms = [norm for made in replacements.values() for norm in made.modules()]
        estimate_over(result, norms, warm_start, "warm_start has no batch")
    return (result, report) if return_report else result


def _choice(root: nn.Module, only: Chosen | None, skip: Chosen) -> Callable[[nn.Module], bool]:
    """Whether a layer is to be replaced. Raises a ValueError for patterns and classes that fit no layer."""
    paths: dict[nn.Module, list[str]] = {}  # a shared layer has several paths
    for path, layer in root.named_modules(remove_duplicate=False):
        paths.setdefault(layer, []).append(path)

    def fits(entry: str | type[nn.Module], layer: nn.Module) -> bool:
        if isinstance(entry, type):
            return isinstance(layer, entry)
        return any(
            fnmatch.fnmatchcase(".".join(parts[:end]), entry)
            for parts in (path.split(".") for path in paths[layer])
            for end in range(1, len(parts) + 1)
        )

    chosen = {"only": None if only is None else _entries("only", only), "skip": _entries("skip", skip)}
    for option, entries in chosen.items():
        for entry in entries or ():
            if not any(fits(entry, layer) for layer in paths):
                name = entry if isinstance(entry, str) else entry.__name__
                raise ValueError(
                    f"{option}: the model has no {name!r}; give paths as model.named_modules() has them, or classes"
                )

    def is_chosen(layer: nn.Module) -> bool:
        wanted = chosen["only"] is None or any(fits(entry, layer) for entry in chosen["only"])
        return wanted and not any(fits(entry, layer) for entry in chosen["skip"] or ())

    return is_chosen


def _entries(option: str, given: Chosen) -> list[str | type[nn.Module]]:
    if isinstance(given, (str, type)):
        raise ValueError(f"{option} takes a sequence of paths and classes, got {given!r}; write {option}=[{given!r}]")
    return list(given)


def _norms(root: nn.Module, is_chosen: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each normalization to be replaced, once, with its path, but not normalizations inside another one."""
    inside: set[int] = set()
    for path, layer in root.named_modules():
        if id(layer) in inside:
            continue
        if isinstance(layer, (Normalization, FrozenModule)):
            inside.update(map(id, layer.modules()))
        elif looks_like_norm(layer) and is_chosen(layer):
            inside.update(map(id, layer.modules()))
            yield path, layer


def _recognized(layer: nn.Module, held: Mapping[int, str], recognize: Recognizer, rms_norms: bool) -> Recognized | str:
    """The normalization that ``layer`` computes, or the reason why it is kept."""
    if isinstance(layer, LazyModuleMixin):
        return "it has no shape yet; run the model once on an example, then convert it"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return (
            "it has track_running_stats=True, but InstanceNormalNorm always takes its statistics from the input; set "
            "track_running_stats=False"
        )
    if id(layer) in held:
        return (
            f"{held[id(layer)]}, it would still run unconverted; keep it in an nn.ModuleList or nn.ModuleDict there, "
            "or fill the list or dict after converting"
        )
    if extra := _second_argument(layer):
        return f"its forward takes {extra} too, and the forward of its counterpart takes the input only"
    recognized = recognize(layer)
    if recognized is not None and (recognized.kind != "rms" or rms_norms):
        return recognized
    return _NO_COUNTERPART if recognized is None else _KEPT_RMS


def _second_argument(layer: nn.Module) -> str | None:
    """The name of the second argument of the layer's forward; None without one."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, value in inspect.signature(layer.forward).parameters.items() if value.kind not in kinds]
    return named[1] if len(named) > 1 else None


def _note(recognized: Recognized, layer: nn.Module, norm: nn.Module) -> str:
    """How ``norm`` behaves differently from ``layer``; empty if it does not."""
    if recognized.kind == "rms":
        return _NOTE_FOR_RMS
    if isinstance(layer, nn.SyncBatchNorm) and _is_across_batch(recognized, layer):
        return _NOTE_FOR_SYNC
    if recognized.is_frozen:
        return _NOTE_FOR_FROZEN
    if recognized.moves_otherwise:
        return _NOTE_FOR_MOMENTUM.format(norm.momentum)
    return ""


def _counterpart(recognized: Recognized, layer: nn.Module, root: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The layer that replaces ``layer``."""
    new = _build(recognized, layer, {**options, "eps": recognized.epsilon, **placement(layer, root)})
    _take_over_state(new, layer, recognized)
    new.train(layer.training)
    made: nn.Module = new
    if recognized.kind == "channels":
        made = ChannelsFirst(new)
    elif _is_across_batch(recognized, layer):
        made = AcrossBatch(new)
    if recognized.tail:
        tail = {name: layer.get_submodule(name) for name in recognized.tail}
        name = "norm" if "norm" not in tail else "normal_norm"
        made = nn.Sequential(OrderedDict({name: made}))
        for name, follower in tail.items():
            made.add_module(name, follower)
    made.training = layer.training
    return made


def _build(recognized: Recognized, layer: nn.Module, options: dict[str, Any]) -> NormalNorm:
    (channels, *_), spatial = recognized.shape, recognized.spatial
    affine = recognized.weight is not None or recognized.bias is not None
    if _is_across_batch(recognized, layer):
        return InstanceNormalNorm1d(channels, affine=affine, **options)
    if recognized.kind == "batch":
        if isinstance(layer, nn.SyncBatchNorm):
            options = {**options, "sync": True, "process_group": layer.process_group}
        norm = _BATCH[spatial[0]](
            channels,
            affine=affine,
            track_running_stats=bool(getattr(layer, "track_running_stats", True)),
            momentum=recognized.momentum,
            **options,
        )
        if others := {axes + 2 for axes in spatial}.difference(norm._input_ndims):
            norm._input_ndims = tuple(sorted({*norm._input_ndims, *others}))
        return norm
    if recognized.kind == "instance":
        return _INSTANCE[spatial[0]](channels, affine=affine, **options)
    if recognized.kind == "group":
        return GroupNormalNorm(channels, recognized.groups, affine=affine, **options)
    return LayerNormalNorm(
        recognized.shape, elementwise_affine=affine, bias=affine and recognized.kind != "rms", **options
    )


def _is_across_batch(recognized: Recognized, layer: nn.Module) -> bool:
    """Whether ``layer`` has no running statistics, and so uses the statistics of the batch in evaluation too."""
    return recognized.kind == "batch" and getattr(layer, "running_mean", None) is None


def _take_over_state(new: NormalNorm, old: nn.Module, recognized: Recognized) -> None:
    """Gives ``new`` the parameters and statistics of ``old``; tensors that ``old`` lacks keep their initial values."""
    for name, source in (("weight", recognized.weight), ("bias", recognized.bias)):
        if source is not None:
            offset = recognized.weight_offset if name == "weight" else 0.0
            setattr(new, name, _parameter(getattr(old, source), recognized.shape, offset))
    if recognized.kind == "batch":
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            value = getattr(old, name, None)
            if value is not None:
                setattr(new, name, value)
    train_alike(new, [name for name in ("weight", "bias") if getattr(recognized, name) is not None])


def train_alike(new: nn.Module, taken: Collection[str]) -> None:
    """Gives a new weight (or bias) the ``requires_grad`` of the bias (or weight) that was taken over (``taken``)."""
    for name, other in (("weight", "bias"), ("bias", "weight")):
        own, source = getattr(new, name, None), getattr(new, other, None)
        if name not in taken and other in taken and isinstance(own, nn.Parameter) and isinstance(source, nn.Parameter):
            own.requires_grad_(source.requires_grad)


def _parameter(value: Tensor, shape: Sequence[int], offset: float) -> nn.Parameter:
    """``value`` itself if it is a parameter of this shape, so that an optimizer's reference stays valid."""
    if isinstance(value, nn.Parameter) and value.shape == torch.Size(shape) and not offset:
        return value
    data = value.detach().reshape(shape)
    return nn.Parameter(data + offset if offset else data, requires_grad=value.requires_grad)


def _norm_in(made: nn.Module) -> nn.Module:
    return next(layer for layer in made.modules() if isinstance(layer, NormalNorm))


def placement(layer: nn.Module, root: nn.Module) -> dict[str, Any]:
    """Device and dtype of the layer's tensors, else of the model's tensors; {} if neither has tensors."""
    for tensor in itertools.chain(_tensors(layer), _tensors(root)):
        if tensor.is_floating_point():
            return {"device": tensor.device, "dtype": tensor.dtype}
    return {}


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()

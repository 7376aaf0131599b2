"""The network of a :class:`fuzz.networks_spec.Spec`: its modules, its parameters as after training, and its inputs."""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz.networks_inputs import OtherInput, other_input
from fuzz.networks_layers import KINDS, NORMS, Function, Random
from fuzz.networks_spec import Spec, Step
from torch import Tensor, nn

GREATEST = 7000  # elements of a tensor: networks stay small, so that sums stay short
LARGEST = 1e3  # absolute value


class Residual(nn.Module):
    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body, self.how = body, how

    def forward(self, x: Tensor) -> Tensor:
        return joined(x, self.body(x), self.how)

    def extra_repr(self) -> str:
        return self.how


class Branches(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module, how: str, split: bool) -> None:
        super().__init__()
        self.first, self.second, self.how, self.split = first, second, how, split

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split([x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1) if self.split else (x, x)
        return joined(self.first(a), self.second(b), self.how)

    def extra_repr(self) -> str:
        return f"{self.how}, split={self.split}"


class Shared(nn.Module):
    """One norm called twice, on results of the same shape."""

    def __init__(self, norm: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = norm, body

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.norm(x))
        return self.norm(y) if y.shape[1:] == x.shape[1:] else y


def joined(a: Tensor, b: Tensor, how: str) -> Tensor:
    if a.shape[1:] == b.shape[1:] and how.startswith("add"):
        return (a + b).relu() if how == "add+relu" else a + b
    if a.shape[1:] == b.shape[1:] and how == "mul":
        return a * b
    if a.dim() == b.dim() and a.shape[2:] == b.shape[2:]:
        return torch.cat([a, b], 1)
    return torch.cat([a.flatten(1), b.flatten(1)], 1)


class Network(nn.Module):
    def __init__(self, steps: list[nn.Module], inner_outputs: tuple[int, ...], outputs: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.inner_outputs, self.outputs = inner_outputs, outputs

    def forward(self, x: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
        others, inner = (x, b, c), []
        for index, step in enumerate(self.steps):
            x = step(x, others[step.argument]) if isinstance(step, OtherInput) else step(x)
            if index in self.inner_outputs and index != len(self.steps) - 1:
                inner.append(x)
                x = x * 1.0  # a layer that works in place must not change an output
        if self.outputs == "tensor":
            return (*inner, x) if inner else x
        if self.outputs == "tuple":
            return (*inner, x)
        named = {f"inner{i}": value for i, value in enumerate(inner)}
        return {**named, "y": x} if self.outputs == "dict" else {"result": [x, named], "double": x + x}


class Unbuildable(Exception):
    """No step of a spec fits its input."""


def build(spec: Spec) -> tuple[Network, list[list[Tensor]]]:
    """The network of ``spec`` in eval mode with parameters as after training, and its inputs for two batch sizes."""
    torch.manual_seed(spec.seed)
    x = data(spec, spec.shape)
    inputs, modules, inner_outputs = [x], [], []
    y = x
    for index, step in enumerate(spec.steps):
        if step.kind == "input":
            fits = len(inputs) < 3 and y.dim() > 1
            module: nn.Module | None = other_input(random.Random(step.seed), inputs, y) if fits else None
        else:
            module = _build(step, y)
        if module is None:
            continue
        y = _result(module, y, inputs)
        modules.append(module)
        inner_outputs += [len(modules) - 1] * (index in spec.inner_outputs)
    if not modules:
        raise Unbuildable(str(spec))
    network = Network(modules, tuple(inner_outputs), spec.outputs).eval()
    return network, [feed for feed in (inputs, [_resized(v, spec.other_batch) for v in inputs]) if _runs(network, feed)]


def _runs(network: Network, feed: list[Tensor]) -> bool:
    """Whether PyTorch runs the network: its group norm refuses one value in each group, for a batch of one only."""
    try:
        with torch.no_grad():
            network(*(value.clone() for value in feed))
    except ValueError:
        return False
    return True


def data(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape)
    if spec.data == "skewed":
        return torch.exp(0.7 * x) - 1
    if spec.data == "zeros":
        return x * (torch.rand(shape) < 0.7)
    if spec.data == "far":
        return 30.0 * x + 1e4
    return 3.0 * x + 5.0 if spec.data == "shifted" else x


def _resized(value: Tensor, batch: int) -> Tensor:
    rows = [value[index % len(value)] for index in range(batch)]
    stacked = torch.stack(rows)
    if stacked.is_floating_point():
        return stacked + 0.1 * torch.randn_like(stacked)
    return stacked


@torch.no_grad()
def _result(module: nn.Module, x: Tensor, inputs: list[Tensor]) -> Tensor:
    x = x.clone()
    result: Tensor = module(x, inputs[module.argument]) if isinstance(module, OtherInput) else module(x)
    return result


def _build(step: Step, x: Tensor) -> nn.Module | None:
    """The module of ``step`` for ``x``, with trained-looking parameters; None if it does not fit."""
    rng = random.Random(step.seed)
    torch.manual_seed(step.seed)
    how = rng.choice(["add", "add+relu", "cat", "mul"])
    if not step.parts:
        if x.dim() < 2:
            return None
        module = KINDS[step.kind][1](rng, x)
    elif step.kind in ("residual", "concat"):
        module = Residual(_sequence(step.parts[0], x), "cat" if step.kind == "concat" else how)
    elif step.kind == "shared":
        norm = _build(Step(rng.choice(NORMS), step.seed), x)
        module = norm and Shared(norm, _sequence(step.parts[0], x if norm is None else _result(norm, x, [])))
    else:
        split = step.kind == "split" and x.shape[1] >= 2
        a, b = x.split([x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1) if split else (x, x)
        first, second = (_sequence(part, value) for part, value in zip(step.parts, (a, b), strict=True))
        module = Branches(first, second, how, split)
    if module is None:
        return None
    module.eval()
    try:
        if not step.parts:
            train(module, x, rng)
    except (ValueError, RuntimeError):  # PyTorch's norms refuse to train on one value, convolutions results without any
        return None
    y = _result(module, x, [])
    is_small = 0 < y.numel() <= max(GREATEST, x.numel()) and y.dim() <= 6
    fits = is_small and bool(y.isfinite().all()) and float(y.abs().max()) < max(LARGEST, float(x.abs().max()))
    return module if fits else None


def _sequence(steps: tuple[Step, ...], x: Tensor) -> nn.Module:
    modules = []
    for step in steps:
        module = None if step.kind == "input" else _build(step, x)
        if module is not None:
            x = _result(module, x, [])
            modules.append(module)
    return nn.Sequential(*modules) if modules else Function("x + 0.5", lambda x: x + 0.5)


LMBDAS = (0.0, 1.0, 2.0, 1e-4, 2 - 1e-4, -0.4, 2.6)


@torch.no_grad()
def train(module: nn.Module, x: Tensor, rng: Random) -> None:
    """Gives each layer random parameters, and statistics near those of the tensor that reaches it."""

    def adapt(layer: nn.Module, args: tuple[Any, ...]) -> None:
        value = args[0] if args and isinstance(args[0], Tensor) and args[0].dim() > 1 else None
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if not tensor.is_floating_point():
                continue
            if name == "running_lmbda":
                chosen = [rng.choice(LMBDAS) if rng.random() < 0.3 else rng.uniform(0.3, 1.8) for _ in tensor]
                tensor.copy_(torch.tensor(chosen))
            elif name in ("running_mean", "running_var") and value is not None:
                rows = value.transpose(0, 1).flatten(1)
                mean, var = rows.mean(1), rows.var(1, correction=0)
                noise = torch.rand_like(tensor)
                near = mean + 0.3 * (noise - 0.5) if name == "running_mean" else var * (0.5 + noise) + 0.1 * noise
                tensor.copy_(near)
            elif name in ("running_whitening", "running_covariance"):
                root = torch.randn_like(tensor) / tensor.shape[-1] ** 0.5
                tensor.copy_(root @ root.mT + 0.5 * torch.eye(tensor.shape[-1]))
            elif name in ("weight", "bias") and tensor.dim() <= 1 and "Norm" in type(layer).__name__:
                tensor.normal_(1.0 if name == "weight" else 0.0, 0.4)
            elif name in ("weight", "in_proj_weight", "original0"):
                tensor.mul_(rng.uniform(1.0, 1.8))
            elif name in ("v", "tau", "mean_logits", "var_logits", "eps_learned"):
                tensor.add_(0.5 * torch.randn_like(tensor))

    hooks = [layer.register_forward_pre_hook(adapt) for layer in module.modules()]
    try:
        module(x.clone())
    finally:
        for hook in hooks:
            hook.remove()

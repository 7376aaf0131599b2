"""What a comparison finds: planted errors × layouts of outputs, and the worst share of the budget of honest files.

python tests/planted_errors.py > tests/PARITY.md
"""

from __future__ import annotations

import copy
import functools
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import family
import layer_zoo
import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from ways import WAYS, open_with

from nnorm_export import export, load
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm
from nnorm_export.parity.comparison import _compare
from nnorm_export.parity.criteria import Criteria
from nnorm_export.parity.judgement import judge
from nnorm_export.parity.pytorch_model import PyTorchModel, bound
from nnorm_export.parity.yardstick import Array, machine_epsilon, yardsticks_of

ROUNDINGS = 100  # the size of an error in single elements, in roundings of their channel's scale


class Boxes(nn.Module):
    """Four coordinates in pixels and a score, as detectors return them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = BatchNormalNorm1d(16), nn.Linear(8, 16)
        self.box, self.score = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return torch.cat([640 * torch.sigmoid(self.box(h)), torch.sigmoid(self.score(h))], dim=1)


class ScaledRows(nn.Module):
    """Rows whose scale is that of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), LayerNormalNorm(16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * x.norm(dim=1, keepdim=True)


def _logits() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), BatchNormalNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def _maps() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), BatchNormalNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3))


def _sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), LayerNormalNorm(16), nn.GELU(), nn.Linear(16, 6))


# layout of the output -> the model, and its input
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "(N, C)": (_logits, lambda: torch.randn(32, 8)),
    "(1, C)": (_logits, lambda: torch.randn(1, 8)),
    "(N, C, H, W)": (_maps, lambda: torch.randn(4, 3, 9, 7)),
    "(N, C, 1, 1)": (_maps, lambda: torch.randn(8, 3, 3, 3)),
    "(N, L, C)": (_sequence, lambda: torch.randn(4, 11, 8)),
    "boxes in pixels and a score": (Boxes, lambda: torch.randn(32, 8)),
    "rows of scales 1e-3 to 1e3": (ScaledRows, lambda: torch.randn(32, 8) * torch.logspace(-3, 3, 32)[:, None]),
}


@dataclass(frozen=True)
class Planted:
    name: str
    in_model: Callable[[nn.Module], None] | None = None
    in_result: Callable[[Array, Array], None] | None = None  # changes a result in place by the given amount


def _shifted(pick: Callable[[nn.Module], Tensor], by: float, *, all_elements: bool) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            values = pick(model).view(-1)
            size = by * values.abs().max().clamp(min=0.1)
            if all_elements:  # in random directions: a LayerNorm would remove an equal change of all
                values += size * torch.randn(len(values), generator=torch.Generator().manual_seed(1)).sign()
            else:
                values[0] += size

    return plant


def _normalization(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, (BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm)))


def _affine(model: nn.Module, first: bool) -> nn.Module:
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    return layers[0 if first else -1]


def _exponent(model: nn.Module) -> Tensor:
    layer = _normalization(model)
    lmbda = getattr(layer, "running_lmbda", None)
    return lmbda if isinstance(lmbda, Tensor) else layer.bias  # type: ignore[return-value]


def _element(result: Array, size: Array) -> None:
    """The element that is nearest to its channel's scale."""
    index = np.unravel_index(np.argmin(np.abs(np.abs(result) - size)), result.shape)
    result[index] += size[index] * ROUNDINGS * machine_epsilon("float32")


def _slice(axis: int) -> Callable[[Array, Array], None]:
    def plant(result: Array, size: Array) -> None:
        index = [slice(None)] * result.ndim
        index[axis] = slice(-1, None)
        result[tuple(index)] += (size * ROUNDINGS * machine_epsilon("float32"))[tuple(index)]

    return plant


ERRORS = [
    Planted("first weights, all by 1e-3", _shifted(lambda m: _affine(m, True).weight, 1e-3, all_elements=True)),
    Planted("first weights, one by 1e-3", _shifted(lambda m: _affine(m, True).weight, 1e-3, all_elements=False)),
    Planted("last bias, one by 1e-3", _shifted(lambda m: _affine(m, False).bias, 1e-3, all_elements=False)),
    Planted("norm's scale, one by 1e-3", _shifted(lambda m: _normalization(m).weight, 1e-3, all_elements=False)),
    Planted("λ (bias where λ is not kept), all by 1e-3", _shifted(_exponent, 1e-3, all_elements=True)),
    Planted("one element", in_result=_element),
    Planted("one row", in_result=_slice(0)),
    Planted("one channel or last axis", in_result=_slice(-1)),
    Planted("second axis", in_result=_slice(1)),
]


def found(
    layouts: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = LAYOUTS,
) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Layout, the share of the budget of an honest file, and error -> share with it."""
    for layout, (build, inputs) in layouts.items():
        torch.manual_seed(0)
        model, x = trained(build()), inputs()
        pytorch = PyTorchModel(model, torch.float32, ())
        example = bound(model, x)
        expected, truth = pytorch.run(example), pytorch.run_in_float64(example)
        yardsticks = yardsticks_of(expected, pytorch.samples(example, expected), truth)
        assert truth is not None

        def share(actual: Array, e: Array = expected[0], t: Array = truth[0], y: Array | None = yardsticks[0]) -> float:
            result = judge("y", actual, e, t, yardstick=y).budget_share
            assert result is not None
            return result

        with tempfile.TemporaryDirectory() as folder:
            path = export(model, x, Path(folder) / "m.onnx", verify=False, dynamic_shapes={}).path
            (actual,) = load(path)(x.numpy())
        # A channel's scale: its root mean square over the other axes that have a length.
        axes = tuple(axis for axis in range(actual.ndim) if axis != (1 if actual.ndim != 3 else 2))
        if layout.startswith(("rows", "(1")):
            axes = (1,)
        size = np.broadcast_to(np.sqrt(np.mean(np.square(truth[0]), axis=axes, keepdims=True)), actual.shape)
        shares = {}
        for error in ERRORS:
            if error.in_model is not None:
                other = copy.deepcopy(model)
                error.in_model(other)
                with torch.no_grad():
                    wrong = other(x).numpy()
            else:
                wrong = actual.copy()
                assert error.in_result is not None
                error.in_result(wrong, size)
            shares[error.name] = share(wrong)
        yield layout, share(actual), shares


def trained(model: nn.Module) -> nn.Module:
    """``model`` with running statistics and affine parameters as after training."""
    for module in model.modules():
        if isinstance(module, (BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm)):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
                if isinstance(getattr(module, "running_lmbda", None), Tensor):
                    module.running_mean.normal_(0, 0.2)
                    module.running_var.uniform_(0.5, 1.5)
                    module.running_lmbda.uniform_(0.7, 1.4)
    return model.eval()


def _network(case: family.Case) -> tuple[nn.Module, Tensor]:
    return case.network(), torch.randn(16, 1, 8, 8)


def honest(names: list[str] | None = None) -> Iterator[tuple[str, str, float]]:
    """Layer, way of running it, and the greatest share of the budget of its file, over the test zoo."""
    zoo: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {}
    for name in layer_zoo.EXAMPLES:
        zoo[f"layer_zoo {name}"] = functools.partial(layer_zoo.make, name)
    for name, case in family.CASES.items():
        zoo[f"family {name}"] = functools.partial(family.make, name)
        zoo[f"network of {name}"] = functools.partial(_network, case)
    for name, make in zoo.items():
        if names is not None and name not in names:
            continue
        torch.manual_seed(0)
        model, x = make()
        for dtype in ("fp32", "fp16"):
            with tempfile.TemporaryDirectory() as folder:
                for form in ("portable", "primitives"):
                    path = export(model.eval(), x, Path(folder) / "m.onnx", form=form, dtype=dtype, verify=False).path
                    for way in WAYS if form == "portable" else WAYS[:1]:
                        runner = open_with(path, way)
                        report, _ = _compare(name, runner, model, [bound(model, x)], Criteria.of(), ())
                        yield (
                            name,
                            f"{dtype} {form}, {way}",
                            max(output.budget_share or 0.0 for output in report.outputs),
                        )


def main() -> None:
    columns = list(LAYOUTS)
    table = {layout: (clean, shares) for layout, clean, shares in found()}
    print("# What a comparison finds\n")
    print(
        f"Written by `python tests/planted_errors.py` with torch {torch.__version__}, ONNX Runtime "
        f"{onnxruntime.__version__}, {platform.machine()}. The numbers are shares of the error budget: above 1 the "
        f"file fails. Errors in the result are {ROUNDINGS} roundings of the channel's scale, in float32.\n"
    )
    print("| error |", " | ".join(columns), "|\n|", " --- |" * (1 + len(columns)))
    print("| none (the file) |", " | ".join(f"{table[c][0]:.2f}" for c in columns), "|")
    for error in ERRORS:
        cells = [table[c][1][error.name] for c in columns]
        print(f"| {error.name} |", " | ".join(f"{'found' if s > 1 else '**not found**'}, {s:.3g}" for s in cells), "|")
    worst: dict[str, tuple[float, str]] = {}
    for name, way, share in honest():
        print(name, way, share, file=sys.stderr)
        worst[way] = max(worst.get(way, (0.0, "")), (share, name))
    print("\n## Honest files: the greatest share of the budget over the test zoo\n")
    print("| dtype and way | greatest share | layer or network |\n| --- | --- | --- |")
    for way, (share, name) in worst.items():
        print(f"| {way} | {share:.2f} | {name} |")


if __name__ == "__main__":
    main()

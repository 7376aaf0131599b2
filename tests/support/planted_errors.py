"""What a comparison finds: planted errors × layouts of outputs, and the worst share of the budget of unaltered files.

PYTHONPATH=tests python tests/support/planted_errors.py  # writes results/parity.md, in an hour on two cores
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from half_heads import half_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from unaltered_files import COMPILED, DTYPES, Use, uses, zoo

from nnorm_export import export, load
from nnorm_export.dtypes import Array
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm
from nnorm_export.parity.reference.pytorch_model import PyTorchModel, bound
from nnorm_export.parity.verdict.allowed_error import BUDGET, allowed_errors, machine_epsilon
from nnorm_export.parity.verdict.compare_outputs import compare_output

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


class ScaledRowsAndChannels(ScaledRows):
    """The scale of an element is that of its row times that of its channel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.logspace(-3, 3, 6, dtype=x.dtype)


def _logits() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), BatchNormalNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def _maps() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), BatchNormalNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3))


def _great_maps() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), LayerNormalNorm([8, 128, 128]), nn.ReLU(), nn.Conv2d(8, 5, 1))


def _sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), LayerNormalNorm(16), nn.GELU(), nn.Linear(16, 6))


# layout of the output -> the model, and its input
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "(N, C)": (_logits, lambda: torch.randn(32, 8)),
    "(1, C)": (_logits, lambda: torch.randn(1, 8)),
    "(N, C, H, W)": (_maps, lambda: torch.randn(4, 3, 9, 7)),
    "(1, C, 128, 128)": (_great_maps, lambda: torch.rand(1, 3, 128, 128)),
    "(N, C, 1, 1)": (_maps, lambda: torch.randn(8, 3, 3, 3)),
    "(N, L, C)": (_sequence, lambda: torch.randn(4, 11, 8)),
    "boxes in pixels and a score": (Boxes, lambda: torch.randn(32, 8)),
    "rows of scales 1e-3 to 1e3": (ScaledRows, lambda: torch.randn(32, 8) * torch.logspace(-3, 3, 32)[:, None]),
    "rows and channels of scales 1e-3 to 1e3": (
        ScaledRowsAndChannels,
        lambda: torch.randn(32, 8) * torch.logspace(-3, 3, 32)[:, None],
    ),
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
    """Layout, the share of the budget of an unaltered file, and error -> share with it."""
    for layout, (build, inputs) in layouts.items():
        torch.manual_seed(0)
        model, x = trained(build()), inputs()
        pytorch = PyTorchModel(model, torch.float32, ())
        example = bound(model, x)
        expected, float64 = pytorch.run(example), pytorch.run_in_float64(example)
        assert float64 is not None
        perturbed = pytorch.perturbed_runs(example, expected)
        (allowed,) = allowed_errors(expected, perturbed, float64)

        def share(
            actual: Array, expected: Array = expected[0], float64: Array = float64[0], allowed: Array | None = allowed
        ) -> float:
            result = compare_output("y", actual, expected, float64, allowed_error=allowed).budget_share
            assert result is not None
            return result

        with tempfile.TemporaryDirectory() as folder:
            path = export(model, x, Path(folder) / "m.onnx", verify=False, dynamic_shapes={}).path
            (actual,) = load(path)(x.numpy())
        size = _scales(float64[0], layout)
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


def _scales(float64: Array, layout: str) -> Array:
    """The scale of each element: the root mean square of its channel, or of its row."""

    def root_mean_square(axes: tuple[int, ...]) -> Array:
        return np.sqrt(np.mean(np.square(float64), axis=axes, keepdims=True))

    if layout.startswith("rows and channels"):
        size = root_mean_square((0,)) * root_mean_square((1,)) / root_mean_square((0, 1))
    elif layout.startswith(("rows", "(1")):
        size = root_mean_square((1,))
    else:
        size = root_mean_square(tuple(axis for axis in range(float64.ndim) if axis != (1 if float64.ndim != 3 else 2)))
    return np.broadcast_to(size, float64.shape)


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


HEAD = """# What a comparison finds

Written by `PYTHONPATH=tests python tests/support/planted_errors.py` with torch {torch}, ONNX Runtime {onnxruntime},
OpenVINO {openvino},
{machine}. The numbers are shares of the error budget: above 1 the file fails. Errors in the result are {roundings}
roundings of the scale of their channel, or of their row and channel, in float32.
One element of a map of 128² is just found: the greatest of 80,000 rounding errors is almost as great.
"""

UNALTERED = """
## Unaltered files: the greatest share of the budget

{entries} entries: every layer and network of the test zoo and the golden checkpoints, each in every dtype. `kernel`,
`body` and `custom` are ONNX Runtime with portable and custom files, `reference` is onnx's evaluator, `primitives` are
ONNX Runtime's own operators, and OpenVINO runs the same files. A float64 file has no budget: its shares are those of
{budget:g} times torch.testing's tolerances. AOTInductor compiles for minutes, so that only {compiled} is compared.

| dtype | backend | files | greatest share | layer or network |
| --- | --- | --- | --- | --- |
"""

HALF = """
## Heads in half precision: the share of the budget

Files of heads that roundings of half precision move far: sin(16·h), sin(8·h) beside cos(8·h), products of waves,
expm1(2·h), exp(2·h) − exp(2·g), attention of queries and keys of scale 8. h has scale 1.
"""

NOT_RUN = """
Files that a backend refuses:

| dtype | backend | files | reason |
| --- | --- | --- | --- |
"""


def planted_table() -> Iterator[str]:
    table = {layout: (clean, shares) for layout, clean, shares in found()}
    yield f"| error | {' | '.join(table)} |"
    yield "|" + " --- |" * (1 + len(table))
    yield f"| none (the file) | {' | '.join(f'{clean:.2f}' for clean, _ in table.values())} |"
    for error in ERRORS:
        cells = [shares[error.name] for _, shares in table.values()]
        yield f"| {error.name} | {' | '.join(f'{_found(share)}, {share:.3g}' for share in cells)} |"


def _found(share: float) -> str:
    return "found" if share > 1 else "**not found**"


def unaltered_tables(uses: Sequence[Use]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        groups.setdefault((use.dtype, use.backend), []).append(use)
    for (dtype, backend), of_backend in sorted(groups.items(), key=lambda item: list(DTYPES).index(item[0][0])):
        if ran := [use for use in of_backend if use.share is not None]:
            worst = max(ran, key=lambda use: use.share or 0.0)
            yield f"| {dtype} | {backend} | {len(ran)} | {worst.share:.2f} | {worst.name} |"
    refused = Counter((use.dtype, use.backend, use.reason) for use in uses if use.share is None)
    if refused:
        yield NOT_RUN.rstrip("\n")
    for (dtype, backend, reason), count in sorted(refused.items()):
        names = [use.name for use in uses if (use.dtype, use.backend, use.reason) == (dtype, backend, reason)]
        listed = str(count) if count > 3 else ", ".join(names)
        yield f"| {dtype} | {backend} | {listed} | {reason.replace('|', chr(92) + '|')} |"


def measured(jobs: int) -> list[Use]:
    """The uses of all unaltered files, by processes of which each takes the next network."""
    tasks = [(name, dtype) for name in zoo() for dtype in DTYPES]
    columns = (TextColumn("networks and dtypes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=Console(stderr=True)) as progress, ProcessPoolExecutor(jobs, context) as pool:
        task = progress.add_task("", total=len(tasks))
        futures = [pool.submit(uses, *each) for each in tasks]
        for future in futures:
            future.add_done_callback(lambda _: progress.advance(task))
        return [use for future in futures for use in future.result()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "results" / "parity.md")
    args = parser.parse_args()
    head = HEAD.format(
        torch=torch.__version__,
        onnxruntime=onnxruntime.__version__,
        openvino=version("openvino"),
        machine=platform.machine(),
        roundings=ROUNDINGS,
    )
    lines = [head, *planted_table()]
    lines += [UNALTERED.format(entries=len(zoo()), budget=BUDGET, compiled=" and ".join(COMPILED)).rstrip("\n")]
    lines += unaltered_tables(measured(args.jobs))
    lines += [HALF, *half_table()]
    # Only now: a run that is ended early leaves the old file whole.
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

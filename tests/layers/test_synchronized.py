"""BatchNormalNorm(sync=True) in several processes computes what one process computes for the whole batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_group import run_in_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nnorm_export import freeze, layers
from nnorm_export.layers import convert_normal_norm

SHAPES = {layers.BatchNormalNorm1d: (), layers.BatchNormalNorm2d: (4, 2), layers.BatchNormalNorm3d: (2, 1, 3)}
Layer = layers.BatchNormalNorm1d | layers.BatchNormalNorm2d | layers.BatchNormalNorm3d
Run = Callable[[nn.Module, Tensor], Tensor]


def make(cls: Callable[..., Layer] = layers.BatchNormalNorm2d, **options: Any) -> Layer:
    torch.manual_seed(0)
    layer = cls(3, **{"noise_train": 0.0, "dtype": torch.float64, "sync": True, **options})
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def batches(
    sizes: Sequence[int], spatial: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """A part of the batch for each process: skewed values, far from 0."""
    torch.manual_seed(1)
    return [100.0 + torch.randn(size, 3, *spatial, dtype=dtype).exp() for size in sizes]


def step(layer: nn.Module, x: Tensor, run: Run = lambda layer, x: layer(x)) -> dict[str, Any]:
    """Output and gradients of a loss that differs from sample to sample, and the layer's state after it."""
    x = x.clone().requires_grad_()
    y = run(layer, x)
    ((y - 0.3 * x) ** 3).sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    return {"y": y.detach(), "gradient": x.grad, "parameters": gradients, "buffers": list(layer.buffers())}


def assert_equal_to_whole(parts: Sequence[dict[str, Any]], whole: dict[str, Any], tolerance: float = 1e-9) -> None:
    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    for name in ("y", "gradient"):
        close(torch.cat([part[name] for part in parts]), whole[name])
    for index, gradient in enumerate(whole["parameters"]):
        close(sum(part["parameters"][index] for part in parts), gradient)
    for part in parts:
        for buffer, expected, of_first in zip(part["buffers"], whole["buffers"], parts[0]["buffers"], strict=True):
            close(buffer, expected)
            assert torch.equal(buffer, of_first)


def own_step(rank: int, cls: Callable[..., Layer], options: dict[str, Any], parts: list[Tensor]) -> dict[str, Any]:
    return step(make(cls, **options), parts[rank])


def compare(cls: Callable[..., Layer], options: dict[str, Any], parts: list[Tensor], tolerance: float = 1e-9) -> None:
    whole = step(make(cls, **{**options, "sync": False}), torch.cat(parts))
    assert_equal_to_whole(run_in_processes(len(parts), own_step, cls, options, parts), whole, tolerance)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"order": 1, "alpha": 0.5},
    {"variant": "paper"},
    {"standardize": False},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_processes_equal_one_with_the_whole_batch(options: dict[str, Any]) -> None:
    parts = batches([3, 5])
    compare(layers.BatchNormalNorm2d, options, [part - 100.0 for part in parts] if "standardize" in options else parts)


@pytest.mark.parametrize("cls", SHAPES)
def test_a_part_of_one_value_and_an_empty_part_are_right(cls: Callable[..., Layer]) -> None:
    compare(cls, {}, batches([6, 0], SHAPES[cls]))
    compare(cls, {}, batches([1, 6], SHAPES[cls]))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 0, 1, 4)])
def test_four_processes_equal_one_with_the_whole_batch(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    parts = batches(sizes)
    compare(layers.BatchNormalNorm2d, options, [part - 100.0 for part in parts] if "standardize" in options else parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_communicate_in_float32(dtype: torch.dtype) -> None:
    # In bfloat16 the gradient is rounded to 8 bits. A channel far from 0 keeps its variance in float32.
    compare(
        layers.BatchNormalNorm2d,
        {"dtype": dtype},
        batches([3, 5], dtype=dtype),
        2e-3 if dtype == torch.float32 else 0.1,
    )


def _empty(rank: int) -> list[Tensor]:
    layer = make()
    before = [buffer.clone() for buffer in layer.buffers()]
    assert layer(torch.empty(0, 3, 4, 2, dtype=torch.float64)).shape == (0, 3, 4, 2)
    return [*before, *layer.buffers()]


def test_a_batch_that_is_empty_everywhere_moves_nothing() -> None:
    for values in run_in_processes(2, _empty):
        *before, _ = values[:5]
        *after, count = values[5:]
        assert all(map(torch.equal, before, after))
        assert int(count) == 1  # as in a process of its own


def _noise(rank: int, parts: list[Tensor]) -> dict[str, Tensor]:
    layer, quiet = make(noise_train=0.5, affine=False), make(affine=False)
    torch.manual_seed(rank)
    y = layer(parts[rank])
    torch.manual_seed(rank)
    return {"noise": (y - quiet(parts[rank])) / torch.randn_like(parts[rank])}


def test_the_noise_has_the_scale_of_the_whole_batch_and_is_drawn_by_each_process() -> None:
    parts = batches([3, 5])
    whole = make(affine=False, sync=False)(torch.cat(parts))
    mean = whole.mean((0, 2, 3), keepdim=True)
    expected = 0.5 * (whole - mean).abs().mean((0, 2, 3), keepdim=True)
    for result in run_in_processes(2, _noise, parts):
        torch.testing.assert_close(result["noise"], expected.expand_as(result["noise"]))


def _second_order(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
    (gradient**2).sum().backward()
    return x.grad


def _second_order_of_part(rank: int, parts: list[Tensor]) -> Tensor:
    return _second_order(make(), parts[rank])


def test_gradients_of_gradients_pass_through_all_processes() -> None:
    parts = batches([3, 5])
    actual = torch.cat(run_in_processes(2, _second_order_of_part, parts))
    torch.testing.assert_close(actual, _second_order(make(sync=False), torch.cat(parts)), rtol=1e-8, atol=1e-8)


def _checkpointed(rank: int, reentrant: bool, parts: list[Tensor]) -> dict[str, Any]:
    return step(make(), parts[rank], lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_communicates_again_and_moves_statistics_once(reentrant: bool) -> None:
    parts = batches([3, 0])
    assert_equal_to_whole(
        run_in_processes(2, _checkpointed, reentrant, parts), step(make(sync=False), torch.cat(parts))
    )


def _network(sync: bool) -> nn.Module:
    torch.manual_seed(0)
    norms = [layers.BatchNormalNorm2d(4, noise_train=0.0, sync=sync) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Conv2d(4, 4, 1), norms[1]).double()


def _train(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).tanh().square().mean().backward()
        optimizer.step()
    return [value.detach() for value in (*model.parameters(), *model.buffers())]


def _train_part(rank: int, parts: list[Tensor], backend: str | None) -> list[Tensor]:
    model: Any = DistributedDataParallel(_network(sync=True))
    if backend is not None:
        model = torch.compile(model, backend=backend)
    return _train(model, parts[rank])


def _assert_trains_as_one(count: int, backend: str | None) -> None:
    parts = batches([2] * count, (6, 6))
    expected = _train(_network(sync=False), torch.cat(parts))
    for values in run_in_processes(count, _train_part, parts, backend):
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_distributed_data_parallel_trains_as_one_process_does() -> None:
    _assert_trains_as_one(2, None)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "backend"), [(4, None), (2, "aot_eager"), (2, "inductor")])
def test_distributed_data_parallel_trains_as_one_process_does_compiled_too(count: int, backend: str | None) -> None:
    _assert_trains_as_one(count, backend)


def _compiled(rank: int, parts: list[Tensor]) -> dict[str, Any]:
    group = dist.new_group([0, 1])
    layer = make(process_group=group)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    return step(layer, parts[rank], lambda _, x: compiled(x))


@pytest.mark.slow
def test_the_compiled_layer_is_one_graph() -> None:
    parts = batches([3, 5])
    assert_equal_to_whole(run_in_processes(2, _compiled, parts), step(make(sync=False), torch.cat(parts)))


def _in_pairs(rank: int, parts: list[Tensor]) -> dict[str, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = make(process_group=pairs[rank // 2])
    assert copy.deepcopy(layer).process_group is layer.process_group is pairs[rank // 2]
    assert freeze(nn.Sequential(layer)) is not None
    with pytest.raises(TypeError, match=r"process_group= cannot be pickled.*save model\.state_dict"):
        pickle.dumps(layer)
    return step(layer, parts[rank])


@pytest.mark.slow
def test_a_process_group_computes_statistics_of_its_own() -> None:
    parts = batches([2, 3, 4, 1])
    results = run_in_processes(4, _in_pairs, parts)
    for pair in (slice(0, 2), slice(2, 4)):
        assert_equal_to_whole(results[pair], step(make(sync=False), torch.cat(parts[pair])))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_ordinary(layer: Layer) -> None:
    (x,) = batches([5])
    assert_equal_to_whole([step(layer, x)], step(make(sync=False), x), 0.0)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(x[:1, :, :1, :1])


def test_without_a_group_it_is_an_ordinary_layer() -> None:
    assert_ordinary(make())


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_process_is_an_ordinary_layer() -> None:
    assert_ordinary(make(process_group=dist.new_group([0])))


class _OfAnotherLibrary(nn.SyncBatchNorm):
    """timm's SyncBatchNormAct: calls SyncBatchNorm's forward, and then an activation."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("with_group", [True, False])
@pytest.mark.parametrize("cls", [nn.SyncBatchNorm, _OfAnotherLibrary])
def test_a_sync_batch_norm_is_converted_in_a_running_group(
    cls: Callable[..., nn.SyncBatchNorm], with_group: bool
) -> None:
    group = dist.new_group([0]) if with_group else None
    model, report = convert_normal_norm(nn.Sequential(cls(4, process_group=group)), return_report=True)
    assert report.kept == ()
    norm = next(layer for layer in model.modules() if isinstance(layer, layers.BatchNormalNorm2d))
    assert norm.sync
    assert norm.process_group is group


def test_a_sync_batch_norm_without_running_statistics_warns() -> None:
    with pytest.warns(UserWarning, match="SyncBatchNorm .* its own process's part; set track_running_stats=True"):
        convert_normal_norm(nn.Sequential(nn.SyncBatchNorm(4, track_running_stats=False)))


@pytest.mark.usefixtures("alone")
def test_a_group_without_sync_is_refused() -> None:
    with pytest.raises(ValueError, match="process_group has no effect without sync=True"):
        layers.BatchNormalNorm2d(4, process_group=dist.new_group([0]))
    with pytest.raises(ValueError, match="sync must be True or False"):
        layers.BatchNormalNorm2d(4, sync="nccl")


def test_the_layer_says_that_it_is_synchronized() -> None:
    assert "sync=True" in repr(make())
    assert "sync" not in repr(make(sync=False))

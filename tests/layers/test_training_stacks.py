"""Training under FSDP and AMP: statistics stay in float32 and are right; dtypes are those of torch's own norms."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from process_group import run_in_processes
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from nnorm_export import layers
from nnorm_export.layers._running import RunningStatistics

BUFFERS = ("running_lmbda", "running_mean", "running_var", "running_norm")
BFLOAT16 = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, keep_low_precision_grads=True)
POLICY = ModuleWrapPolicy({nn.Conv2d, layers.BatchNormalNorm2d})


class Norms(nn.Module):
    """Every layer with running statistics on the same input, then the other layers and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tracking = nn.ModuleList(
            [
                layers.BatchNormalNorm2d(4, noise_train=0.0),
                layers.BatchNormalNorm2d(4, noise_train=0.0, affine=False, momentum=None),
                layers.SwitchableNorm(4),
                layers.BMLV(4),
                layers.DecorrelatedBatchNorm2d(4, 2),
            ]
        )
        self.others = nn.Sequential(
            layers.GroupNormalNorm(4, 2, noise_train=0.0),
            layers.InstanceNormalNorm2d(4, noise_train=0.0),
            layers.LayerNormalNorm([4, 3, 3], noise_train=0.0),
        )
        self.conv = nn.Conv2d(4, 2, 3)
        self(torch.randn(8, 4, 3, 3).exp() / 3.0)  # statistics that bfloat16 would round

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.others(torch.stack([layer(x) for layer in self.tracking]).sum(0)))
        return y


def batches(count: int = 3) -> list[Tensor]:
    """Values that bfloat16 does not round, so that statistics in float32 do not depend on it."""
    torch.manual_seed(1)
    return [torch.randn(6, 4, 3, 3).exp().bfloat16().float() for _ in range(count)]


def shard(model: nn.Module, way: str) -> nn.Module:
    """``model`` under FSDP 1 or 2 in bfloat16, as a whole or with units within it."""
    if way.startswith("fsdp1"):
        policy = POLICY if way == "fsdp1, units" else None
        return FullyShardedDataParallel(
            model,
            mixed_precision=BFLOAT16,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            auto_wrap_policy=policy,
        )
    mixed: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for unit in model.modules() if way == "fsdp2, units" else ():
        if isinstance(unit, (nn.Conv2d, layers.NormalNorm)) and list(unit.parameters()):
            fully_shard(unit, **mixed)
    return fully_shard(model, **mixed)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    wrapper = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    return {
        name.replace(wrapper[0], "").replace(wrapper[1], ""): value.clone() for name, value in model.named_buffers()
    }


def _train_sharded(rank: int, way: str, checkpointed: bool) -> dict[str, Any]:
    model = shard(Norms(), way)
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, RunningStatistics))
    dtypes = {}
    for x in batches():
        y = model(x[rank * 3 :][:3])
        y.float().square().mean().backward()
        dtypes = {"y": y.dtype, **{name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}}
    finite = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None and p.grad.numel())
    model.eval()
    return {"dtypes": dtypes, "finite": finite, "statistics": statistics(model), "of eval": model(x).float().detach()}


WAYS = ["fsdp1", "fsdp1, units", "fsdp2", "fsdp2, units"]


def assert_trains_as_in_float32(way: str, checkpointed: bool) -> None:
    for rank, result in enumerate(run_in_processes(2, _train_sharded, way, checkpointed)):
        model = Norms()
        for x in batches():
            model(x[rank * 3 :][:3])
        expected = statistics(model)
        assert result["statistics"].keys() == expected.keys()
        for name, value in expected.items():
            # In bfloat16 they would be off by 2⁻⁹.
            torch.testing.assert_close(result["statistics"][name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert result["finite"]
        dtypes = result["dtypes"]
        assert dtypes.pop("y") == torch.bfloat16
        assert set(dtypes.values()) == {torch.bfloat16 if way.startswith("fsdp1") else torch.float32}  # of gradients
        torch.testing.assert_close(result["of eval"], model.eval()(x).detach(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("way", WAYS)
def test_statistics_stay_in_float32_under_fsdp(way: str) -> None:
    assert_trains_as_in_float32(way, checkpointed=False)


@pytest.mark.parametrize("way", ["fsdp1, units", "fsdp2"])
def test_a_checkpoint_under_fsdp_moves_statistics_once(way: str) -> None:
    assert_trains_as_in_float32(way, checkpointed=True)


def _round_trip(rank: int, way: str, full: bool) -> dict[str, Any]:
    source, target = Norms(), Norms()
    with torch.no_grad():
        for value in target.state_dict().values():
            value.zero_()
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    source, target = shard(source, way), shard(target, way)  # neither has run, so that FSDP 1 casts in between
    if way.startswith("fsdp1"):
        kind = StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(source, kind):
            state = source.state_dict()
        with FullyShardedDataParallel.state_dict_type(target, kind):
            target.load_state_dict(state)
        with FullyShardedDataParallel.state_dict_type(target, StateDictType.FULL_STATE_DICT):
            return {"actual": target.state_dict(), "expected": expected}
    state = get_model_state_dict(source, options=StateDictOptions(full_state_dict=full))
    set_model_state_dict(target, state, options=StateDictOptions(full_state_dict=full))
    return {
        "actual": dict(get_model_state_dict(target, options=StateDictOptions(full_state_dict=True))),
        "expected": expected,
    }


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_dict_passes_through_fsdp_unchanged(way: str, full: bool) -> None:
    for result in run_in_processes(2, _round_trip, way, full):
        assert result["actual"].keys() == result["expected"].keys()
        for name, value in result["expected"].items():
            assert result["actual"][name].dtype == value.dtype, name
            assert torch.equal(result["actual"][name], value), name
        Norms().load_state_dict(result["actual"])


def _dtypes_of_twins(rank: int, way: str) -> list[list[torch.dtype]]:
    twins = [
        (layers.GroupNormalNorm(4, 2), nn.GroupNorm(2, 4)),
        (layers.LayerNormalNorm([4, 3, 3]), nn.LayerNorm([4, 3, 3])),
        (layers.InstanceNormalNorm2d(4), nn.InstanceNorm2d(4, affine=True)),
    ]
    if way == "fsdp1":  # FSDP 2 leaves the buffers in float32, with which BatchNorm raises an error on processors
        twins.append((layers.BatchNormalNorm2d(4), nn.BatchNorm2d(4)))
    return [[shard(norm, way)(x).dtype for norm in twin for x in batches(1)] for twin in twins]


@pytest.mark.parametrize("way", ["fsdp1", "fsdp2"])
def test_outputs_have_the_dtype_of_torchs_norms_under_fsdp(way: str) -> None:
    for dtypes in run_in_processes(2, _dtypes_of_twins, way)[0]:
        assert dtypes == [torch.bfloat16, torch.bfloat16]


def _synchronized(rank: int, way: str) -> dict[str, Tensor]:
    model = shard(nn.Sequential(layers.BatchNormalNorm2d(4, noise_train=0.0, sync=True)), way)
    for x in batches():
        model(x[rank * 3 :][:3]).float().square().mean().backward()
    return statistics(model)


@pytest.mark.parametrize("way", ["fsdp1", "fsdp2"])
def test_synchronized_statistics_stay_in_float32_under_fsdp(way: str) -> None:
    model = nn.Sequential(layers.BatchNormalNorm2d(4, noise_train=0.0))
    for x in batches():
        model(x)
    for result in run_in_processes(2, _synchronized, way):
        for name, value in statistics(model).items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)


# --- casts that are not FSDP's ---


def cast_as_fsdp_does(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda layer: layer,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "double and back": lambda layer: layer.double().float(),
    "assigned": lambda layer: (layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True), layer)[1],
}


@pytest.mark.parametrize("how", COPIES)
def test_a_cast_of_the_buffers_is_taken_back_without_a_loss(how: str) -> None:
    layer = Norms().tracking[0]
    expected = {name: value.clone() for name, value in layer.state_dict().items()}
    layer = COPIES[how](layer).eval()
    cast_as_fsdp_does(layer)
    layer(batches(1)[0])
    for name, value in layer.state_dict().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def test_statistics_that_moved_after_a_cast_are_not_set_back() -> None:
    layer = Norms().tracking[0]
    cast_as_fsdp_does(layer)
    layer.running_mean.fill_(3.0)
    layer.eval()(batches(1)[0])
    assert layer.running_mean.dtype == torch.float32
    assert (layer.running_mean == 3.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_conversion_by_the_user_holds(dtype: torch.dtype) -> None:
    layer = Norms().tracking[0].to(dtype)
    layer(batches(1)[0].to(dtype))
    assert {getattr(layer, name).dtype for name in BUFFERS} == {dtype}


# --- AMP ---

TWINS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "batch": (lambda: layers.BatchNormalNorm2d(4, noise_train=0.0), lambda: nn.BatchNorm2d(4)),
    "group": (lambda: layers.GroupNormalNorm(4, 2, noise_train=0.0), lambda: nn.GroupNorm(2, 4)),
    "instance": (lambda: layers.InstanceNormalNorm2d(4, noise_train=0.0), lambda: nn.InstanceNorm2d(4, affine=True)),
    "layer": (lambda: layers.LayerNormalNorm([4, 3, 3], noise_train=0.0), lambda: nn.LayerNorm([4, 3, 3])),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TWINS)
def test_autocast_has_the_dtypes_of_torchs_norms(name: str, dtype: torch.dtype) -> None:
    (x,) = batches(1)
    for of_input in (torch.float32, dtype):
        found = []
        for build in TWINS[name]:
            layer, leaf = build(), x.to(of_input, copy=True).requires_grad_()
            with torch.autocast("cpu", dtype=dtype):
                y = layer(leaf)
            y.float().square().sum().backward()
            assert leaf.grad is not None
            values = [y, leaf.grad, *(parameter.grad for parameter in layer.parameters())]
            assert all(value.isfinite().all() for value in values)
            found.append([value.dtype for value in values])
            assert all(value.dtype == torch.float32 for value in layer.buffers() if value.is_floating_point())
        assert found[0] == found[1]


def network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Flatten(), nn.Linear(36, 2))


def _scaled_steps(norm: nn.Module) -> Iterator[tuple[Any, ...]]:
    model = network(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for step, x in enumerate(batches()):
        before = copy.deepcopy(list(model.parameters()))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean() * (1e9 if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        is_skipped = all(map(torch.equal, before, model.parameters()))
        yield scaler.get_scale(), is_skipped, norm.num_batches_tracked.item()
    assert all(parameter.isfinite().all() for parameter in (*model.parameters(), *norm.buffers()))


def test_a_step_that_the_scaler_skips_moves_the_statistics_as_torchs_batch_norm_does() -> None:
    steps = list(_scaled_steps(layers.BatchNormalNorm2d(4, noise_train=0.0)))
    assert steps == list(_scaled_steps(nn.BatchNorm2d(4)))
    assert [is_skipped for _, is_skipped, _ in steps] == [False, True, False]


def test_accumulated_gradients_are_sums_and_each_part_moves_the_statistics() -> None:
    models = [network(layers.BatchNormalNorm2d(4, noise_train=0.0)), network(nn.BatchNorm2d(4))]
    sums = [torch.zeros_like(parameter) for parameter in models[0].parameters()]
    for x in batches():
        for model in models:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                (model(x).float().square().mean() / 3.0).backward()
    for x in batches():
        one = network(layers.BatchNormalNorm2d(4, noise_train=0.0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (one(x).float().square().mean() / 3.0).backward()
        for total, parameter in zip(sums, one.parameters(), strict=True):
            total.add_(parameter.grad)
    for total, parameter in zip(sums, models[0].parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, total)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(models[0][1].get_buffer(name), models[1][1].get_buffer(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in TWINS), ("layer", "inductor")])
def test_a_compiled_step_under_autocast_is_the_step(name: str, backend: str) -> None:
    results = []
    for compiles in (False, True):
        model = network(TWINS[name][0]())
        run = torch.compile(model, backend=backend, fullgraph=True) if compiles else model
        for x in batches(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(x)
            y.float().square().mean().backward()
        assert y.dtype == torch.bfloat16
        results.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
    for actual, expected in zip(*reversed(results), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_a_compiled_layer_takes_a_cast_of_its_buffers_back() -> None:
    model, (x,) = Norms(), batches(1)
    expected = copy.deepcopy(model)
    expected(x)
    compiled = torch.compile(model, backend="aot_eager")
    cast_as_fsdp_does(model)
    compiled(x)
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, expected.get_buffer(name), rtol=1e-5, atol=1e-6)

"""freeze(): which layers it knows, what it keeps, and what it refuses, by name of the layer."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings

import fake_layers
import pytest
import torch
from torch import Tensor, nn

from nnorm_export import FreezeError, freeze, layers
from nnorm_export.freezing import Row, register
from nnorm_export.layers.related._standard import Freezable
from nnorm_export.operators import FrozenBatchNormalNorm, FrozenGroupNormalNorm, FrozenLayerNormalNorm


def randomized(layer: nn.Module) -> nn.Module:
    """``layer`` with statistics, λ and affine that are not their initial values."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in layer.state_dict().items():
        if tensor.is_floating_point():
            low, high = (0.5, 1.5) if name.endswith(("var", "lmbda", "weight")) else (-1, 1)
            tensor.uniform_(low, high, generator=generator)
    return layer


NORMAL_LAYERS = [
    (layers.BatchNormalNorm1d(6), (4, 6), FrozenBatchNormalNorm),
    (layers.BatchNormalNorm1d(6, affine=False, variant="paper"), (4, 6, 5), FrozenBatchNormalNorm),
    (layers.BatchNormalNorm2d(6, standardize=False), (4, 6, 3, 5), FrozenBatchNormalNorm),
    (layers.BatchNormalNorm2d(6, track_running_stats=False), (4, 6, 3, 5), FrozenBatchNormalNorm),
    (layers.BatchNormalNorm3d(6, eps=1e-2), (4, 6, 1, 2, 3), FrozenBatchNormalNorm),
    (layers.LayerNormalNorm(7), (3, 5, 7), FrozenLayerNormalNorm),
    (layers.LayerNormalNorm((5, 7), elementwise_affine=False, variant="paper"), (3, 5, 7), FrozenLayerNormalNorm),
    (layers.GroupNormalNorm(6, 3), (4, 6, 5), FrozenGroupNormalNorm),
    (layers.InstanceNormalNorm1d(6), (4, 6, 5), FrozenGroupNormalNorm),
    (layers.InstanceNormalNorm2d(6, variant="paper"), (4, 6, 3, 5), FrozenGroupNormalNorm),
    (layers.InstanceNormalNorm2d(6, affine=False), (6, 3, 5), FrozenGroupNormalNorm),
    (layers.InstanceNormalNorm3d(6), (4, 6, 2, 3, 2), FrozenGroupNormalNorm),
]


@pytest.mark.parametrize(("layer", "shape", "operator"), NORMAL_LAYERS, ids=lambda v: getattr(v, "__name__", str(v)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_frozen_layer_computes_what_the_layer_does(
    layer: nn.Module, shape: tuple[int, ...], operator: type[nn.Module], dtype: torch.dtype
) -> None:
    layer = randomized(copy.deepcopy(layer)).to(dtype).eval()
    x = 2 * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    # A layer without tensors has the dtype of its model.
    frozen = freeze(nn.Sequential(layer, nn.Linear(1, 1, dtype=dtype)))[0]
    assert type(frozen) is operator
    # ε and δ of the per-sample operators are float32 attributes, also in a float64 model.
    tolerance = {torch.float32: 3e-6, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(frozen(x), layer(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("fake", "twin", "shape"),
    [
        (fake_layers.BatchNorm1d(6), nn.BatchNorm1d(6), (4, 6)),
        (fake_layers.BatchNorm2d(6, eps=1e-3), nn.BatchNorm2d(6, eps=1e-3), (4, 6, 3, 5)),
        (fake_layers.LayerNorm([5, 7]), nn.LayerNorm([5, 7]), (3, 5, 7)),
        (fake_layers.GroupNorm(6, 3), nn.GroupNorm(3, 6), (4, 6, 3, 5)),
        (fake_layers.InstanceNorm2d(6), nn.InstanceNorm2d(6, affine=True), (4, 6, 3, 5)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_plain_norms_of_the_authors_become_torchs(fake: nn.Module, twin: nn.Module, shape: tuple[int, ...]) -> None:
    twin.load_state_dict(randomized(fake).state_dict(), strict=False)
    frozen = freeze(fake)
    assert type(frozen).__module__.startswith("torch.nn")
    x = torch.randn(shape)
    torch.testing.assert_close(frozen(x), twin.eval()(x))


def test_plain_batch_norm_that_does_not_standardize() -> None:
    x = torch.randn(4, 6)
    layer = randomized(fake_layers.BatchNorm1d(6, standardize=False))
    torch.testing.assert_close(freeze(layer)(x), x * layer.weight + layer.bias)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 5, 5)])
def test_standardize(shape: tuple[int, ...]) -> None:
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.0])
    x = torch.randn(shape)
    expected = (x.movedim(1, -1) - mean) / std
    torch.testing.assert_close(freeze(fake_layers.Standardize(mean, std))(x), expected.movedim(-1, 1))
    torch.testing.assert_close(freeze(fake_layers.Standardize(0.5, 2.0))(x), (x - 0.5) / 2)


def test_the_model_is_left_untouched_and_the_copy_is_in_eval_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), randomized(layers.BatchNormalNorm2d(6)), nn.Dropout(0.5)).train()
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    frozen = freeze(model)
    assert not any(m.training for m in frozen.modules())
    assert all(m.training for m in model.modules())
    assert [type(m) for m in model.modules()] == classes
    torch.testing.assert_close(model.state_dict(), state)


def test_freezing_twice_is_freezing_once() -> None:
    once = freeze(nn.Sequential(randomized(layers.BatchNormalNorm1d(6)), nn.Linear(6, 2)))
    x = torch.randn(3, 6)
    torch.testing.assert_close(freeze(once)(x), once(x), rtol=0, atol=0)


class Nested(nn.Module):
    """One layer under two names, in a plain list, in a dict, and a subclass deep inside."""

    class Special(fake_layers.BatchNormalNorm2d):
        """A user's subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = fake_layers.BatchNormalNorm2d(3)
        self.stages = nn.ModuleList([nn.Sequential(self.shared), nn.ModuleDict({"inner": self.Special(3)})])
        self.order = [self.shared]
        self.by_name = {"special": self.stages[1]["inner"]}

    def forward(self, x: Tensor) -> Tensor:
        return self.by_name["special"](self.order[0](self.stages[0](x)))


def test_shared_nested_and_subclassed_layers() -> None:
    frozen = freeze(Nested())
    assert frozen.shared is frozen.stages[0][0] is frozen.order[0]
    assert type(frozen.by_name["special"]) is FrozenBatchNormalNorm
    assert frozen(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)


def test_torchs_own_norms_pass_through() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.LayerNorm(4), nn.RMSNorm(4))
    assert [type(m) for m in freeze(model)] == [type(m) for m in model]


def test_a_layer_in_a_plain_list_alone_is_refused() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = [nn.Sequential(nn.ReLU()), fake_layers.LayerNormalNorm(4)]

    with pytest.raises(FreezeError, match=r"layer 0\.norms\[1\] \(LayerNormalNorm\): it is held in a plain list only"):
        freeze(nn.Sequential(Loose()))


class LayerNorm(nn.Module):
    """A namesake of the authors' layer that normalizes other axes."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.data_format = (4,), 1e-6, "channels_first"
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))


def test_a_namesake_without_the_attributes_is_unknown() -> None:
    with pytest.warns(UserWarning, match=r"norms that nnorm_export does not know .* \(LayerNorm: 0\)"):
        assert type(freeze(nn.Sequential(LayerNorm()))[0]) is LayerNorm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_an_operator_stay_float32_in_a_half_model(dtype: torch.dtype) -> None:
    frozen = freeze(nn.Sequential(nn.Linear(4, 6), randomized(layers.BatchNormalNorm1d(6))))
    kept = {name: buffer.clone() for name, buffer in frozen[1].named_buffers()}
    halved = frozen.to(dtype)
    assert halved[0].weight.dtype == dtype
    for name, buffer in halved[1].named_buffers():
        torch.testing.assert_close(buffer, kept[name], rtol=0, atol=0)
    assert halved(torch.randn(3, 4, dtype=dtype)).dtype == dtype


class RMSNormalization(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


class Gaussianize(nn.Module):
    """Named like nothing in the table, but it keeps a λ."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_lmbda", torch.ones(3))


def test_an_unknown_norm_is_plain_pytorch_and_named_once() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(RMSNormalization(), RMSNormalization()))
    with pytest.warns(
        UserWarning, match=r"\(RMSNormalization: 1\.0, 1\.1\); passthrough=\['RMSNormalization'\]"
    ) as warned:
        frozen = freeze(model)
    assert len(warned) == 1
    x = torch.randn(2, 4)
    torch.testing.assert_close(frozen(x), model(x), rtol=0, atol=0)
    with pytest.raises(FreezeError, match=r"RMSNormalization: 1\.0, 1\.1\), and strict=True .* refuses them"):
        freeze(model, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freeze(model, passthrough=[RMSNormalization], strict=True)


def test_an_unknown_layer_that_keeps_a_lmbda_is_refused_by_path_unless_passed_through() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Gaussianize()))
    with pytest.raises(FreezeError, match=r"layer 1\.0 \(Gaussianize\).*passthrough"):
        freeze(model)
    assert type(freeze(model, passthrough=["Gaussianize"])[1][0]) is Gaussianize
    assert type(freeze(model, passthrough=[Gaussianize])[1][0]) is Gaussianize


def test_a_wrapper_around_a_known_normalization_is_no_unknown_one() -> None:
    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = fake_layers.LayerNormalNorm(4)

    assert type(freeze(PreNorm()).norm) is FrozenLayerNormalNorm


def broken(**tensors: Tensor | float | bool) -> nn.Module:
    layer = fake_layers.BatchNormalNorm2d(3)
    for name, value in tensors.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (broken(running_var=torch.tensor([1.0, -1e-3, 1.0])), "running_var is negative in 1 of 3 channels"),
        (broken(running_var=torch.tensor([1.0, float("nan"), 1.0])), "running_var is not finite in 1 of 3"),
        (broken(running_var=torch.zeros(3), eps=0.0), r"running_var \+ eps is 0"),
        (
            broken(running_lmbda=torch.tensor([1.0, float("inf"), float("nan")])),
            "running_lmbda is not finite in 2 of 3",
        ),
        (broken(running_mean=torch.zeros(4)), r"running_mean has shape \[4\].*say \[3\]"),
        (broken(weight=nn.Parameter(torch.ones(5))), r"weight has shape \[5\].*say \[3\]"),
        (broken(eps=-1.0), "eps is -1"),
        (broken(track_running_stats=False), "keeps no running statistics"),
        (broken(running_mean=None), "running_mean is None"),
        (broken(variant="exact"), "variant is 'exact'"),
        (fake_layers.GroupNormalNorm(6, 4), "4 groups do not divide 6 channels"),
        (fake_layers.Standardize([0.0], [0.0]), "std is 0"),
        (fake_layers.BatchNorm2d(3, track_running_stats=False), "keeps no running statistics"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_impossible_state_is_refused_by_path(layer: nn.Module, reason: str) -> None:
    with pytest.raises(FreezeError, match=rf"layer body\.0 \({type(layer).__name__}\): .*{reason}"):
        freeze(nn.ModuleDict({"body": nn.Sequential(layer)}))


def test_hooks_that_would_be_lost_are_refused() -> None:
    layer = fake_layers.BatchNormalNorm2d(3)
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(FreezeError, match=r"layer 0 .*forward hooks"):
        freeze(nn.Sequential(layer))


def test_a_transformer_encoder_does_not_bypass_its_norms() -> None:
    """torch's fused inference path would run them as plain LayerNorms."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    encoder.layers[0].norm1, encoder.layers[0].norm2 = fake_layers.LayerNormalNorm(8), fake_layers.LayerNormalNorm(8)
    frozen, x = freeze(encoder), torch.randn(2, 3, 8)
    assert type(frozen.layers[0].norm1) is FrozenLayerNormalNorm
    with torch.no_grad():  # where the fused path would be taken
        fused = frozen(x)
    torch.testing.assert_close(fused, frozen(x).detach())


def test_what_is_no_module_and_what_cannot_be_copied() -> None:
    with pytest.raises(FreezeError, match=r"takes a torch\.nn\.Module, got dict"):
        freeze({})  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    model.leftover = model.weight * 2  # a tensor of a training step's graph
    assert not freeze(model).leftover.requires_grad
    model.lock = threading.Lock()
    with pytest.raises(FreezeError, match=r"cannot be deep-copied .* its attribute lock \(lock\) cannot be copied"):
        freeze(model)


class Halved(Freezable):
    """A user's layer that states what it is at inference."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2

    def frozen(self) -> nn.Module:
        return nn.Identity()


class Quartered(Halved):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 4


def test_a_layer_that_states_its_frozen_form_needs_no_row() -> None:
    assert type(freeze(nn.Sequential(Halved()))[0]) is nn.Identity
    with pytest.raises(FreezeError, match=r"layer 0 \(Quartered\): its class overrides forward of Halved"):
        freeze(nn.Sequential(Quartered()))


@pytest.mark.slow
def test_training_needs_neither_onnx_nor_onnxscript() -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(('onnx', 'onnxscript', 'onnx_ir', 'onnxruntime')))"
    train = (
        "import torch; from nnorm_export import layers; layers.LayerNormalNorm(4)(torch.randn(2, 4)).sum().backward()"
    )
    result = subprocess.run([sys.executable, "-c", f"{missing}; {train}"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_class_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="LayerNormalNorm"):
        register(Row(("LayerNormalNorm",), (), lambda layer, path: layer))
    with pytest.raises(ValueError, match="has a row for this class name"):  # by its base class
        register(Row(("EvoNormS0",), (), lambda layer, path: layer))

"""The user's code where this package runs it: it may exit, assert, be called within contexts, or hide a layer."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_network import randomized
from torch import Tensor, nn

from nnorm_export import (
    ExportError,
    FreezeError,
    InputError,
    NnormExportError,
    bisect,
    export,
    export_torchscript,
    freeze,
    layers,
    load,
    verify,
)
from nnorm_export.models.checkpoints import load_checkpoint
from nnorm_export.models.factory import build_model


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), randomized(layers.BatchNormalNorm1d(6)), nn.Linear(6, 3)).eval()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(network(), torch.ones(2, 4), tmp_path_factory.mktemp("plain") / "m.onnx", verify=False).path


class Calling(nn.Sequential):
    """The network, with a forward that calls ``action`` first."""

    def __init__(self, action: Callable[[Tensor], object]) -> None:
        super().__init__(*network())
        self.action = action

    def forward(self, x: Tensor) -> Tensor:
        self.action(x)
        y: Tensor = super().forward(x)
        return y


def leave(_: Any = None) -> None:
    raise SystemExit(0)


MODULES = {
    "at_import": "import sys\nsys.exit(0)\n",
    "in_factory": "import sys, torch\ndef build():\n    sys.exit(0)\n",
    "in_constructor": "import sys, torch\nclass build(torch.nn.Module):\n    def __init__(self):\n        sys.exit()\n",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_exits_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NnormExportError, match=rf"sys\.exit\(0?\) in module {name} \({name}\.py, line \d\)"):
        build_model(f"{name}:build")


class Exiting:
    """Ends the program when it is unpickled."""

    def __reduce__(self) -> Any:
        return leave, ()


def test_a_trusted_pickle_that_exits_is_an_error(tmp_path: Path) -> None:
    torch.save({"model": network().state_dict(), "hook": Exiting()}, tmp_path / "c.pth")
    with pytest.raises(NnormExportError, match=r"sys\.exit\(0\) in module test_user_code"):
        load_checkpoint(network(), tmp_path / "c.pth", trust_pickle=True)


def test_a_forward_that_exits_is_an_error(plain: Path, tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    calls: list[Callable[[], object]] = [
        lambda: verify(plain, Calling(leave), x),
        lambda: bisect(plain, Calling(leave), x),
        lambda: export(Calling(leave), x, tmp_path / "m.onnx"),
        lambda: export_torchscript(Calling(leave), x, tmp_path / "m.pt"),
    ]
    for call in calls:
        with pytest.raises(NnormExportError, match=r"sys\.exit\(0\) in module test_user_code"):
            call()

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(plain, Calling(interrupt), x)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_destructor_that_exits_changes_nothing(plain: Path) -> None:
    class Leaving(nn.Sequential):
        def __del__(self) -> None:
            leave()

    assert verify(plain, Leaving(*network()), torch.randn(5, 4))
    gc.collect()


@contextlib.contextmanager
def default_device(name: str) -> Any:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "meta by default": lambda: default_device("meta"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_around_a_call_do_not_reach_the_file(name: str, plain: Path, tmp_path: Path) -> None:
    model, x = network(), torch.randn(5, 4)
    expected = load(plain)(x.numpy())
    with CONTEXTS[name]():
        report = export(model, torch.empty(2, 4, device="cpu").fill_(1.0), tmp_path / "m.onnx")
        assert verify(report.path, model, x)
        enabled = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
    assert enabled == (name == "autocast", name == "inference mode")
    assert report.path.read_bytes() == plain.read_bytes()
    for array, other in zip(load(report.path)(x.numpy()), expected, strict=True):
        assert (array == other).all()


def test_inputs_that_do_not_fit_are_told_in_the_words_of_the_model(tmp_path: Path) -> None:
    def check(x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise KeyError("four features, please")

    with pytest.raises(InputError, match=r"Calling does not run on these inputs: KeyError: 'four features, please'"):
        export(Calling(check), torch.randn(2, 5), tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"Sequential does not run on these inputs: RuntimeError: mat1 and mat2"):
        export(network(), torch.randn(2, 5), tmp_path / "m.onnx")


@pytest.mark.slow
def test_the_dry_run_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.body = network()

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                self.calls += 1
            y: Tensor = self.body(x) + self.calls
            return y

    report = export(Counting(), torch.randn(2, 4), tmp_path / "m.onnx", verify=False)
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.from_numpy(load(report.path)(x.numpy())[0]), network()(x), rtol=1e-5, atol=1e-5)


class Box:
    """An object of the user's own kind, which freeze() does not look into."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("layer", [layers.LayerNormalNorm(4), nn.Dropout(0.5)], ids=lambda layer: type(layer).__name__)
def test_a_layer_that_only_forward_can_find_is_refused(layer: nn.Module, tmp_path: Path) -> None:
    model = Calling(Box(layer))
    with pytest.raises(FreezeError, match=rf"Calling calls a {type(layer).__name__} that is not one of its submodules"):
        export(model, torch.randn(2, 4), tmp_path / "m.onnx", verify=False)


@pytest.mark.parametrize("act", [lambda m, x, path: freeze(m), lambda m, x, path: verify(path, m, x)])
def test_a_model_without_values_is_refused(act: Any, plain: Path) -> None:
    with pytest.raises(FreezeError, match=r"0\.weight of Sequential is on the meta device.*assign=True"):
        act(network().to("meta"), torch.randn(2, 4), plain)


def test_one_name_is_not_a_list_of_names(plain: Path, tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    calls: dict[str, Callable[[], object]] = {
        r"passthrough is one string; give a list of names: \['L2Norm'\]": lambda: freeze(
            network(), passthrough="L2Norm"
        ),
        "passthrough is one string": lambda: export(network(), x, tmp_path / "m.onnx", passthrough="L2Norm"),
        r"passthrough is one class; give a list of names: \['Linear'\]": lambda: freeze(
            network(),
            passthrough=nn.Linear,  # type: ignore[arg-type]
        ),
        "input_names is one string": lambda: export(network(), x, tmp_path / "m.onnx", input_names="x"),
        "output_names is one string": lambda: export(network(), x, tmp_path / "m.onnx", output_names="y"),
        r"layers is one string; give a list of names: \['0'\]": lambda: bisect(plain, network(), x, layers="0"),
        "providers is one string": lambda: load(plain, providers="CPUExecutionProvider"),
    }
    for message, call in calls.items():
        with pytest.raises(NnormExportError, match=message):
            call()


def test_code_that_does_not_run_in_float64_is_compared_without_it(plain: Path) -> None:
    def single(x: Tensor) -> None:
        assert x.dtype == torch.float32

    def typed(x: Tensor) -> None:
        if x.dtype != torch.float32:
            raise TypeError(x.dtype)

    for check in (single, typed):
        report = verify(plain, Calling(check), torch.randn(8, 4))
        assert report
        assert "the model does not run in float64" in report.criterion


def test_a_trace_that_fails_says_where(tmp_path: Path) -> None:
    def branch(x: Tensor) -> None:
        if x.sum() > 0:
            return

    with pytest.raises(ExportError, match=r"torch\.export cannot trace Calling.*"):
        export(Calling(branch), torch.randn(2, 4), tmp_path / "m.onnx")

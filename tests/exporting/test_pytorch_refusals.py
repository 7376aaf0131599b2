"""What the exporters and load() refuse of PyTorch's formats, and in which words."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_writers import GRAPHS, WRITERS, Branching
from torch import Tensor, nn

from nnorm_export import (
    ExportError,
    FreezeError,
    InputError,
    ModelFileError,
    export,
    export_aoti,
    export_program,
    export_torchscript,
    layers,
    load,
)
from nnorm_export.files.inspection import describe
from nnorm_export.runtimes.describe_run import describe_run


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "int8"}, ExportError, "unknown dtype 'int8'"),
        ({"args": ()}, InputError, r"do not fit Network\.forward: missing a required argument: 'image'"),
        ({"args": 5}, InputError, "args is int; give a tuple of inputs, or one tensor"),
        ({"input_names": ["a", "b"]}, ExportError, "input_names has 2 names, the model has 1: image"),
        ({"output_names": ["image", "f", "f2"]}, ExportError, "two inputs or outputs would be called image"),
        ({"model": Branching()}, ExportError, r"torch\.export cannot trace Branching.*y\.sum\(\) > 0"),
        ({"model": nn.Sequential(layers.BatchNormalNorm2d(4))}, InputError, r"layer 0 \(.*\[N, 4, \*spatial\], got"),
        ({"f": "no/such/folder/"}, ExportError, "nothing was written"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_every_format_refuses_alike(
    name: str, change: dict[str, Any], error: type[Exception], message: str, network: nn.Module, image: Tensor,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"an older model")
    change = {key: f"{value}{name}" if key == "f" else value for key, value in change.items()}
    with pytest.raises(error, match=f"(?s){message}"):
        WRITERS[name](**{"model": network, "args": (image,), "f": name, **change})
    assert Path(name).read_bytes() == b"an older model"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (export_torchscript, {"method": "guess"}, "unknown method 'guess'; choose one of trace, script"),
        (export_torchscript, {"method": "script", "input_names": ["x"]}, "input_names needs method='trace'"),
        (export_program, {"operators": "all"}, "unknown operators 'all'; choose one of decomposed, kept"),
        (export_aoti, {"inductor_configs": {"frozen": True}}, "has no option frozen"),
    ],
)
def test_options_of_one_format(write: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        write(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "m.pt2", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("write", [export, export_torchscript, export_program, export_aoti])
def test_a_model_that_is_torchscript_is_refused_with_the_remedy(write: Any, tmp_path: Path) -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), layers.LayerNormalNorm(4)).eval(), torch.randn(2, 4))
    with pytest.raises(ExportError, match=r"the model \(Sequential\) is TorchScript.*give the Python module"):
        write(traced, torch.randn(2, 4), tmp_path / "m.pt2")


class RMSNormalization(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("write", [export, export_torchscript, export_program, export_aoti])
def test_strict_refuses_norms_that_are_unknown_and_names_them_all(write: Any, tmp_path: Path) -> None:
    model = nn.Sequential(RMSNormalization(), nn.Sequential(nn.LocalResponseNorm(2), RMSNormalization()))
    with pytest.raises(FreezeError, match=r"\(RMSNormalization: 0, 1\.1\), and strict=True \(--strict\) refuses them"):
        write(model, torch.randn(2, 4), tmp_path / "m.pt2", strict=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [export_program, export_aoti])
def test_pt2_is_the_only_ending_that_pytorch_loads(write: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"a file of .* ends in \.pt2; call it .*model\.pt2"):
        write(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "model.pt")


def test_what_cannot_be_scripted_is_named(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (lambda y: y + 1)(x)  # noqa: PLC3002 - what TorchScript has no word for

    with pytest.raises(ExportError, match=r"(?s)torch\.jit\.script cannot compile Odd.*lambda y.*method='trace'"):
        export_torchscript(Odd(), torch.randn(2, 3), tmp_path / "m.pt", method="script")
    assert export_torchscript(Odd(), torch.randn(2, 3), tmp_path / "m.pt").parity


@pytest.mark.slow
@pytest.mark.long
def test_a_package_for_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export_aoti(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "m.pt2").path
    assert load(path).implementations == {}
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ModelFileError, match=r"it is compiled for .*, and this is a riscv64 processor without"):
        load(path)


def test_pytorch_in_a_folder_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cannot find -ltorch")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "my clone" / "torch" / "__init__.py"))
    with pytest.raises(ExportError, match=r"my clone/torch, and Inductor gives .* in a folder without a space"):
        export_aoti(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()


@pytest.mark.slow
def test_without_a_compiler(tmp_path: Path) -> None:
    code = """
import torch, nnorm_export
try:
    nnorm_export.export_aoti(torch.nn.Linear(3, 2), torch.randn(2, 3), "m.pt2")
except nnorm_export.RuntimeMissingError as error:
    print(error.exit_code, error)
"""
    environment = {
        **os.environ,
        "CXX": "/nonexistent/c++",
        "PATH": "",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert run.stdout.startswith("3 AOTInductor compiles with a C++ compiler, and there is none"), run.stderr[-2000:]
    assert not (tmp_path / "m.pt2").exists()


@pytest.mark.parametrize("name", GRAPHS)
def test_axes_of_one_name_agree(name: str, tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    path = GRAPHS[name](Sum(), (torch.randn(2, 4), torch.randn(2, 4)), tmp_path / name).path
    with pytest.raises(InputError, match="axis batch is 4 in input x and 2 in y"):
        load(path)(np.zeros((4, 4), np.float32), np.zeros((2, 4), np.float32))


def test_numbers_are_no_outputs(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x * 2, x.shape[0]

    with pytest.raises(ExportError, match="return tensors only"):
        export_program(Counting(), torch.randn(3, 4), tmp_path / "m.pt2")


def test_a_scripted_model_on_inputs_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear does not run on these inputs"):
        export_torchscript(nn.Linear(4, 3), torch.randn(2, 5), tmp_path / "m.pt", method="script")

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, 2, 2)

    with pytest.raises(InputError, match="Pair does not run on these inputs"):
        export_torchscript(Pair(), torch.randn(2, 4), tmp_path / "m.pt", method="script")
    assert export_torchscript(Pair(), torch.randn(2, 4), tmp_path / "m.pt", method="script", dynamic_shapes={}).parity


def test_torchscript_warns_on_unsupported_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnorm_export.exporting.formats.torchscript._UNSUPPORTED_PYTHON", sys.version_info[:2])
    with pytest.warns(UserWarning, match="TorchScript is deprecated.*successors are the targets pt2 and aoti"):
        export_torchscript(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "m.pt")


@pytest.mark.slow
def test_files_of_others_and_damaged_ones(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)), str(tmp_path / "theirs.pt"))
    assert describe(tmp_path / "theirs.pt").producer == "unknown"
    assert "nnorm_export did not write this file" in (describe_run(tmp_path / "theirs.pt").runtime_problem or "")
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ModelFileError, match=r"neither TorchScript, nor .* --checkpoint"):
        load(tmp_path / "weights.pth")
    path = export_program(network, image, tmp_path / "m.pt2").path
    with pytest.raises(ModelFileError, match="the runtime torchscript cannot open it; choose one of pt2"):
        load(path, "torchscript")
    with pytest.raises(ModelFileError, match="no such file"):
        load(tmp_path / "nothing.pt2", "pt2")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "damaged.pt2", "w") as damaged:
        for entry in whole.namelist():
            data = whole.read(entry)
            damaged.writestr(entry, data[: len(data) // 2] if entry.endswith("nnorm_export.json") else data)
    with pytest.raises(ModelFileError, match=r"its entry nnorm_export\.json is damaged"):
        load(tmp_path / "damaged.pt2")
    (tmp_path / "cut.pt2").write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ModelFileError):
        load(tmp_path / "cut.pt2", "pt2")

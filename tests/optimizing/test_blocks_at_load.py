"""load() opens a portable file with norms in the layout of its convolutions: the same bits, or the file as it is."""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conv_networks import CASES, SHAPE, SKIPS, Block, conv_norm_relu
from sampled import every_second
from torch import nn
from typer.testing import CliRunner

from nnorm_export import (
    ModelFileError,
    NnormExportError,
    RuntimeMissingError,
    diagnose,
    export,
    library,
    load,
    optimize,
    register,
)
from nnorm_export.cli import app
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.runtimes.onnxruntime import session
from nnorm_export.runtimes.onnxruntime.blocked_layout import at_load

pytestmark = SKIPS
IMAGES = np.random.default_rng(0).standard_normal((3, *SHAPE[1:])).astype(np.float32)


def portable(network: nn.Module, path: Path, **options: Any) -> Path:
    return export(network, (torch.randn(SHAPE),), path, **{"verify": False, **options}).path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = nn.Sequential(conv_norm_relu(3, 16), Block(16, 32), nn.Flatten(), nn.Linear(2016, 5)).eval()
    return portable(network, tmp_path_factory.mktemp("source") / "net.onnx")


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """The graphs that load() rewrote."""
    graphs: list[onnx.ModelProto] = []
    rewrite = at_load.rewrite

    def noted(written: Path, path: Path, *arguments: Any) -> list[str]:
        found = rewrite(written, path, *arguments)
        graphs.extend([onnx.load(path)] if found else [])
        return found

    monkeypatch.setattr(at_load, "rewrite", noted)
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(CASES))
def test_the_same_bits_as_the_file_as_it_is(name: str, tmp_path: Path, rewritten: list[onnx.ModelProto]) -> None:
    path = portable(CASES[name].network(), tmp_path / "net.onnx")
    runner, as_it_is = load(path), load(path, optimize=False)
    report = optimize(path, tmp_path / "net.cpu.onnx")
    assert sorted(runner.in_blocks) == sorted(n.name for n in onnx.load(report.path).graph.node if "Nchwc" in n.op_type)
    assert len(runner.in_blocks) == len(report.in_blocks)
    assert not as_it_is.in_blocks
    assert runner.implementations == as_it_is.implementations
    assert set(runner.implementations.values()) == {"kernel"}
    if report.in_blocks:  # their operators have no bodies, so that only kernels can run them
        assert [node.name for node in rewritten[0].graph.node if "Nchwc" in node.op_type] == list(runner.in_blocks)
        assert not rewritten[0].functions
        assert f"{len(report.in_blocks)} of them in blocks of channels" in repr(runner)
    for rows in (0, 1, 2, 5):
        x = np.random.default_rng(rows).standard_normal((rows, *SHAPE[1:])).astype(np.float32)
        for mine, plain in zip(runner(x), as_it_is(x), strict=True):
            np.testing.assert_array_equal(mine, plain)


def test_the_rewritten_graph_is_what_runs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite = at_load.rewrite

    def with_other_weights(written: Path, path: Path, *arguments: Any) -> list[str]:
        found = rewrite(written, path, *arguments)
        model = onnx.load(path)
        bias = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [5])
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(1), bias.name))
        onnx.save(model, path)
        return found

    expected = load(source)(IMAGES)[0]
    monkeypatch.setattr(at_load, "rewrite", with_other_weights)
    np.testing.assert_allclose(load(source)(IMAGES)[0], expected + 1, atol=1e-5)
    np.testing.assert_array_equal(load(source, optimize=False)(IMAGES)[0], expected)


def test_what_runs_the_file_as_it_is(source: Path, rewritten: list[onnx.ModelProto]) -> None:
    session_options = onnxruntime.SessionOptions()
    register(session_options)
    optimized = optimize(source, source.with_name("net.cpu.onnx"), verify=False).path
    runners = [
        load(source, optimize=False),
        load(source, kernels=False),
        load(source, "reference"),
        load(source, session_options=session_options),
        load(optimized),
        load(optimized, optimize=True),
    ]
    assert [list(runner.in_blocks) for runner in runners] == [[]] * 6
    assert not rewritten


def test_files_without_a_gain_take_no_second_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> list[str]:
        raise AssertionError

    monkeypatch.setattr(at_load, "rewrite", unexpected)
    rows = export(nn.Sequential(LayerNormalNorm(8)), torch.randn(3, 8), tmp_path / "rows.onnx", verify=False).path
    odd = portable(conv_norm_relu(3, 10).eval(), tmp_path / "odd.onnx")  # 10 channels are not whole blocks
    inlined = portable(conv_norm_relu(3, 16).eval(), tmp_path / "plain.onnx", form="primitives")
    for path in (rows, odd, inlined):
        assert not load(path, optimize=True).in_blocks


@pytest.mark.parametrize("external_data", [False, True])
def test_large_files_are_rewritten_if_that_is_asked_for(
    external_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(conv_norm_relu(3, 16), conv_norm_relu(16, 16), nn.Flatten(), nn.Linear(1008, 50))
    path = portable(network.eval(), tmp_path / "net.onnx", external_data=external_data)
    assert load(path).in_blocks
    monkeypatch.setattr(at_load, "MOST_BYTES", 200_000)  # the weights of the last layer have 201,600
    assert not load(path).in_blocks
    assert load(path, optimize=True).in_blocks


def test_what_cannot_be_rewritten_is_opened_as_it_is_with_a_warning(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(source, optimize=False)(IMAGES)[0]
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.warns(UserWarning, match=r"net\.onnx: its norms do not work in .* slower: .*No such file"):
            runner = load(source)
        np.testing.assert_array_equal(runner(IMAGES)[0], expected)
        assert not runner.in_blocks
        with pytest.raises(NnormExportError, match=r"optimize=True takes .*TMPDIR"):
            load(source, optimize=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnx_ir", None)
        with pytest.warns(UserWarning, match="slower: .*onnx_ir.*pip install onnx_ir networkx"):
            assert not load(source).in_blocks
        with pytest.raises(RuntimeMissingError, match="pip install onnx_ir networkx"):
            load(source, optimize=True)


def test_doctor_says_which_norms_work_in_blocks(source: Path) -> None:
    found = next(each for each in diagnose(source).runtimes if each.runtime == "onnxruntime")
    assert found.in_blocks == list(load(source).in_blocks) != []
    output = CliRunner().invoke(app, ["doctor", str(source)]).output
    assert f"{len(found.implementations)} by kernel, {len(found.in_blocks)} in the layout of convolutions" in output


def test_external_data_that_are_missing_are_named(tmp_path: Path) -> None:
    network = nn.Sequential(conv_norm_relu(3, 16), conv_norm_relu(16, 16)).eval()
    path = portable(network, tmp_path / "net.onnx", external_data=True)
    assert load(path).in_blocks
    (data,) = path.parent.glob("*.data")
    data.unlink()
    for optimize_ in (None, True, False):
        with pytest.raises(ModelFileError, match=rf"its weights lie in {data.name}, which is not beside it"):
            load(path, optimize=optimize_)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("session.save_model_format", "ORT"),
        ("session.optimized_model_external_initializers_min_size_in_bytes", "0"),
        ("session.optimized_model_external_initializers_file_name", "others"),
    ],
)
def test_how_the_caller_saves_graphs_changes_nothing(key: str, value: str, source: Path) -> None:
    runner = load(source, session_config={key: value})
    assert runner.in_blocks
    assert set(runner.implementations.values()) == {"kernel"}
    np.testing.assert_array_equal(runner(IMAGES)[0], load(source, optimize=False)(IMAGES)[0])


def test_without_memory_for_the_second_graph_the_file_is_opened_as_it_is(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[str]:
        raise MemoryError

    monkeypatch.setattr(at_load, "rewrite", fail)
    with pytest.warns(UserWarning, match="which is slower: MemoryError"):
        assert not load(source).in_blocks
    with pytest.raises(NnormExportError, match=r"optimize=True takes memory .*MemoryError"):
        load(source, optimize=True)


def test_a_full_disk_is_not_an_error_of_the_file(source: Path) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no limits")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    load(source)  # compiles what is imported
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))  # Python ignores the signal
    try:
        with pytest.warns(UserWarning, match="slower: ") as caught:
            assert not load(source).in_blocks
        with pytest.raises(NnormExportError, match="TMPDIR") as raised:
            load(source, optimize=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    for text in (str(caught[0].message), str(raised.value)):
        assert "cannot load it" not in text
        assert "weights" in text


def test_nothing_is_left_behind(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner = load(source)
    assert runner.in_blocks
    assert not list(tmp_path.iterdir())
    assert runner(IMAGES)[0].shape == (3, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what is mapped")
def test_where_mapped_files_cannot_be_removed_none_is_mapped(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/weights (deleted)")

    gc.collect()
    others = mapped()
    expected = load(source, optimize=False)(IMAGES)[0]
    runner = load(source)
    assert mapped() > others
    del runner
    gc.collect()
    assert mapped() == others
    monkeypatch.setattr(at_load, "KEEPS_MAPPED_FILES", True)  # as on Windows
    runner = load(source)
    assert runner.in_blocks
    assert mapped() == others
    np.testing.assert_array_equal(runner(IMAGES)[0], expected)
    monkeypatch.setattr(at_load, "MOST_BYTES", 1000)
    assert not load(source).in_blocks
    with pytest.raises(NnormExportError, match="weights of up to 1 GiB on this system"):
        load(source, optimize=True)


def test_one_file_is_opened_while_another_is(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)
    open_session = session.open_session

    def opened(*arguments: Any) -> Any:
        both.wait()  # for the other thread, which opens a session at the same time
        return open_session(*arguments)

    monkeypatch.setattr(session, "open_session", opened)
    with ThreadPoolExecutor(2) as pool:
        runners = list(pool.map(load, [source, source]))
    assert all(runner.in_blocks for runner in runners)


def test_options_that_cannot_be_met(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NnormExportError, match="by kernels on the CPU"):
        load(source, optimize=True, kernels=False)
    with pytest.raises(NnormExportError, match="optimize: session_options are used unchanged"):
        load(source, optimize=True, session_options=onnxruntime.SessionOptions())
    monkeypatch.setattr(library, "find_library", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not load(source).in_blocks

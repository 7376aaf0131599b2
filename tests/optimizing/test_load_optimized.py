"""load_optimized(): the speed of an optimized file from the portable one, made once for each file and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conv_networks import SHAPE, SKIPS, Block, conv_norm_relu
from torch import nn

import nnorm_export
from nnorm_export import ExportError, ModelFileError, library, load, load_optimized, register
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.optimizing import load_optimized as load_optimized_module

pytestmark = [*SKIPS, pytest.mark.slow]

IMAGES = np.random.default_rng(0).standard_normal((3, *SHAPE[1:])).astype(np.float32)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = nn.Sequential(conv_norm_relu(3, 16), Block(16, 32), nn.Flatten(), nn.Linear(2016, 5)).eval()
    path = tmp_path_factory.mktemp("portable") / "net.onnx"
    return nnorm_export.export(network, (torch.randn(SHAPE),), path, verify=False).path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were optimized."""
    paths: list[Path] = []
    optimize = load_optimized_module.optimize

    def counted(path: Path, output: Path, **options: Any) -> Any:
        paths.append(output)
        return optimize(path, output, **options)

    monkeypatch.setattr(load_optimized_module, "optimize", counted)
    return paths


def test_the_file_is_optimized_once_and_computes_the_same(portable: Path, tmp_path: Path, made: list[Path]) -> None:
    expected = load(portable)(IMAGES)[0]
    for _ in range(2):
        runner = load_optimized(portable, cache=tmp_path / "a" / "cache")
        np.testing.assert_allclose(runner(IMAGES)[0], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
        assert set(runner.implementations.values()) == {"kernel"}
    assert len(made) == 1
    assert any(node.op_type.startswith("NchwcBatchNormalNorm") for node in onnx.load(made[0]).graph.node)
    options = onnxruntime.SessionOptions()
    register(options)
    np.testing.assert_array_equal(
        load_optimized(portable, cache=tmp_path / "a" / "cache", session_options=options)(IMAGES)[0], runner(IMAGES)[0]
    )
    assert [path.parent for path in made] == [tmp_path / "a" / "cache"]


def test_other_weights_are_another_file(portable: Path, tmp_path: Path, made: list[Path]) -> None:
    model = onnx.load(portable)
    weight = next(tensor for tensor in model.graph.initializer if 2016 in tensor.dims)
    for name in ("one", "two"):
        array = onnx.numpy_helper.to_array(weight) + np.float32(name == "two")
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
        copy, options = onnx.ModelProto.FromString(model.SerializeToString()), {"size_threshold": 64}
        onnx.save_model(copy, tmp_path / f"{name}.onnx", save_as_external_data=True, location=f"{name}.data", **options)

    def logits(name: str) -> Any:
        result = load_optimized(tmp_path / f"{name}.onnx", cache=tmp_path / "cache")(IMAGES)[0]
        expected = load(tmp_path / f"{name}.onnx")(IMAGES)[0]
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
        return result

    one, two = logits("one"), logits("two")
    assert not np.allclose(one, two)
    (tmp_path / "one.data").write_bytes((tmp_path / "two.data").read_bytes())  # the same file, other weights beside it
    np.testing.assert_array_equal(logits("one"), two)
    assert len(made) == len(set(made)) == 3


def test_what_gains_nothing_is_opened_as_it_is(tmp_path: Path, made: list[Path], portable: Path) -> None:
    path = tmp_path / "rows.onnx"
    nnorm_export.export(nn.Sequential(LayerNormalNorm(8), nn.Linear(8, 2)), (torch.randn(3, 8),), path, verify=False)
    for _ in range(2):
        runner = load_optimized(path, cache=tmp_path / "cache")
        assert runner(np.ones((2, 8), np.float32))[0].shape == (2, 2)
    assert len(made) == 1
    assert not made[0].exists()

    optimized = nnorm_export.optimize(portable, tmp_path / "net.cpu.onnx").path
    assert nnorm_export.files.onnx_file.read(optimized).form == OPTIMIZED
    load_optimized(optimized, cache=tmp_path / "cache")
    assert len(made) == 1


def test_threads_with_a_cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds its file removed by the first."""
    path = tmp_path / "rows.onnx"
    nnorm_export.export(nn.Sequential(LayerNormalNorm(8), nn.Linear(8, 2)), (torch.randn(3, 8),), path, verify=False)
    optimize = load_optimized_module.optimize

    def removed(path: Path, output: Path, **options: Any) -> Any:
        report = optimize(path, output, **options)
        output.unlink()
        return report

    monkeypatch.setattr(load_optimized_module, "optimize", removed)
    assert load_optimized(path, cache=tmp_path / "cache")(np.ones((2, 8), np.float32))[0].shape == (2, 2)


def test_without_kernels_the_bodies_run(
    portable: Path, tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find_library", lambda: None)
    with pytest.warns(UserWarning, match="kernels"):
        runner = load_optimized(portable, cache=tmp_path / "cache")
    assert set(runner.implementations.values()) == {"body"}
    assert not made


def test_a_damaged_entry_is_made_again(portable: Path, tmp_path: Path, made: list[Path]) -> None:
    load_optimized(portable, cache=tmp_path)
    made[0].write_bytes(made[0].read_bytes()[:100])
    assert load_optimized(portable, cache=tmp_path)(IMAGES)[0].shape == (3, 5)
    assert made[0] == made[1]


def test_a_folder_that_cannot_be_written_and_a_missing_file(portable: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="name another folder with cache="):
        load_optimized(portable, cache=tmp_path / "file" / "cache")
    with pytest.raises(ModelFileError, match="no such file"):
        load_optimized(tmp_path / "missing.onnx", cache=tmp_path)

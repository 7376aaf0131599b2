"""load_optimized() opens a kept file only if it was made of the given file, is unchanged, and is this user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conv_networks import SHAPE, SKIPS, Mean, conv, conv_norm_relu
from torch import nn

import nnorm_export
from nnorm_export import ExportError, InputError, load, load_optimized
from nnorm_export.optimizing import kept_files, load_optimized as load_optimized_module

pytestmark = SKIPS

IMAGES = np.random.default_rng(0).standard_normal((3, *SHAPE[1:])).astype(np.float32)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files of one network with other weights."""
    folder = tmp_path_factory.mktemp("versions")
    network = nn.Sequential(conv_norm_relu(3, 16), conv(16, 16), Mean()).eval()
    example, paths = (torch.randn(SHAPE),), (folder / "old.onnx", folder / "new.onnx")
    for path in paths:
        nnorm_export.export(network, example, path, verify=False)
        nn.init.normal_(network[1].weight)
    return paths


@pytest.fixture
def served(versions: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copy(versions[0], tmp_path / "served.onnx")


def replaced(path: Path, by: Path) -> None:
    os.replace(shutil.copy(by, path.with_suffix(".new")), path)


def with_external_data(path: Path) -> None:
    model = onnx.load(path)
    options: dict[str, Any] = {"location": f"{path.name}.data", "size_threshold": 64}
    onnx.save_model(model, path, save_as_external_data=True, **options)


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=0, atol=1e-5))


@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
@pytest.mark.parametrize("moment", ["before the file is read", "before the comparison"])
def test_a_deployment_meanwhile_and_a_roll_back(
    served: Path, versions: tuple[Path, Path], tmp_path: Path, monkeypatch: Any, moment: str, external: bool
) -> None:
    old = load(versions[0])(IMAGES)[0]
    if external:
        with_external_data(served)
    kept = {file: file.read_bytes() for file in tmp_path.iterdir()}
    module, name = load_optimized_module, "optimize"
    if moment == "before the comparison":
        module, name = nnorm_export.optimizing.optimize, "compare"
    original = getattr(module, name)

    def deployed(*args: Any, **options: Any) -> Any:
        replaced(served, versions[1])
        return original(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, deployed)
        assert close(load_optimized(served, cache=tmp_path / "cache")(IMAGES)[0], old)
    assert not close(load_optimized(served, cache=tmp_path / "cache")(IMAGES)[0], old)
    for file, content in kept.items():
        file.write_bytes(content)
    assert close(load_optimized(served, cache=tmp_path / "cache")(IMAGES)[0], old)


def entry(cache: Path) -> Path:
    (made,) = cache.glob("*.onnx")
    return made


def flipped(made: Path) -> None:
    content = bytearray(made.read_bytes())
    content[content.find(b"Conv") - 1000] ^= 0x40
    made.write_bytes(content)


def linked(made: Path) -> None:
    made.rename(made.with_suffix(".elsewhere"))
    made.symlink_to(made.with_suffix(".elsewhere"))


def another(made: Path) -> None:
    shutil.copy(made.parents[1] / "other.onnx", made)


def owned_by_another(made: Path) -> None:
    another(made)
    os.chown(made, 12345, -1)


def writable_by_others(made: Path) -> None:
    made.chmod(0o666)


def without_record(made: Path) -> None:
    made.with_suffix(".sha256").unlink()


def false_record(made: Path) -> None:
    another(made)
    made.with_suffix(".sha256").write_text("gains nothing" * 99)


ROOT = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files to others")


@pytest.mark.parametrize(
    "spoil",
    [
        flipped,
        linked,
        another,
        pytest.param(owned_by_another, marks=ROOT),
        writable_by_others,
        without_record,
        false_record,
    ],
)
def test_an_entry_that_is_not_what_was_written_is_made_again(
    served: Path, versions: tuple[Path, Path], tmp_path: Path, monkeypatch: Any, spoil: Callable[[Path], None]
) -> None:
    cache, calls = tmp_path / "cache", []
    expected = load_optimized(served, cache=cache)(IMAGES)[0]
    shutil.copy(versions[1], tmp_path / "other.onnx")
    spoil(entry(cache))
    optimize = load_optimized_module.optimize
    monkeypatch.setattr(load_optimized_module, "optimize", lambda *a, **k: (calls.append(a), optimize(*a, **k))[1])
    for _ in range(2):
        np.testing.assert_array_equal(load_optimized(served, cache=cache)(IMAGES)[0], expected)
    assert len(calls) == 1
    assert not entry(cache).is_symlink()
    assert entry(cache).stat().st_mode & 0o022 == 0


def foreign(folder: Path) -> None:
    os.chown(folder, 12345, -1)


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


@pytest.mark.parametrize("spoil", [pytest.param(foreign, marks=ROOT), open_to_all])
def test_a_folder_of_others_is_not_used(served: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    cache = tmp_path / "cache"
    load_optimized(served, cache=cache)
    spoil(cache)
    with pytest.raises(ExportError, match=r"other users may write to it|another user owns it"):
        load_optimized(served, cache=cache)
    cache.chmod(0o1777)  # in a sticky folder nobody replaces the files of others
    if spoil is open_to_all:
        load_optimized(served, cache=cache)


def no_home(home: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(kept_files.platformdirs, "user_cache_dir", lambda name: f"~no-such-user/{name}")


def home_is_a_file(home: Path, monkeypatch: Any) -> None:
    home.write_text("")


def home_of_others(home: Path, monkeypatch: Any) -> None:
    (home / "nnorm_export").mkdir(parents=True)
    (home / "nnorm_export").chmod(0o777)


def full_disk(home: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)


def unreadable(home: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Path, "lstat", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))


@pytest.mark.parametrize("spoil", [no_home, home_is_a_file, home_of_others, full_disk, unreadable])
def test_without_a_usable_home_the_file_itself_runs(
    served: Path, tmp_path: Path, monkeypatch: Any, spoil: Callable[[Path, Any], None]
) -> None:
    expected = load(served)(IMAGES)[0]
    home = tmp_path / "home"
    monkeypatch.setattr(kept_files.platformdirs, "user_cache_dir", lambda name: str(home / name))
    with monkeypatch.context() as patched:
        spoil(home, patched)
        with pytest.warns(UserWarning, match="runs as it is, which is slower"):
            runner = load_optimized(str(served))
    np.testing.assert_array_equal(runner(IMAGES)[0], expected)


def test_an_error_names_the_file_and_not_its_copy(served: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        load_optimized(served, cache=tmp_path / "cache", inputs=[IMAGES[:0]])
    assert tempfile.gettempdir() not in str(raised.value).replace(str(tmp_path), "")

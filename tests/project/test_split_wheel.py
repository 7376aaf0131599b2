"""scripts/split_wheel.py: what was split comes back bit for bit, and whatever was damaged on the way is refused."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "split_wheel.py"
PART = 1000


@pytest.fixture(scope="module")
def split_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("split_wheel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parts(split_wheel: ModuleType, tmp_path: Path) -> Path:
    """The folder of a file in four parts, the last shorter."""
    file = tmp_path / "some.whl"
    file.write_bytes(random.Random(0).randbytes(3 * PART + 7))
    assert split_wheel.main(["split", str(file), "--size", str(PART), "-o", str(tmp_path / "parts")]) == 0
    return tmp_path / "parts"


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 4 * PART])
def test_round_trip(split_wheel: ModuleType, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, parts, back = tmp_path / "some.whl", tmp_path / "new" / "parts", tmp_path / "back"
    file.write_bytes(random.Random(size).randbytes(size))
    back.mkdir()
    assert split_wheel.main(["split", str(file), "--size", str(PART), "-o", str(parts)]) == 0
    manifest = json.loads((parts / "manifest.json").read_text())
    assert [part["size"] for part in manifest["parts"]] == [PART] * (size // PART) + [size % PART] * (size % PART > 0)
    assert sorted(path.name for path in parts.iterdir()) == ["manifest.json", *(p["name"] for p in manifest["parts"])]
    assert split_wheel.main(["join", str(parts), "-o", str(back)]) == 0  # a folder: the file keeps its name
    assert [path.name for path in back.iterdir()] == ["some.whl"]
    assert (back / "some.whl").read_bytes() == file.read_bytes()
    assert capsys.readouterr().err == ""


def test_pieces_smaller_than_a_part(split_wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(split_wheel, "PIECE", 7)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)))
    split_wheel.split(file, 50, tmp_path / "parts")
    assert split_wheel.join(tmp_path / "parts", tmp_path / "back").read_bytes() == bytes(range(200))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_manifest_hash(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    "part-0002 is missing": lambda folder: (folder / "part-0002").unlink(),
    "part-0001 is damaged": lambda folder: flip(folder / "part-0001"),
    "part-0003 is damaged": lambda folder: (folder / "part-0003").write_bytes(b""),
    "has no manifest.json": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": lambda folder: (folder / "manifest.json").write_text("{"),
    "is not of the format": lambda folder: (folder / "manifest.json").write_text("[]"),
    "not those of some.whl": swap_manifest_hash,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damage_is_refused_and_leaves_no_file(
    split_wheel: ModuleType, message: str, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[message](parts)
    out = tmp_path / "out"
    out.mkdir()
    (out / "some.whl").write_bytes(b"an older one")
    assert split_wheel.main(["join", str(parts), "-o", str(out / "some.whl")]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["some.whl"]
    assert (out / "some.whl").read_bytes() == b"an older one"


def test_a_folder_in_use_and_a_missing_file_are_refused(
    split_wheel: ModuleType, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert split_wheel.main(["split", str(tmp_path / "some.whl"), "-o", str(parts)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert split_wheel.main(["split", str(tmp_path / "none.whl"), "-o", str(tmp_path / "new")]) == 1
    assert "none.whl is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("3k", 3 << 10), ("20M", 20 << 20), ("2G", 2 << 30)])
def test_sizes(split_wheel: ModuleType, text: str, size: int) -> None:
    assert split_wheel.parse_size(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "1.5M", "20MB", "many"])
def test_invalid_sizes(split_wheel: ModuleType, text: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        split_wheel.main(["split", str(tmp_path), f"--size={text}", "-o", str(tmp_path)])


def test_as_a_program(parts: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "join", str(parts), "-o", str(tmp_path / "again.whl")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(tmp_path / "again.whl")
    assert (tmp_path / "again.whl").read_bytes() == (tmp_path / "some.whl").read_bytes()
